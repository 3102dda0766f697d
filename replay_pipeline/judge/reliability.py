"""Estimate who is right how often, by expectation maximization over who agreed with whom.

The raters are the agent and one teacher per family. Each state has right actions and wrong ones. A
rater takes a right action with its accuracy at this kind of decision. If it errs, it takes the one
tempting wrong action of the state with the probability `shared`, else a wrong action of its own.
Only the partition is observed: which raters took the same action. Dawid and Skene (1979), "Maximum
likelihood estimation of observer error-rates using the EM algorithm", have the same model without
the partition. Joglekar, Garcia-Molina, and Parameswaran (2013) warn of shared errors, which the
tempting action models here. That some states are hard for everybody, votes can't show; checked pairs
correct for it (`precision.py`).

The accuracies of a kind are pulled toward the overall ones, as if each rater had `_PRIOR` more
states: a beta prior (Gelman et al., "Bayesian data analysis", 5.3).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from replay_pipeline.judge.ballots import (
    ALSO_RIGHT,
    N_LABELS,
    OWN,
    RIGHT,
    TEMPTING,
    Ballot,
    Known,
    Rows,
    kind_in_words,
    merged_kinds,
)
from replay_pipeline.judge.precision import Calibration
from replay_pipeline.judge.rule import Pattern, rule, standing_of_pattern

Array = np.ndarray

_PRIOR = 12.0
"""States by which an estimate of a kind is drawn towards that of all kinds."""
_ACCURACY = (0.7, 20.0)
"""Accuracy before anything was seen, and the states it counts for: enough that nobody is taken to be
always right, where all others erring together would explain the votes as well."""
_STARTS = ((0.7, 0.7), (0.5, 0.85), (0.85, 0.55))
"""Accuracies of agent and teachers from which the algorithm sets out: its end depends on them."""
_SHARED = (0.35, 6.0)
_ALIKE = 30.0
"""Errors by which a rater's share of tempted ones is drawn towards everybody's."""
_FAILS = (0.05, 0.2, 30.0)
"""How often a right and a wrong action fails before anything was seen, and the states it counts for."""
SAME_RIGHT = 0.998
"""Default for how often a right rater takes the most common right action. Votes can't show this."""
_MIN_KNOWN = 25
"""From so many states with a verdict on, how often a right rater takes it is estimated."""
FEWEST_SEEN = 30
"""Answers of a teacher at a kind of decision below which nothing is said of it."""
SAME = 0.03
"""Accuracies that differ by less count as equal."""
MOST_PLANNED = 5
"""The most teachers that `right_pairs` tells apart: with more there are too many patterns of answers."""
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The estimates: arrays by kind (K) and rater (R)."""

    raters: tuple[str, ...]
    kinds: tuple[str, ...]
    accuracy_K_R: Array
    shared_K_R: Array
    """How often a rater that errs takes the tempting action."""
    same_right: float
    """How often a rater that is right takes the most common right action."""
    fails: tuple[float, float]
    """How often a right recorded action fails, and how often a wrong one."""
    n_states: int = 0
    n_known: int = 0
    """Number of states with a verdict."""
    seen_K_R: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Number of valid answers by kind and rater."""
    merged: dict[str, str] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    """The correction of `better` by checked pairs."""

    def kind(self, name: str) -> int:
        """Return the index of a kind. An unseen kind counts as the rarest one."""
        name = self.merged.get(name, name)
        return self.kinds.index(name) if name in self.kinds else len(self.kinds) - 1

    def accuracy(self, rater: str, kind: str | None = None) -> float:
        """Return how often a rater is right at a kind of decision, or overall."""
        place = self.raters.index(rater)
        by_kind = self.accuracy_K_R[:, place]
        if kind is not None:
            return float(by_kind[self.kind(kind)])
        weights = self.seen_K_R[:, 0]
        return float(np.average(by_kind, weights=weights if weights.sum() else None))

    def to_json(self) -> dict[str, Any]:
        """Return the estimates as plain numbers and names."""
        return {
            "n_states": self.n_states,
            "n_known": self.n_known,
            "accuracy": {rater: round(self.accuracy(rater), 3) for rater in self.raters},
            "accuracy_by_kind": {
                kind: {rater: round(self.accuracy(rater, kind), 3) for rater in self.raters}
                for kind in self.kinds
            },
            "n_by_kind": {
                kind: dict(zip(self.raters, map(int, seen), strict=True))
                for kind, seen in zip(self.kinds, self.seen_K_R, strict=False)
            },
            "words": self.words(),
            "same_right": round(self.same_right, 3),
            "shared_errors": round(self.shared(), 3),
        }

    def words(self) -> list[str]:
        """Describe at which decisions the teachers are better than the agent, and vice versa."""
        if len(self.raters) < 2:
            return []
        places: dict[str, list[str]] = {"stronger": [], "weaker": []}
        for kind, seen in zip(self.kinds, self.seen_K_R, strict=False):
            if seen[1:].max(initial=0) < FEWEST_SEEN:
                continue
            best = max(self.accuracy(rater, kind) for rater in self.raters[1:])
            agent = self.accuracy(self.raters[0], kind)
            if abs(best - agent) > SAME:
                places["stronger" if best > agent else "weaker"].append(kind_in_words(kind))
        if self.seen_K_R[:, 1:].max(initial=0) < FEWEST_SEEN:
            return []
        stronger, weaker = (", ".join(places[each]) for each in ("stronger", "weaker"))
        if not stronger and not weaker:
            return ["your teachers are about as strong as the model that wrote these sessions"]
        return [
            "your teachers are "
            + (f"weaker than the model that wrote these sessions at {weaker}, " if weaker else "")
            + (f"stronger at {stronger}" if stronger else "stronger at nothing")
        ]

    def shared(self) -> float:
        """Return how often a rater that errs takes the same wrong action as the others."""
        weights = self.seen_K_R if self.seen_K_R.sum() else None
        return float(np.average(self.shared_K_R, weights=weights))

    def logs(self) -> Array:
        """Return log-probability of each label, by kind and rater; 0 for a rater without one."""
        right = np.clip(self.accuracy_K_R, 1e-4, 1 - 1e-4)
        shared = np.clip(self.shared_K_R, 1e-4, 1 - 1e-4)
        same = min(max(self.same_right, 1e-4), 1 - 1e-4)
        found = np.zeros((*right.shape, N_LABELS + 1))
        found[..., RIGHT] = np.log(right * same)
        found[..., ALSO_RIGHT] = np.log(right * (1 - same))
        found[..., TEMPTING] = np.log((1 - right) * shared)
        found[..., OWN] = np.log((1 - right) * (1 - shared))
        return found


