"""Count what would go wrong with this tokenizer and these rows, before any forward pass.

No weights are needed. A pair teaches nothing if both sides have the same tokens, or if a side is
empty. Such pairs are removed and counted, and a run with too many of them is refused.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.budget import Cut
from trainer.data.dataset import PreferenceData
from trainer.data.rendering import Renderer
from trainer.data.template import TemplateFeatures
from trainer.errors import DatasetError, TrainerConfigError

logger = logging.getLogger(__name__)

NEEDED_BY: dict[str, str] = {
    "has_system": "system messages",
    "has_tools": "lists of tools",
    "has_tool_calls": "tool calls",
    "has_tool_results": "tool results",
}
"""The parts of rows that need each template feature."""


@dataclass(frozen=True, kw_only=True)
class PreflightOptions:
    """The limits above which a run is refused."""

    plain_rendering: bool = True
    """Whether parts that the chat template can't show are rendered as text. Otherwise a model with
    such a template is refused."""
    max_unusable_pairs: float = 0.05
    """Allowed share of pairs with two identical sides or an empty side."""
    max_cut_prompts: float = 0.9
    """Allowed share of prompts that lose messages to the token budget."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The findings of a preflight."""

    rendered_as_text: dict[str, str]
    """Parts of rows that the template can't show, and how they are rendered."""
    n_pairs: int
    n_identical_sides: int
    n_empty_completions: int
    n_cut_responses: int
    """Pairs with a side that is longer than `max_response_tokens`."""
    n_prompts: int
    """Number of checked prompts."""
    n_cut_prompts: int
    """Number of checked prompts that lost anything to the budget."""
    cut: Cut
    """What all prompts lost together."""
    refused: dict[str, int]
    """Number of rows that are left out because the required parts of their prompt don't fit, by kind of row."""
    refusal: str | None
    """The reason for the first of them."""
    usable: list[int] = field(repr=False)
    """Pairs that can teach something."""
    fitting: dict[str, list[int]] = field(repr=False)
    """Rows whose prompt fits, by kind of row."""

    def as_report(self) -> dict[str, Any]:
        """Return the figures as JSON."""
        hidden = ("usable", "fitting", "cut")
        found = {name: value for name, value in vars(self).items() if name not in hidden}
        return found | {name: n for name, n in vars(self.cut).items() if name != "refusal"}


def preflight(renderer: Renderer, data: PreferenceData, options: PreflightOptions) -> Preflight:
    """Render all texts of a run, count the faults, and refuse the run if there are too many."""
    asked = _asked(data.training_rows, with_tools=renderer.with_tools)
    missing = _missing(renderer.features, asked, options)
    usable, n_identical, n_empty, n_cut = look_at_pairs(renderer, data.pairs)
    cuts = {
        name: [renderer.row_prompt(row)[1] for row in getattr(data, name)]
        for name in (*TRAINED, *HELD_OUT)
    }
    fitting = {
        name: [i for i, cut in enumerate(of) if not cut.refusal] for name, of in cuts.items()
    }
    trained = [cut for name in TRAINED for cut in cuts[name]]
    taken: dict[str, Any] = {name: sum(getattr(cut, name) for cut in trained) for name in COUNTED}
    found = Preflight(
        rendered_as_text=missing,
        n_pairs=len(data.pairs),
        n_identical_sides=n_identical,
        n_empty_completions=n_empty,
        n_cut_responses=n_cut,
        n_prompts=len(trained),
        n_cut_prompts=sum(map(bool, trained)),
        cut=Cut(**taken),
        refused={
            name: len(of) - len(fitting[name])
            for name, of in cuts.items()
            if len(of) > len(fitting[name])
        },
        refusal=next((cut.refusal for of in cuts.values() for cut in of if cut.refusal), None),
        usable=sorted({*usable} & {*fitting["pairs"]}),
        fitting=fitting,
    )
    _refuse(found, options, renderer)
    return found


def _missing(
    features: TemplateFeatures, asked: Collection[str], options: PreflightOptions
) -> dict[str, str]:
    missing = {
        NEEDED_BY[name]: how
        for name, how in features.missing().items()
        if name in NEEDED_BY and name in asked
    }
    if missing and not options.plain_rendering:
        raise TrainerConfigError(
            "the model's chat template can't show "
            + ", ".join(missing)
            + ": the training data would lose them. Allow plain text for them (preflight.plain_rendering=true), or use a model whose template supports them"
        )
    return missing


