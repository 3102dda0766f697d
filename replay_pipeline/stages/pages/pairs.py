"""Pairs for people: the order of review, the marks that people gave, and both sides as the page shows them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from replay_pipeline.actions.difference import words_of
from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.stages.pages.sides import (
    called_tools,
    headline_of,
    last_request,
    native_sides,
    over_lines,
    shown_prefix,
    side_by_side,
)
from replay_pipeline.storage.pair_rows import id_of_pair
from replay_pipeline.types import REHEARSAL, DPOPair

_UNKNOWN = 0.5
"""Taken for the probability of a pair that has none."""


def doubts(pair: Mapping[str, Any]) -> list[str]:
    """Describe the doubts about a pair, besides its probability."""
    level, source = pair.get("agreement_level"), pair.get("source", "consensus")
    holds = {
        "made up in a rehearsal": source == REHEARSAL,
        "no teacher was asked": source not in ("consensus", REHEARSAL),
        "the student's own model left its action too": bool(pair.get("control_mismatch")),
        "the teachers agree on the target only": level == "target",
        "the teachers agree on the tool only": level == "tool",
        "a teacher shares the student's vendor": bool(pair.get("shares_vendor")),
        "others side with the student": (pair.get("n_against") or 0) > 1,
    }
    return [words for words, is_so in holds.items() if is_so]


def review_score(pair: Mapping[str, Any]) -> float:
    """Rate from 0 to 1 how useful it is to review a pair.

    The score is `4 p (1 - p)`, where p is `p_better`. It is highest if p is one half. A pair that
    was checked has the score 0.
    """
    if pair.get("is_checked_right") is not None:
        return 0.0
    p = pair.get("p_better")
    p = _UNKNOWN if p is None else p
    return round(4 * p * (1 - p), 6)


def rank_pairs(pairs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Order pairs, or rows of their table, by `review_score`, the highest first."""
    return sorted(pairs, key=lambda pair: (-review_score(pair), pair.get("pair_id") or ""))


Mark = Literal["accept", "reject"]

FORMAT = "replay-pipeline marks 2"


def read_marks(path: Path) -> dict[str, Mark]:
    """Read the marks that a review page exported, by pair.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is no export of a review page.
    """
    exported = _exported(path)
    marks = exported.get("marks")
    if not isinstance(marks, dict):
        raise ConfigError(f"{path}: 'marks' is not an object")
    for pair_id, mark in marks.items():
        if mark not in get_args(Mark):
            raise ConfigError(f"{path}: {pair_id}: {mark!r} is neither 'accept' nor 'reject'")
    return marks


def read_chances(path: Path) -> dict[str, float]:
    """Read the probability with which each pair was chosen for the page; empty if the page showed all pairs.

    Raises:
        StorageError: the file cannot be read.
        ConfigError: it is no export of a review page.
    """
    chances = _exported(path).get("chances") or {}
    if not isinstance(chances, dict) or not all(
        isinstance(chance, int | float) and 0 < chance <= 1 for chance in chances.values()
    ):
        raise ConfigError(f"{path}: 'chances' must map each pair to a probability")
    return chances


def _exported(path: Path) -> dict[str, Any]:
    try:
        exported = json.loads(path.read_bytes())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON; export the marks from the review page") from error
    if not isinstance(exported, dict) or exported.get("format") != FORMAT:
        raise ConfigError(f"{path}: not an export of a review page (format {FORMAT!r})")
    return exported


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

    If not all pairs are shown, `chances` has the probability with which each was chosen. Exported
    marks contain it, and earlier `marks`. `results` are rows of the table `outcomes`, by state.
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


def pair_item(pair: DPOPair, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one pair as the page shows it, with the results of its sides from the row of its state."""
    tried = json.loads(row.get("trials_json") or "{}")
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
        "p_chosen_right": pair.get("p_chosen_right"),
        "p_rejected_wrong": pair.get("p_rejected_wrong"),
        "differs": words_of(pair.get("difference") or ()),
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

    A portion has at most `limit` pairs, unless a single batch has more.
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