def fit(
    ballots: Sequence[Ballot],
    raters: Sequence[str],
    *,
    self_agreement: float | None = None,
    n_steps: int = 300,
    tolerance: float = 1e-5,
) -> Reliability:
    """Return the estimates that maximize the likelihood of the ballots times the priors.

    Equal patterns are counted together, so the time hardly depends on the number of ballots.

    Args:
        ballots: one per state, with verdicts if there are some.
        raters: the agent and the families, in the order of the patterns.
        self_agreement: how often the agent's own model, asked again, repeats the recorded action.
        n_steps: the most steps of the algorithm.
        tolerance: the algorithm ends when no accuracy changes by more.
    """
    merged = merged_kinds(ballot.kind for ballot in ballots)
    kinds = tuple(dict.fromkeys(sorted(merged.values()))) or ("other",)
    n_known = sum(bool(ballot.known) for ballot in ballots)
    same, strength = SAME_RIGHT, 1e6
    if self_agreement is not None:
        # Two draws of one model differ where it has a choice of right actions: p^2 + (1 - p)^2.
        same = (1 + max(0.0, 2 * self_agreement - 1) ** 0.5) / 2
        strength = 200.0
    elif n_known >= _MIN_KNOWN:
        strength = 60.0
    start = Reliability(
        raters=tuple(raters),
        kinds=kinds,
        accuracy_K_R=np.zeros(0),
        shared_K_R=np.full((len(kinds), len(raters)), _SHARED[0]),
        same_right=same,
        fails=_FAILS[:2],
        n_states=len(ballots),
        n_known=n_known,
        seen_K_R=np.zeros((len(kinds), len(raters))),
        merged=merged,
    )
    starts = []
    for agent, teachers in _STARTS:
        accuracy = np.full((len(kinds), len(raters)), teachers)
        accuracy[:, 0] = agent
        starts.append(replace(start, accuracy_K_R=accuracy))
    if not ballots:
        return starts[0]
    work = _Work(ballots, merged, kinds, (same, strength))
    ends = [work.climb(one, n_steps, tolerance) for one in starts]
    return replace(max(ends, key=work.log_posterior), seen_K_R=work.seen_K_R)