def look_at_pairs(
    renderer: Renderer, pairs: Sequence[Mapping[str, Any]]
) -> tuple[list[int], int, int, int]:
    """Find the usable pairs, and count identical sides, empty sides, and pairs with a cut side."""
    usable, n_identical, n_empty, n_cut = [], 0, 0, 0
    for index, row in enumerate(pairs):
        (chosen, cut), (rejected, other) = (
            renderer.response(row[side], after=row["prompt"]) for side in ("chosen", "rejected")
        )
        n_cut += bool(cut) or bool(other)
        # One token is the end of the turn.
        is_empty = min(len(chosen), len(rejected)) <= 1
        if chosen == rejected:
            n_identical += 1
        elif is_empty:
            n_empty += 1
        else:
            usable.append(index)
    return usable, n_identical, n_empty, n_cut


COUNTED = ("n_dropped_steps", "n_shortened_texts", "n_smaller_tools", "n_dropped_tokens")
TRAINED = ("pairs", "prompts", "positives", "answers")
HELD_OUT = ("test_pairs", "test_prompts")


def log_findings(found: Preflight) -> None:
    """Log the findings, as warnings where something was lost or replaced."""
    for what, how in found.rendered_as_text.items():
        logger.warning("the chat template can't show %s: %s", what, how)
    for count, total, what in (
        (found.n_identical_sides, found.n_pairs, "pairs have two identical sides, left out"),
        (found.n_empty_completions, found.n_pairs, "pairs have an empty side, left out"),
        (found.n_cut_responses, found.n_pairs, "pairs have a side cut at max_response_tokens"),
        (
            found.n_cut_prompts,
            found.n_prompts,
            f"prompts do not fit into max_prompt_tokens: {found.cut}",
        ),
        (
            sum(found.refused.values()),
            sum(map(len, found.fitting.values())) + sum(found.refused.values()),
            f"rows left out, for what must stay in their prompt does not fit: {found.refusal}",
        ),
    ):
        if count:
            logger.warning("%d of %d %s", count, total, what)


def _asked(rows: Sequence[Mapping[str, Any]], *, with_tools: bool) -> set[str]:
    """Name the features that rows ask of a template."""
    asked: set[str] = set()
    for row in rows:
        if with_tools and row.get("tools"):
            asked.add("has_tools")
        actions = [*(row.get("chosen") or ()), *(row.get("rejected") or ())]
        actions += row.get("completion") or ()
        for message in [*row["prompt"], *actions]:
            if message["role"] == "system":
                asked.add("has_system")
            if message["role"] == "tool":
                asked.add("has_tool_results")
            if message.get("tool_calls"):
                asked.add("has_tool_calls")
    return asked


def _refuse(found: Preflight, options: PreflightOptions, renderer: Renderer) -> None:
    n_refused = found.refused.get("pairs", 0)
    if n_refused and n_refused >= len(found.fitting["pairs"]) + n_refused:
        raise DatasetError(
            f"no pair fits into max_prompt_tokens={renderer.max_prompt_tokens}: {found.refusal}. "
            "Raise it, or render_tools=false"
        )
    n_unusable = found.n_identical_sides + found.n_empty_completions
    if n_unusable > options.max_unusable_pairs * found.n_pairs:
        raise DatasetError(
            f"{n_unusable} of {found.n_pairs} pairs teach nothing: {found.n_identical_sides} have "
            f"two identical sides as tokens, {found.n_empty_completions} an empty side (preflight.max_unusable_pairs={options.max_unusable_pairs}). Raise "
            f"max_response_tokens={renderer.max_response_tokens} if sides differ late, or publish "
            "pairs whose actions differ"
        )
    if found.n_cut_prompts > options.max_cut_prompts * found.n_prompts:
        raise DatasetError(
            f"{found.n_cut_prompts} of {found.n_prompts} prompts do not fit into max_prompt_tokens="
            f"{renderer.max_prompt_tokens} (preflight.max_cut_prompts={options.max_cut_prompts}): "
            "raise the budget, render_tools=false, or allow a larger share"
        )
