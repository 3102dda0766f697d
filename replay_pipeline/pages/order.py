"""Order pairs for review: the most uncertain pairs come first."""

from collections.abc import Iterable, Mapping
from typing import Any

from replay_pipeline.types import REHEARSAL

_DOUBTS = (
    "made up in a rehearsal",
    "no teacher was asked",
    "the student's own model left its action too",
    "the teachers agree on the target only",
    "the teachers agree on the tool only",
    "a teacher shares the student's vendor",
    "others side with the student",
)
_UNKNOWN = 0.5
"""Taken for the probability of a pair that has none."""


def doubts(pair: Mapping[str, Any]) -> list[str]:
    """Describe the doubts about a pair, besides its probability."""
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
    return [words for words, is_so in zip(_DOUBTS, holds, strict=True) if is_so]


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
