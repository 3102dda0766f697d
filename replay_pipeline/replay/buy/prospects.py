"""Estimate how many right pairs a replay will bring: from assumptions at first, then from answers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay_pipeline.judge.ballots import AGENT, Ballot, BallotBox, kind_of_state
from replay_pipeline.judge.reliability import SAME, Reliability, fit
from replay_pipeline.judge.worth import MOST_PLANNED, right_pairs
from replay_pipeline.replay.buy.policy import Policy
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState, family_of_model

_ASSUMED = (0.05, 0.75)
"""Right pairs per state if all teachers answer there, before anything is known: the first figure for teachers
as strong as the agent, the second for far stronger ones."""
_MIN_STATES = 20
_SPREAD = 0.15
"""By which share of itself an estimate may be off beside chance: states need not be alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """The expected right pairs per state, as an interval, if all teachers answer there."""

    low: float = _ASSUMED[0]
    high: float = _ASSUMED[1]
    n_states: int = 0
    """Number of states with answers behind this estimate. 0 means that it is assumed."""
    words: tuple[str, ...] = ()
    """A sentence for people: whether these teachers can teach this agent, and what to buy."""


def prospect(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    rows: Mapping[int, Sequence[TeacherAction]],
    policy: Policy,
) -> Prospect:
    """Return the expected number of right pairs at a state.

    Answers give the accuracies by kind of decision. The kinds are counted over all states, so the
    choice of the asked states doesn't matter.

    Args:
        states: all states.
        teachers: the teachers that would be asked.
        rows: answers by the index of their state.
        policy: how a run would buy.
    """
    families = list(dict.fromkeys(teacher.vendor for teacher in teachers))[:MOST_PLANNED]
    box = BallotBox(families, level=policy.level)
    ballots: list[Ballot] = []
    kinds: Counter[str] = Counter()
    for number, state in enumerate(states):
        if family_of_model(state.get("student_model")) in families and len(families) < 2:
            continue
        kinds[kind_of_state(state)] += 1
        if not (answered := rows.get(number)):
            continue
        poll = policy.poll(state)
        for row in answered:
            poll.add(row)
        ballot = box.ballot(state, poll.student, poll.votes) if poll.votes else None
        if ballot is not None:
            ballots.append(ballot)
    if len(ballots) < _MIN_STATES:
        return Prospect()
    model = fit(ballots, (AGENT, *families))
    share = sum(
        n
        / kinds.total()
        * right_pairs(model, model.kind(kind), policy.threshold, policy.min_p_better)
        for kind, n in kinds.items()
    )
    half = 2 * math.sqrt(share * (1 - share) / len(ballots)) + _SPREAD * share
    return Prospect(
        low=round(max(0.0, share - half), 4),
        high=round(min(1.0, share + half), 4),
        n_states=len(ballots),
        words=(*model.words(), *_advice(model)),
    )


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