class _Work:
    """The counted ballots, and one step of the algorithm."""

    def __init__(
        self,
        ballots: Sequence[Ballot],
        merged: dict[str, str],
        kinds: tuple[str, ...],
        same_right: tuple[float, float],
    ) -> None:
        places = {kind: place for place, kind in enumerate(kinds)}
        counts = Counter(
            (b.pattern, b.known, b.has_failed, places[merged[b.kind]]) for b in ballots
        )
        keys = list(dict.fromkeys((pattern, known) for pattern, known, _, _ in counts))
        numbers = {key: number for number, key in enumerate(keys)}
        self.same_right = same_right
        self.rows = Rows([key[0] for key in keys], [key[1] for key in keys])
        # By whether the recorded action failed: no, yes, not known.
        self.counts = np.zeros((3, len(kinds), len(keys)))
        for (pattern, known, has_failed, kind), n in counts.items():
            place = 2 if has_failed is None else int(has_failed)
            self.counts[place, kind, numbers[pattern, known]] += n
        self.one_hot = np.eye(N_LABELS + 1)[self.rows.labels_N_R][:, :, :N_LABELS]
        is_seen = np.array([[number >= 0 for number in key[0]] for key in keys], dtype=float)
        self.seen_K_R = self.counts.sum(axis=0) @ is_seen
        self.is_agent_right = self.rows.labels_N_R[:, 0] <= ALSO_RIGHT

    def climb(self, found: Reliability, n_steps: int, tolerance: float) -> Reliability:
        """Do steps of the algorithm until they change nothing any more."""
        for _ in range(n_steps):
            before, found = found, self.step(found)
            if np.abs(found.accuracy_K_R - before.accuracy_K_R).max() < tolerance:
                break
        return found

    def step(self, before: Reliability) -> Reliability:
        """Do one step: what each labeling is worth, then the estimates that follow from it."""
        counts = self._expected(before)  # kind, rater, label
        by_right = counts[..., : ALSO_RIGHT + 1].sum(axis=2), counts.sum(axis=2)
        errors = counts[..., TEMPTING], counts[..., TEMPTING:].sum(axis=2)
        same, strength = self.same_right
        rights = counts[..., RIGHT].sum(), counts[..., ALSO_RIGHT].sum()
        return replace(
            before,
            accuracy_K_R=_drawn(*by_right, prior=_ACCURACY),
            shared_K_R=_drawn(*errors, prior=_SHARED, is_alike=True),
            same_right=float((rights[0] + same * strength) / (sum(rights) + strength)),
            fails=self._failing(),
        )

    def log_posterior(self, now: Reliability) -> float:
        """Return the logarithm of how likely the ballots are, times the prior of the accuracies."""
        self._expected(now)
        right = np.clip(now.accuracy_K_R, 1e-6, 1 - 1e-6)
        weight = self.seen_K_R / np.maximum(self.seen_K_R.sum(axis=0), 1)
        pooled = (right * weight).sum(axis=0).clip(1e-6, 1 - 1e-6)
        mean, strength = _ACCURACY
        prior = strength * (mean * np.log(pooled) + (1 - mean) * np.log(1 - pooled))
        return float(self._log_likelihood + prior.sum())

    def _expected(self, now: Reliability) -> Array:
        """Return expected answers by kind, rater and label; notes what else the step needs."""
        rows = self.rows
        logs = now.logs()
        raters = np.arange(rows.labels_N_R.shape[1])
        by_row = logs[:, raters, rows.labels_N_R].sum(axis=2)
        found = np.zeros_like(logs[..., :N_LABELS])
        self._log_likelihood = 0.0
        failing = np.zeros((2, 2))  # right or wrong, failed or not
        for outcome in range(3):
            likely = np.exp(by_row)
            if outcome < 2:
                right, wrong = now.fails
                fails = np.where(self.is_agent_right, right, wrong)
                likely = likely * (fails if outcome else 1 - fails)
            total = np.maximum(np.add.reduceat(likely, rows.starts_P, axis=1), _TINY)
            self._log_likelihood += float((self.counts[outcome] * np.log(total)).sum())
            share = likely / total[:, rows.pattern_N]
            share = share * self.counts[outcome][:, rows.pattern_N]
            found += np.einsum("kn,nrl->krl", share, self.one_hot, optimize=True)
            if outcome < 2:
                failing[0, outcome] += share[..., self.is_agent_right].sum()
                failing[1, outcome] += share[..., ~self.is_agent_right].sum()
        self._fail_counts = failing
        return found

    def _failing(self) -> tuple[float, float]:
        """Return how often right and wrong actions fail; a wrong one never less often than a right one."""
        rates = [
            (self._fail_counts[i, 1] + rate * _FAILS[2]) / (self._fail_counts[i].sum() + _FAILS[2])
            for i, rate in enumerate(_FAILS[:2])
        ]
        return float(min(rates)), float(max(rates))


