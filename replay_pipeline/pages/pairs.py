"""Pairs in the form that the page's script reads: both sides next to each other, in portions."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from replay_pipeline.pages.marks import FORMAT
from replay_pipeline.pages.order import doubts, review_score
from replay_pipeline.pages.sides import (
    called_tools,
    headline_of,
    last_request,
    native_sides,
    over_lines,
    shown_prefix,
    side_by_side,
)
from replay_pipeline.storage.pair_rows import id_of_pair
from replay_pipeline.types import DPOPair

MAX_PREFIX_CHARS = 12_000
"""How much of each prefix the page contains."""


def portion(
    title: str,
    pairs: Iterable[DPOPair],
    outcomes: Sequence[Mapping[str, Any]] = (),
    *,
    chances: Mapping[str, float] | None = None,
    marks: Mapping[str, str] | None = None,
    results: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the pairs of some batches, and their states without a pair.

    Args:
        title: a heading for these pairs.
        pairs: pairs with their prompts.
        outcomes: rows of the table `outcomes`.
        chances: the probability with which each pair was chosen, if not all are shown. Exported
            marks contain it.
        marks: earlier marks. The page's export contains them too.
        results: rows of the table `outcomes` by state, with the results of actions.
    """
    found = results or {}
    items = [pair_item(pair, found.get(pair["state_id"], {})) for pair in pairs]
    with_pair = {item["id"] for item in items}
    items += (_state_item(row) for row in outcomes if row["state_id"] not in with_pair)
    return {
        "title": title,
        "format": FORMAT,
        "outcomes": dict(Counter(str(row["outcome"]) for row in outcomes)),
        "chances": dict(chances) if chances else None,
        "marks": dict(marks or {}),
        "items": items,
    }


def read_trials(trials_json: str | None) -> dict[str, dict[str, str]]:
    """Return the results of the actions that were tried at a state, by the action's text."""
    return json.loads(trials_json) if trials_json else {}


def pair_item(pair: DPOPair, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one pair as the page shows it, with the results of its sides from the row of its state."""
    tried = read_trials(row.get("trials_json"))
    rejected, chosen = native_sides(pair)
    messages = pair.get("state_messages", [])
    rows = side_by_side(over_lines(rejected, pair["rejected"]), over_lines(chosen, pair["chosen"]))
    return {
        "id": pair["state_id"],
        "pair": id_of_pair(pair),
        "session": pair.get("session_id"),
        "outcome": "pair",
        "source": pair.get("source", "consensus"),
        "level": pair.get("agreement_level"),
        "teachers": pair.get("teachers_agreeing", []),
        "n_agreeing": pair["n_teachers_agreeing"],
        "n_asked": pair.get("n_teachers_asked"),
        "p_better": pair.get("p_better"),
        "margin": pair.get("margin"),
        "evidence": pair.get("evidence", []),
        "score": review_score(pair),
        "doubts": doubts(pair),
        "recorded": pair.get("outcome"),
        "hint": pair.get("hint"),
        "student": pair.get("student_model"),
        "rejected_source": pair.get("rejected_source"),
        "chosen_trial": pair.get("chosen_trial"),
        "rejected_trial": pair.get("rejected_trial"),
        "tools": sorted({*called_tools(chosen), *called_tools(rejected)}),
        "headline": headline_of(chosen, pair["chosen"]),
        "request": last_request(messages),
        "diff": rows,
        "became": row.get("became"),
        "tried": {side: tried.get(pair[side]) for side in ("rejected", "chosen")},
        "prefix": shown_prefix(messages, max_chars=MAX_PREFIX_CHARS),
    }


def _state_item(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("level", "student_level", "near_level", "n_asked", "n_valid", "n_agreeing", "margin")
    return {
        "id": str(row["state_id"]),
        "session": row.get("session_id"),
        "outcome": str(row["outcome"]),
        "level": row.get("level"),
        "teachers": [],
        "tools": [],
        "facts": {key: row.get(key) for key in kept if row.get(key) is not None},
        "reason": row.get("invalid_reason"),
        "why": row.get("why"),
    }


def in_portions(sizes: Sequence[tuple[str, int]], limit: int) -> Iterator[list[str]]:
    """Yield batches that are shown together, the newest first. A batch is never split.

    Args:
        sizes: the batches in order, with their numbers of pairs.
        limit: the most pairs in a portion, unless a single batch has more.
    """
    batches: list[str] = []
    n_pairs = 0
    for batch, n in reversed(sizes):
        if n_pairs and n_pairs + n > limit:
            yield batches
            batches, n_pairs = [], 0
        batches.insert(0, batch)
        n_pairs += n
    if batches:
        yield batches
