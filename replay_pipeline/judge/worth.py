"""Expect how many right pairs the answers of all teachers make at a state."""

import itertools
from functools import cache

import numpy as np

from replay_pipeline.judge.ballots import ALSO_RIGHT, Rows
from replay_pipeline.judge.reliability import Reliability, likelihoods
from replay_pipeline.judge.rule import Pattern, rule, standing_of_pattern

MOST_PLANNED = 5
"""The most teachers that are told apart: with more there are too many patterns of answers."""


@cache
def all_patterns(n_raters: int) -> tuple[Pattern, ...]:
    """Return every pattern with an action of the agent, those with fewer answers first."""
    found: list[Pattern] = []
    for asked in itertools.product((False, True), repeat=n_raters - 1):
        grown: list[Pattern] = [(0,)]
        for is_asked in asked:
            grown = [
                (*pattern, number)
                for pattern in grown
                for number in (range(max(pattern) + 2) if is_asked else (-1,))
            ]
        found += grown
    return tuple(sorted(found, key=lambda pattern: (-pattern.count(-1), pattern)))


def right_pairs(
    model: Reliability, kind: int, threshold: int = 2, min_p_better: float | None = None
) -> float:
    """Return the expected number of right pairs at a state of this kind, if all teachers are asked.

    Args:
        model: estimates of who is right how often.
        kind: number of the kind of decision.
        threshold: how many families make a consensus.
        min_p_better: if set, probability decides what is a pair and not the number of families.
    """
    patterns, rows = all_patterns(len(model.raters)), _all_rows(len(model.raters))
    likely = likelihoods(model, kind, rows)
    total_P = np.maximum(np.add.reduceat(likely, rows.starts_P), 1e-300)
    expected = 0.0
    for place, pattern in enumerate(patterns):
        if -1 in pattern:
            continue
        groups = range(1, max(pattern) + 1)
        if min_p_better is None:
            group, standing = standing_of_pattern(pattern)
            groups = (group,) if rule(standing, threshold) == "pair" else ()
        start, ways = rows.starts_P[place], rows.by_group[place]
        best = 0.0
        for group in groups:
            right = [w[group] <= ALSO_RIGHT < w[0] for w in ways]
            better = float(likely[start : start + len(ways)][right].sum() / total_P[place])
            if better >= (min_p_better or 0.0):
                best = max(best, better)
        expected += float(total_P[place]) * best
    return expected


@cache
def _all_rows(n_raters: int) -> Rows:
    return Rows(all_patterns(n_raters))
