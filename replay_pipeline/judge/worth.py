"""Compute the value of the next question at a state: expected right pairs per dollar.

A state whose teachers answer one after the other is a small decision problem: ask one more, or stop
with the present pair or none. For a given value of a right pair, dynamic programming over the
patterns of answers finds the best action. The index of a state tells how much it pays to ask there,
and the next question goes where the index is highest. This follows Gittins (1979), "Bandit
processes and dynamic allocation indices", and Weitzman (1979), "Optimal search for the best
alternative".
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from replay_pipeline.judge.labels import ALSO_RIGHT, Rows
from replay_pipeline.judge.reliability import Array, Reliability, likelihoods
from replay_pipeline.judge.rule import Pattern, rule, standing_of_pattern

MOST_PLANNED = 5
"""The most teachers to plan with. Further teachers are asked only where all are."""
_N_PRICES = 40
PRICES = np.geomspace(1e-4, 1e2, _N_PRICES)
"""Right pairs per mean cost of a call, from hardly worth it to a bargain."""
_OUTCOMES = (None, False, True)


def answers_at(pattern: Pattern, place: int) -> list[Pattern]:
    """Return the patterns that an answer of the rater at index `place` can lead to."""
    n_groups = max(pattern) + 1
    found = [(*pattern[:place], number, *pattern[place + 1 :]) for number in range(n_groups + 1)]
    return [renumbered(each) for each in found]


def renumbered(pattern: Pattern) -> Pattern:
    """Renumber the groups of a pattern in their order of appearance."""
    numbers: dict[int, int] = {-1: -1}
    for number in pattern:
        numbers.setdefault(number, len(numbers) - 1)
    return tuple(numbers[number] for number in pattern)


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


@dataclass(frozen=True, slots=True)
class Advice:
    """The teacher to ask next at a state, and the right pairs that the price of a mean call brings there."""

    place: int
    """Index of the rater."""
    index: float


class Worth:
    """The value of asking at every pattern, for one set of estimates.

    Args:
        reliability: estimates of who is right how often.
        costs: mean cost of a call of each teacher, in the order of the raters after the agent.
        threshold: how many families make a consensus.
        min_p_better: if set, probability decides what is a pair and not the number of families.
    """

    def __init__(
        self,
        reliability: Reliability,
        costs: Sequence[float],
        threshold: int = 2,
        min_p_better: float | None = None,
    ) -> None:
        self._model = reliability
        self._patterns = all_patterns(len(reliability.raters))
        self._places = {pattern: place for place, pattern in enumerate(self._patterns)}
        mean = sum(costs) / len(costs) or 1.0
        self._costs = [max(cost / mean, 1e-6) for cost in costs]
        self._threshold = threshold
        self._min_p_better = min_p_better
        self._next = [
            {
                place: [self._places[after] for after in answers_at(pattern, place)]
                for place, number in enumerate(pattern)
                if number < 0
            }
            for pattern in self._patterns
        ]
        self._solved: dict[tuple[int, bool | None], list[Advice | None]] = {}
        self._gains: dict[tuple[int, bool | None], tuple[Array, Array]] = {}

    def advice(self, kind: int, pattern: Pattern, *, has_failed: bool | None) -> Advice | None:
        """Return the teacher to ask next, or None if no answer is worth anything."""
        key = (kind, has_failed)
        if key not in self._solved:
            self._solved[key] = self._solve(kind, has_failed=has_failed)
        return self._solved[key][self._places[renumbered(pattern)]]

    def gains(self, kind: int, pattern: Pattern, *, has_failed: bool | None) -> tuple[Array, Array]:
        """Return the gain of further questions, for each value of a right pair in `PRICES`.

        Returns:
            The right pairs, and their cost in mean calls, for the best way to ask at each price.
        """
        key = (kind, has_failed)
        self.advice(kind, pattern, has_failed=has_failed)
        gain_P_L, calls_P_L = self._gains[key]
        place = self._places[renumbered(pattern)]
        return gain_P_L[place] + PRICES * calls_P_L[place], calls_P_L[place]

    def right_pairs(self, kind: int) -> float:
        """Return the expected number of right pairs at a state of this kind, if all teachers are asked."""
        rows = _all_rows(len(self._model.raters))
        likely = likelihoods(self._model, kind, rows)
        total_P = np.maximum(np.add.reduceat(likely, rows.starts_P), 1e-300)
        whole = [place for place, pattern in enumerate(self._patterns) if -1 not in pattern]
        return sum(
            float(total_P[place]) * self._stopped(place, rows, likely, total_P) for place in whole
        )

    def _solve(self, kind: int, *, has_failed: bool | None) -> list[Advice | None]:
        rows = _all_rows(len(self._model.raters))
        likely = likelihoods(self._model, kind, rows, has_failed=has_failed)
        total_P = np.maximum(np.add.reduceat(likely, rows.starts_P), 1e-300)
        value_P_L = np.zeros((len(self._patterns), _N_PRICES))
        calls_P_L = np.zeros_like(value_P_L)
        found: list[Advice | None] = [None] * len(self._patterns)
        stop_P = np.zeros(len(self._patterns))
        for place in range(len(self._patterns) - 1, -1, -1):
            stop = stop_P[place] = self._stopped(place, rows, likely, total_P)
            best_L = np.full(_N_PRICES, -np.inf)
            who_L = np.zeros(_N_PRICES, dtype=int)
            calls_L = np.zeros(_N_PRICES)
            for rater, after in self._next[place].items():
                shares = total_P[after] / total_P[after].sum()
                asked_L = shares @ value_P_L[after] - PRICES * self._costs[rater - 1]
                who_L = np.where(asked_L > best_L, rater, who_L)
                then_L = shares @ calls_P_L[after] + self._costs[rater - 1]
                calls_L = np.where(asked_L > best_L, then_L, calls_L)
                best_L = np.maximum(best_L, asked_L)
            value_P_L[place] = np.maximum(stop, best_L)
            calls_P_L[place] = np.where(best_L > stop, calls_L, 0.0)
            pays = np.flatnonzero(best_L > stop + 1e-12)
            if len(pays):
                found[place] = Advice(int(who_L[pays[-1]]), float(PRICES[pays[-1]]))
        self._gains[kind, has_failed] = value_P_L - stop_P[:, None], calls_P_L
        return found

    def _stopped(self, place: int, rows: Rows, likely: Array, total_P: Array) -> float:
        """Return what a pair that the answers so far make is worth: the chance that it is right."""
        pattern = self._patterns[place]
        start = rows.starts_P[place]
        ways = rows.by_group[place]
        groups = range(1, max(pattern) + 1)
        if self._min_p_better is None:
            # Who is left may side with the agent, and then it is a dispute and no pair.
            group, standing = standing_of_pattern(pattern)
            is_pair = -1 not in pattern and rule(standing, self._threshold) == "pair"
            groups = (group,) if is_pair else ()
        best = 0.0
        for group in groups:
            right = [w[group] <= ALSO_RIGHT < w[0] for w in ways]
            better = float(likely[start : start + len(ways)][right].sum() / total_P[place])
            if better >= (self._min_p_better or 0.0):
                best = max(best, better)
        return best


@cache
def _all_rows(n_raters: int) -> Rows:
    return Rows(all_patterns(n_raters))
