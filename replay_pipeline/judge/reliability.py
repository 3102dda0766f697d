"""Estimate who is right how often, by expectation maximization over who agreed with whom.

The raters are the agent and one teacher per family. Each state has right actions and wrong ones. A
rater takes a right action with its accuracy at this kind of decision. If it errs, it takes the one
tempting wrong action of the state with the probability `shared`, else a wrong action of its own.
Only the partition is observed: which raters took the same action. Dawid and Skene (1979), "Maximum
likelihood estimation of observer error-rates using the EM algorithm", have the same model without
the partition. Joglekar, Garcia-Molina, and Parameswaran (2013) warn of shared errors, which the
tempting action models here. A second class of states stands for those that are hard for everybody,
after Whitehill et al. (2009), "Whose vote should count more".

The accuracies of a kind are pulled toward the overall ones, as if each rater had `_PRIOR` more
states: a beta prior (Gelman et al., "Bayesian data analysis", 5.3).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    Pattern,
    Rows,
    kind_in_words,
    merged_kinds,
)
from replay_pipeline.judge.precision import Calibration

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
_HARD = (0.3, 10.0)
_FAILS = (0.05, 0.2, 30.0)
"""How often a right and a wrong action fails before anything was seen, and the states it counts for."""
SAME_RIGHT = 0.998
"""Default for how often a right rater takes the most common right action. Votes can't show this."""
_MIN_KNOWN = 25
"""From so many states with a verdict on, hard states may be told from easy ones."""
_TOLD_MORE = 1.0
"""By so much hard states must make verdicts likelier (its logarithm), or there are none."""
_FEWEST_SEEN = 30
"""Answers of a teacher at a kind of decision below which nothing is said of it."""
SAME = 0.03
"""Accuracies that differ by less count as equal."""
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The estimates: arrays by kind (K), class of state (D), and rater (R)."""

    raters: tuple[str, ...]
    kinds: tuple[str, ...]
    accuracy_K_D_R: Array
    shared_K_D_R: Array
    """How often a rater that errs takes the tempting action."""
    same_right: float
    """How often a rater that is right takes the most common right action."""
    classes_D: Array
    """Shares of the classes of states: one class, or easy and hard."""
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
        by_kind = self.accuracy_K_D_R[:, :, place] @ self.classes_D
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
            "hard_states": round(float(self.classes_D[1]), 3) if len(self.classes_D) > 1 else None,
        }

    def words(self) -> list[str]:
        """Describe at which decisions the teachers are better than the agent, and vice versa."""
        if len(self.raters) < 2:
            return []
        places: dict[str, list[str]] = {"stronger": [], "weaker": []}
        for kind, seen in zip(self.kinds, self.seen_K_R, strict=False):
            if seen[1:].max(initial=0) < _FEWEST_SEEN:
                continue
            best = max(self.accuracy(rater, kind) for rater in self.raters[1:])
            agent = self.accuracy(self.raters[0], kind)
            if abs(best - agent) > SAME:
                places["stronger" if best > agent else "weaker"].append(kind_in_words(kind))
        if self.seen_K_R[:, 1:].max(initial=0) < _FEWEST_SEEN:
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
        by_kind = np.einsum("kdr,d->kr", self.shared_K_D_R, self.classes_D)
        return float(np.average(by_kind, weights=weights))


def fit(
    ballots: Sequence[Ballot],
    raters: Sequence[str],
    *,
    self_agreement: float | None = None,
    n_classes: int | None = None,
    n_steps: int = 300,
    tolerance: float = 1e-5,
) -> Reliability:
    """Return the estimates that maximize the likelihood of the ballots times the priors.

    Equal patterns are counted together, so the time hardly depends on the number of ballots.

    Args:
        ballots: one per state, with verdicts if there are some.
        raters: the agent and the families, in the order of the patterns.
        self_agreement: how often the agent's own model, asked again, repeats the recorded action.
        n_classes: 1 if all states are alike, 2 if some are hard for everybody. By default, verdicts
            decide.
        n_steps: the most steps of the algorithm.
        tolerance: the algorithm ends when no accuracy changes by more.
    """
    merged = merged_kinds(ballot.kind for ballot in ballots)
    kinds = tuple(dict.fromkeys(sorted(merged.values()))) or ("other",)
    places = {name: kinds.index(kind) for name, kind in merged.items()}
    n_known = sum(bool(ballot.known) for ballot in ballots)
    n_raters = len(raters)

    def fitted(some: Sequence[Ballot], n_classes: int) -> tuple[_Parameters, Array]:
        starts = [_start(kinds, n_raters, n_classes, self_agreement, first) for first in _STARTS]
        if not some:
            return starts[0], np.zeros((len(kinds), n_raters))
        work = _Work(some, merged, kinds, n_raters)
        ends = [_climb(work, start, n_steps, tolerance) for start in starts]
        return max(ends, key=work.log_posterior), work.seen_K_R

    if n_classes is None and n_known >= _MIN_KNOWN:
        # Told apart only where that tells more of verdicts that the estimates have not seen.
        folds = _folds(ballots)
        told = {
            n: sum(_told(*fitted(some, n), held, places) for some, held in folds) for n in (1, 2)
        }
        n_classes = 2 if told[2] > told[1] + _TOLD_MORE else 1
    found, seen_K_R = fitted(ballots, n_classes or 1)
    return Reliability(
        raters=tuple(raters),
        kinds=kinds,
        accuracy_K_D_R=found.accuracy,
        shared_K_D_R=found.shared,
        same_right=found.same_right,
        classes_D=found.classes,
        fails=found.fails,
        n_states=len(ballots),
        n_known=n_known,
        seen_K_R=seen_K_R,
        merged=merged,
    )


@dataclass(frozen=True, slots=True)
class _Parameters:
    accuracy: Array
    shared: Array
    same_right: float
    classes: Array
    fails: tuple[float, float]
    same_right_prior: tuple[float, float]

    def logs(self) -> Array:
        """Return log-probability of each label, by kind, class and rater; 0 for a rater without one."""
        right = np.clip(self.accuracy, 1e-4, 1 - 1e-4)
        shared = np.clip(self.shared, 1e-4, 1 - 1e-4)
        same = min(max(self.same_right, 1e-4), 1 - 1e-4)
        found = np.zeros((*right.shape, N_LABELS + 1))
        found[..., RIGHT] = np.log(right * same)
        found[..., ALSO_RIGHT] = np.log(right * (1 - same))
        found[..., TEMPTING] = np.log((1 - right) * shared)
        found[..., OWN] = np.log((1 - right) * (1 - shared))
        return found


def _folds(ballots: Sequence[Ballot]) -> list[tuple[list[Ballot], list[Ballot]]]:
    """Take the verdicts of each half of the ballots away in turn; with those that lost theirs."""
    known = sorted((ballot for ballot in ballots if ballot.known), key=lambda b: b.state_id)
    halves = {ballot.state_id: number % 2 for number, ballot in enumerate(known)}
    return [
        (
            [replace(b, known=()) if halves.get(b.state_id) == half else b for b in ballots],
            [b for b in known if halves[b.state_id] == half],
        )
        for half in (0, 1)
    ]


def _told(
    found: "_Parameters", _: Array, held: Sequence[Ballot], places: Mapping[str, int]
) -> float:
    """Return the logarithm of how likely the verdicts on ballots are by estimates made without them."""
    total = 0.0
    for ballot in held:
        rows = Rows([ballot.pattern])
        kept = Rows([ballot.pattern], [ballot.known]).by_group[0]
        likely = _likely(found, places[ballot.kind], rows, has_failed=ballot.has_failed)
        is_so = np.array([ways in kept for ways in rows.by_group[0]])
        total += float(np.log(max(likely[is_so].sum() / max(likely.sum(), _TINY), 1e-6)))
    return total


def _climb(work: "_Work", found: _Parameters, n_steps: int, tolerance: float) -> _Parameters:
    """Do steps of the algorithm until they change nothing any more."""
    for _ in range(n_steps):
        before, found = found, work.step(found)
        if np.abs(found.accuracy - before.accuracy).max() < tolerance:
            break
    return found


def _start(
    kinds: tuple[str, ...],
    n_raters: int,
    n_classes: int,
    self_agreement: float | None,
    first: tuple[float, float],
) -> _Parameters:
    accuracy = np.full((len(kinds), n_classes, n_raters), first[1])
    accuracy[..., 0] = first[0]
    shared = np.full((len(kinds), n_classes, n_raters), _SHARED[0])
    classes = np.ones(1)
    if n_classes == 2:
        accuracy[:, 0] += 0.1
        accuracy[:, 1] -= 0.3
        shared[:, 1] = 0.5
        classes = np.array([1 - _HARD[0], _HARD[0]])
    same, strength = SAME_RIGHT, 1e6
    if self_agreement is not None:
        # Two draws of one model differ where it has a choice of right actions: p^2 + (1 - p)^2.
        same = (1 + max(0.0, 2 * self_agreement - 1) ** 0.5) / 2
        strength = 200.0
    elif n_classes == 2:
        strength = 60.0
    return _Parameters(accuracy, shared, same, classes, _FAILS[:2], (same, strength))


class _Work:
    """The counted ballots, and one step of the algorithm."""

    def __init__(
        self,
        ballots: Sequence[Ballot],
        merged: dict[str, str],
        kinds: tuple[str, ...],
        n_raters: int,
    ) -> None:
        places = {kind: place for place, kind in enumerate(kinds)}
        counts = Counter(
            (b.pattern, b.known, b.has_failed, places[merged[b.kind]]) for b in ballots
        )
        keys = list(dict.fromkeys((pattern, known) for pattern, known, _, _ in counts))
        numbers = {key: number for number, key in enumerate(keys)}
        self.rows = Rows([key[0] for key in keys], [key[1] for key in keys])
        # By whether the recorded action failed: no, yes, not known.
        self.counts = np.zeros((3, len(kinds), len(keys)))
        for (pattern, known, has_failed, kind), n in counts.items():
            place = 2 if has_failed is None else int(has_failed)
            self.counts[place, kind, numbers[pattern, known]] += n
        self.one_hot = np.eye(N_LABELS + 1)[self.rows.labels_N_R][:, :, :N_LABELS]
        is_seen = np.array([[number >= 0 for number in key[0]] for key in keys], dtype=float)
        self.seen_K_R = self.counts.sum(axis=0) @ is_seen.reshape(len(keys), n_raters)
        self.is_agent_right = self.rows.labels_N_R[:, 0] <= ALSO_RIGHT

    def step(self, before: _Parameters) -> _Parameters:
        """Do one step: what each labeling is worth, then the estimates that follow from it."""
        counts = self._expected(before)  # kind, class, rater, label
        by_right = counts[..., : ALSO_RIGHT + 1].sum(axis=3), counts.sum(axis=3)
        accuracy = _drawn(*by_right, prior=_ACCURACY)
        errors = counts[..., TEMPTING], counts[..., TEMPTING:].sum(axis=3)
        shared = _drawn(*errors, prior=_SHARED, is_alike=True)
        classes = self._by_class + np.array([1 - _HARD[0], _HARD[0]])[: len(before.classes)] * (
            _HARD[1] if len(before.classes) == 2 else 1
        )
        same, strength = before.same_right_prior
        rights = counts[..., RIGHT].sum(), counts[..., ALSO_RIGHT].sum()
        same_right = (rights[0] + same * strength) / (sum(rights) + strength)
        return _Parameters(
            accuracy, shared, float(same_right), classes / classes.sum(), self._failing(),
            before.same_right_prior,
        )  # fmt: skip

    def log_posterior(self, now: _Parameters) -> float:
        """Return the logarithm of how likely the ballots are, times the prior of the accuracies."""
        self._expected(now)
        right = np.clip(now.accuracy, 1e-6, 1 - 1e-6)
        weight = self.seen_K_R[:, None, :] / np.maximum(self.seen_K_R.sum(axis=0), 1)
        pooled = (right * weight * now.classes[:, None]).sum(axis=(0, 1)).clip(1e-6, 1 - 1e-6)
        mean, strength = _ACCURACY
        prior = strength * (mean * np.log(pooled) + (1 - mean) * np.log(1 - pooled))
        return float(self._log_likelihood + prior.sum())

    def _expected(self, now: _Parameters) -> Array:
        """Return expected answers by kind, class, rater and label; notes what else the step needs."""
        rows = self.rows
        logs = now.logs()
        raters = np.arange(rows.labels_N_R.shape[1])
        by_row = logs[:, :, raters, rows.labels_N_R].sum(axis=3) + np.log(now.classes)[:, None]
        found = np.zeros_like(logs[..., :N_LABELS])
        self._by_class = np.zeros(len(now.classes))
        self._log_likelihood = 0.0
        failing = np.zeros((2, 2))  # right or wrong, failed or not
        for outcome in range(3):
            likely = np.exp(by_row)
            if outcome < 2:
                right, wrong = now.fails
                fails = np.where(self.is_agent_right, right, wrong)
                likely = likely * (fails if outcome else 1 - fails)
            total = np.add.reduceat(likely.sum(axis=1), rows.starts_P, axis=1)
            total = np.maximum(total, _TINY)
            self._log_likelihood += float((self.counts[outcome] * np.log(total)).sum())
            share = likely / total[:, None, rows.pattern_N]
            share = share * self.counts[outcome][:, None, rows.pattern_N]
            found += np.einsum("kdn,nrl->kdrl", share, self.one_hot, optimize=True)
            self._by_class += share.sum(axis=(0, 2))
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

    Uses Bayes' rule over all labelings and classes of states.
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
    parameters = _Parameters(
        reliability.accuracy_K_D_R,
        reliability.shared_K_D_R,
        reliability.same_right,
        reliability.classes_D,
        reliability.fails,
        (0.0, 0.0),
    )
    return _likely(parameters, kind, rows, has_failed=has_failed)


def _likely(now: _Parameters, kind: int, rows: Rows, *, has_failed: bool | None) -> Array:
    logs = now.logs()[kind]
    raters = np.arange(rows.labels_N_R.shape[1])
    by_row = np.exp(logs[:, raters, rows.labels_N_R].sum(axis=2))
    likely = now.classes @ by_row
    if has_failed is not None:
        right, wrong = now.fails
        fails = np.where(rows.labels_N_R[:, 0] <= ALSO_RIGHT, right, wrong)
        likely = likely * (fails if has_failed else 1 - fails)
    return likely
