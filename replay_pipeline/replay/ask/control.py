"""Measure how often a student, asked again, takes another action than the recorded one.

A replay may differ from the original call in its system prompt, tools, and sampling. If even the
student's own model disagrees with its recording, a teacher's disagreement means little. So publish
this figure with the dataset.
"""

import hashlib
import heapq
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from replay_pipeline.actions import LEVELS, agreement_level, agrees_at, canonical_action
from replay_pipeline.errors import ConfigError
from replay_pipeline.judge.precision import wilson_interval
from replay_pipeline.replay.ask.asking import AskingOptions
from replay_pipeline.replay.ask.run import replay_in_thread
from replay_pipeline.types import (
    AgreementLevel,
    Progress,
    TeacherAction,
    TeacherSpec,
    TraceState,
)

logger = logging.getLogger(__name__)

_PREFIX = "control:"
_CLAUDE = re.compile(r"claude-(?P<name>[a-z]+)-(?P<major>\d+)(?:-(?P<minor>\d{1,2}))?(?:-\d{8})?$")
_OLD_CLAUDE = re.compile(r"claude-(?P<major>\d+)(?:-(?P<minor>\d{1,2}))?-(?P<name>[a-z]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlReport:
    """The results of asking the student's own model again at a sample of states."""

    n_states: int
    """States in the sample."""
    n_valid: int
    """Answers with a usable action."""
    same: Mapping[str, float]
    """Share of valid answers that repeat the recorded action, by level of agreement."""
    left: float | None
    """Share of valid answers that differ from the recorded action at `level`, or None without
    answers."""
    left_interval: tuple[float, float] | None
    """95 % interval of `left` (Wilson)."""
    level: str
    models: dict[str, int]
    """Number of sampled states by the model that was asked."""
    errors: dict[str, int]
    spent_usd: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


def control(
    states: Iterable[TraceState],
    *,
    max_total_usd: float,
    n_states: int = 50,
    teacher: TeacherSpec | None = None,
    ledger: str | Path | None = None,
    tick: Callable[[Progress], None] | None = None,
    **options: Unpack[AskingOptions],
) -> ControlReport:
    """Ask the student's own model again at a sample of states, and compare.

    The answers are only for measuring. The ledger keeps them under `control:MODEL`. They are never
    training data, so no vendor's terms on training apply.

    Args:
        states: replayed states. States without a `student_model` are left out.
        max_total_usd: hard ceiling in US dollars.
        n_states: size of the sample. It is drawn by hash, so every run draws the same states.
        teacher: address, key, and parameters for asking the student. Its model is replaced by the
            student's. By default, OpenRouter.
        ledger: as for `replay_states`.
        tick: called with the progress about once a second.
        options: how to ask, see `Asking`. `level` decides when an answer agrees with the recording.

    Raises:
        ConfigError: no state says which model wrote it.
    """
    sample = _sample(states, n_states)
    if not sample:
        raise ConfigError("control: no state names the model that recorded it (student_model)")
    base = teacher or TeacherSpec(name="student", model="student")
    by_model: dict[str, list[TraceState]] = {}
    for state in sample:
        by_model.setdefault(openrouter_name(str(state.get("student_model"))), []).append(state)
    answers: list[TeacherAction] = []
    left_usd, spent_usd = max_total_usd, 0.0
    for model, group in by_model.items():
        student = base.model_copy(
            update={"name": _PREFIX + model, "model": model, "is_distillable": False}
        )
        options["accepted_terms"] = (model,)
        report = replay_in_thread(
            group, [student], max_total_usd=max(0.0, left_usd), ledger=ledger, tick=tick, **options
        )
        answers += report.actions
        spent_usd += report.spent_usd
        left_usd -= report.spent_usd + report.unknown_usd
    models = {model: len(group) for model, group in by_model.items()}
    return _compare(sample, answers, options.get("level", "effect"), models, spent_usd)


def openrouter_name(model: str) -> str:
    """Return OpenRouter's name for a recorded model.

    >>> (
    ...     openrouter_name("claude-opus-4-5-20251101"),
    ...     openrouter_name("claude-3-5-sonnet-20241022"),
    ...     openrouter_name("a/b"),
    ... )
    ('anthropic/claude-opus-4.5', 'anthropic/claude-3.5-sonnet', 'a/b')
    """
    if "/" in model:
        return model
    if found := _CLAUDE.match(model):
        return f"anthropic/claude-{found['name']}-{_version(found)}"
    if found := _OLD_CLAUDE.match(model):
        return f"anthropic/claude-{_version(found)}-{found['name']}"
    return model


def _version(found: re.Match[str]) -> str:
    return f"{found['major']}.{found['minor']}" if found["minor"] else found["major"]


def _sample(states: Iterable[TraceState], n_states: int) -> list[TraceState]:
    known = (state for state in states if state.get("student_model"))
    chosen = heapq.nsmallest(
        n_states, known, key=lambda state: hashlib.sha256(state["state_id"].encode()).digest()
    )
    return sorted(
        chosen,
        key=lambda state: (state.get("session_id", ""), state.get("turn_idx", 0)),
    )


def _compare(
    sample: Sequence[TraceState],
    answers: Iterable[TeacherAction],
    level: AgreementLevel,
    models: dict[str, int],
    spent_usd: float,
) -> ControlReport:
    by_id = {state["state_id"]: state for state in sample}
    same: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    n_valid = 0
    for answer in answers:
        if answer.error_code or answer.action is None:
            errors[answer.error_code or "no_action"] += 1
            continue
        state = by_id[answer.state_id]
        cwd = state.get("cwd")
        try:
            recorded = canonical_action(state["student_action"], cwd=cwd)
            found = agreement_level(canonical_action(answer.action, cwd=cwd), recorded)
        except Exception:
            logger.exception("the answer at %s", answer.state_id)
            errors["unreadable"] += 1
            continue
        n_valid += 1
        same.update(each for each in LEVELS if agrees_at(each, found))
    shares: dict[str, float] = (
        {each: round(same[each] / n_valid, 4) for each in LEVELS} if n_valid else {}
    )
    return ControlReport(
        n_states=len(sample),
        n_valid=n_valid,
        same=shares,
        left=round(1 - same[level] / n_valid, 4) if n_valid else None,
        left_interval=_rounded(wilson_interval(1 - same[level] / n_valid, n_valid))
        if n_valid
        else None,
        level=level,
        models=models,
        errors=dict(errors),
        spent_usd=round(spent_usd, 9),
    )


def _rounded(interval: tuple[float, float]) -> tuple[float, float]:
    low, high = interval
    return round(low, 4), round(high, 4)
