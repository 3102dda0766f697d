"""Estimate how many right pairs a replay will bring: from assumptions at first, then from answers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from replay_pipeline.judge.ballots import AGENT, Ballot, BallotBox, Pattern, kind_of_state
from replay_pipeline.judge.reliability import SAME, Reliability, fit
from replay_pipeline.judge.worth import MOST_PLANNED, PRICES, Worth
from replay_pipeline.replay.buy.places import outcome_of
from replay_pipeline.replay.buy.policy import Policy
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState, family_of_model

_ASSUMED = (0.05, 0.75)
"""Right pairs per state if all teachers answer there, before anything is known: the first figure for teachers
as strong as the agent, the second for far stronger ones."""
_MIN_STATES = 20
_SPREAD = 0.15
"""By which share of itself an estimate may be off beside chance: states need not be alike."""


NEXT_USD = 10.0
"""The amount for which an estimate says what it would bring."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """The expected result of spending more money by value."""

    usd: float
    """How much of it can be spent before no question is left."""
    low: float
    high: float
    """Upper end of the interval of right pairs."""
    usd_per_last: float | None
    """Cost of the last of these pairs. Go on while it is below what a pair is worth to you."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """The expected right pairs per state, as an interval, if all teachers answer there."""

    low: float = _ASSUMED[0]
    high: float = _ASSUMED[1]
    n_states: int = 0
    """Number of states with answers behind this estimate. 0 means that it is assumed."""
    words: tuple[str, ...] = ()
    """A sentence for people: whether these teachers can teach this agent, and what to buy."""
    next: Next | None = None
    """What more money would bring, or None before there are answers."""


def prospect(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    rows: Mapping[int, Sequence[TeacherAction]],
    policy: Policy,
    *,
    usd_per_call: Mapping[str, float] | None = None,
) -> Prospect:
    """Return the expected number of right pairs at a state.

    Answers give the accuracies by kind of decision. The kinds are counted over all states, so the
    choice of the asked states doesn't matter.

    Args:
        states: all states.
        teachers: the teachers that would be asked.
        rows: answers by the index of their state.
        policy: how a run would buy.
        usd_per_call: mean cost of the remaining calls, by teacher.
    """
    families = list(dict.fromkeys(teacher.vendor for teacher in teachers))[:MOST_PLANNED]
    box = BallotBox(families, level=policy.level)
    ballots: list[Ballot] = []
    kinds: Counter[str] = Counter()
    places: Counter[_Place] = Counter()
    for number, state in enumerate(states):
        if family_of_model(state.get("student_model")) in families and len(families) < 2:
            continue
        kinds[kind_of_state(state)] += 1
        if not (answered := rows.get(number)):
            places[kind_of_state(state), (0, *[-1] * len(families)), outcome_of(state)] += 1
            continue
        poll = policy.poll(state)
        for row in answered:
            poll.add(row)
        ballot = box.ballot(state, poll.student, poll.votes) if poll.votes else None
        if ballot is not None:
            ballots.append(ballot)
            places[ballot.kind, ballot.pattern, ballot.has_failed] += 1
    if len(ballots) < _MIN_STATES:
        return Prospect()
    model = fit(ballots, (AGENT, *families))
    usd = _usd_by_family(teachers, families, usd_per_call or {})
    worth = Worth(model, usd, policy.threshold, policy.min_p_better)
    n_all = kinds.total()
    share = sum(n / n_all * worth.right_pairs(model.kind(kind)) for kind, n in kinds.items())
    half = 2 * math.sqrt(share * (1 - share) / len(ballots)) + _SPREAD * share
    return Prospect(
        low=round(max(0.0, share - half), 4),
        high=round(min(1.0, share + half), 4),
        n_states=len(ballots),
        words=(*model.words(), *_advice(model)),
        next=_next(model, worth, places, sum(usd) / len(usd), half / share if share else 0.0),
    )


_Place = tuple[str, Pattern, bool | None]
"""Kind, who did the same so far, and whether the recorded action failed."""


def _advice(model: Reliability) -> list[str]:
    if not model.words():
        return []
    best = max(model.accuracy(rater) for rater in model.raters[1:])
    gain = best - model.accuracy(AGENT)
    doubt = (
        "teachers that make the same mistakes look stronger than they are: check forty pairs in "
        "replay-pipeline look first"
    )
    return [advice(gain), *([doubt] if gain > SAME else [])]


def advice(gain: float) -> str:
    """Return what to buy, as the tables of `recipes/what_a_dollar_buys` have it.

    Args:
        gain: how much more often the best teacher is right than the model to train.
    """
    if gain > SAME:
        return (
            "buy agreement and train on it: one of them at more states brings more right pairs, but its "
            "wrong ones cost more than they bring"
        )
    if gain < -SAME:
        return "don't buy: where they differ from that model they are mostly wrong"
    return (
        "teachers that are as good as that model gain it little: check some pairs on the page of "
        "replay-pipeline look before you buy more"
    )


def _usd_by_family(
    teachers: Sequence[TeacherSpec], families: Sequence[str], usd_per_call: Mapping[str, float]
) -> list[float]:
    """Return cost of a call of each family, that of its cheapest teacher."""
    found = dict.fromkeys(families, math.inf)
    for teacher in teachers:
        if teacher.vendor in found and (usd := usd_per_call.get(teacher.name)) is not None:
            found[teacher.vendor] = min(found[teacher.vendor], usd)
    return [0.0 if usd == math.inf else usd for usd in found.values()]


def _next(
    model: Reliability,
    worth: Worth,
    places: Mapping[_Place, int],
    usd_per_call: float,
    spread: float,
) -> Next | None:
    """Spend `NEXT_USD` where it brings most.

    At each price of a right pair, states are asked on as far as they are worth it; the lowest price at
    which the money lasts is the one that is paid.
    """
    if usd_per_call <= 0:
        return None
    pairs, calls = np.zeros(len(PRICES)), np.zeros(len(PRICES))
    for (kind, pattern, has_failed), n in places.items():
        right, asked = worth.gains(model.kind(kind), pattern, has_failed=has_failed)
        pairs += n * right
        calls += n * asked
    # The less a call costs in pairs, the more is asked.
    usd = np.maximum.accumulate(calls[::-1] * usd_per_call)
    spent = min(NEXT_USD, float(usd[-1]))
    found = float(np.interp(spent, usd, pairs[::-1]))
    price = float(np.interp(spent, usd, PRICES[::-1]))
    return Next(
        usd=round(spent, 2),
        low=round(found * max(0.0, 1 - spread), 1),
        high=round(found * (1 + spread), 1),
        usd_per_last=round(usd_per_call / price, 4) if found else None,
    )