def _drawn(
    part: Array, whole: Array, *, prior: tuple[float, float], is_alike: bool = False
) -> Array:
    """Return shares of each kind, drawn towards those of all kinds, and these towards the prior.

    Where raters are alike, those of all kinds are drawn towards those of all raters too.
    """
    mean, strength = prior
    over_kinds = part.sum(axis=0), whole.sum(axis=0)
    if is_alike:
        mean = (over_kinds[0].sum(axis=-1, keepdims=True) + mean * strength) / (
            over_kinds[1].sum(axis=-1, keepdims=True) + strength
        )
        strength = _ALIKE
    pooled = (over_kinds[0] + mean * strength) / (over_kinds[1] + strength)
    return (part + _PRIOR * pooled) / (whole + _PRIOR)


def posterior(
    reliability: Reliability,
    kind: int,
    pattern: Pattern,
    *,
    has_failed: bool | None = None,
    known: Known = (),
) -> "Beliefs":
    """Return the probability of each group of a ballot.

    Uses Bayes' rule over all labelings.
    """
    rows = Rows([pattern], [known])
    likely = likelihoods(reliability, kind, rows, has_failed=has_failed)
    total = max(float(likely.sum()), _TINY)
    n_groups = max(pattern) + 1
    right = [0.0] * n_groups
    better = [0.0] * n_groups
    for ways, weight in zip(rows.by_group[0], likely / total, strict=True):
        for group, label in enumerate(ways):
            if label <= ALSO_RIGHT:
                right[group] += float(weight)
                if ways[0] > ALSO_RIGHT:
                    better[group] += float(weight)
    if reliability.calibration.n_checked:
        for group in range(1, n_groups):
            p = min(better[group], 1.0)
            found = reliability.calibration.of(p)
            # What is left is shared as before by "both are right" and "the chosen side is wrong".
            right[group] = found + (right[group] - p) * (1 - found) / max(1 - p, _TINY)
            better[group] = found
    return Beliefs(tuple(right), tuple(better), total)


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Probabilities for the groups of one ballot. Group 0 is the agent's."""

    right: tuple[float, ...]
    """Probability that the group's action is right."""
    better: tuple[float, ...]
    """Probability that the group's action is right and the agent's is wrong."""
    likelihood: float


def likelihoods(
    reliability: Reliability, kind: int, rows: Rows, *, has_failed: bool | None = None
) -> Array:
    """Return the joint probability of each labeling and the observations."""
    logs = reliability.logs()[kind]
    raters = np.arange(rows.labels_N_R.shape[1])
    likely = np.exp(logs[raters, rows.labels_N_R].sum(axis=1))
    if has_failed is not None:
        right, wrong = reliability.fails
        fails = np.where(rows.labels_N_R[:, 0] <= ALSO_RIGHT, right, wrong)
        likely = likely * (fails if has_failed else 1 - fails)
    return likely


def right_pairs(model: Reliability, kind: int, threshold: int = 2) -> float:
    """Return the expected number of right pairs at a state of this kind, if all teachers are asked.

    Args:
        model: estimates of who is right how often.
        kind: number of the kind of decision.
        threshold: how many families make a consensus.
    """
    patterns, rows = _full_patterns(len(model.raters))
    likely = likelihoods(model, kind, rows)
    expected = 0.0
    for pattern, start, ways in zip(patterns, rows.starts_P, rows.by_group, strict=True):
        group, standing = standing_of_pattern(pattern)
        if rule(standing, threshold) == "pair":
            here = likely[start : start + len(ways)]
            expected += float(here[[way[group] <= ALSO_RIGHT < way[0] for way in ways]].sum())
    return expected


@cache
def _full_patterns(n_raters: int) -> tuple[list[Pattern], Rows]:
    """Return every pattern in which all have answered."""
    patterns: list[Pattern] = [(0,)]
    for _ in range(n_raters - 1):
        patterns = [(*each, number) for each in patterns for number in range(max(each) + 2)]
    return patterns, Rows(patterns)
