"""In which order pairs are worth a person's look: those that count much and may well be wrong."""

from collections.abc import Iterable, Mapping
from typing import Any

from replay_pipeline.types import REHEARSAL

_BY_MARGIN = {0: 0.6, 1: 0.4, 2: 0.2}
_BEYOND = 0.1
"""Doubt at a larger margin."""
_DOUBTS: tuple[tuple[str, float], ...] = (
    ("made up in a rehearsal", 0.2),
    ("no teacher was asked", 0.2),
    ("the student's own model left its action too", 0.2),
    ("the teachers agree on the target only", 0.2),
    ("the teachers agree on the tool only", 0.3),
    ("a teacher shares the student's vendor", 0.1),
    ("others side with the student", 0.1),
)
_RELIEF = 0.2
"""What evidence of the record takes off."""


def doubts(pair: Mapping[str, Any]) -> list[str]:
    """Say in words what makes a pair doubtful, apart from its margin."""
    level = pair.get("agreement_level")
    holds = (
        pair.get("source") == REHEARSAL,
        pair.get("source", "consensus") not in ("consensus", REHEARSAL),
        bool(pair.get("control_mismatch")),
        level == "target",
        level == "tool",
        bool(pair.get("shares_vendor")),
        (pair.get("n_against") or 0) > 1,
    )
    return [words for (words, _), is_so in zip(_DOUBTS, holds, strict=True) if is_so]


def review_score(pair: Mapping[str, Any]) -> float:
    """Rate how much a look at a pair is worth: its weight in training times the doubt about it.

    The doubt, from 0.05 to 0.95, begins with the margin of the votes, grows with what `doubts`
    names, and shrinks where the record itself says the same (`evidence`). The numbers are chosen,
    not fitted: they order pairs, and are no probabilities.
    """
    named = dict(_DOUBTS)
    doubt = _BY_MARGIN.get(max(pair.get("margin") or 0, 0), _BEYOND)
    doubt += sum(named[words] for words in doubts(pair))
    doubt -= _RELIEF if pair.get("evidence") else 0.0
    weight = pair.get("weight")
    return round((1.0 if weight is None else weight) * min(max(doubt, 0.05), 0.95), 6)


def rank_pairs(pairs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Order pairs, or rows of their table, by `review_score`, the highest first."""
    return sorted(pairs, key=lambda pair: (-review_score(pair), pair.get("pair_id") or ""))
