"""Hints from failed steps. No tensors here."""

from trainer.hints.generate import (
    Hint,
    HintContext,
    HintGenerator,
    JudgeHints,
    hint_for_row,
    layered,
    raw_error_hint,
    template_hint,
)

__all__ = [
    "Hint",
    "HintContext",
    "HintGenerator",
    "JudgeHints",
    "hint_for_row",
    "layered",
    "raw_error_hint",
    "template_hint",
]
