"""Estimate what a replay would cost, and how many right pairs it would bring, before you pay."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from replay_pipeline.judge.ballots import AGENT, Ballot, BallotBox, kind_of_state
from replay_pipeline.judge.reliability import MOST_PLANNED, SAME, Reliability, fit, right_pairs
from replay_pipeline.replay.buy.lanes import LaneQuestion
from replay_pipeline.replay.buy.policy import RECOMMENDED_GATES, Policy
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.sizes import Learned, n_bytes_written
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
        n / kinds.total() * right_pairs(model, model.kind(kind), policy.threshold)
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


ASSUMED_STUDENT = 0.5
"""Assumed share of states at which the cheapest teacher does what the student did."""
ASSUMED_TEACHERS = 0.6
"""Assumed share of states at which two teachers agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherEstimate:
    """The estimated tokens and cost of one teacher."""

    teacher: str
    model: str
    n_calls: int
    n_prompt_tokens: int
    n_cached_tokens: int
    """Prompt tokens that a provider's prompt cache should serve."""
    n_completion_tokens: int
    expected_usd: float
    bound_usd: float
    """The sum of the reservations, if no call settles for less."""
    price_source: str
    price_date: str
    spread: float = 0.0
    """Fraction by which the cost may be lower or higher."""
    adaptations: tuple[str, ...] = ()
    """Fields that are left out for its endpoint, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The estimated tokens and cost of a replay, per teacher and in total, in US dollars."""

    n_states: int
    n_calls: int
    expected_usd: float
    bound_usd: float
    teachers: tuple[TeacherEstimate, ...]
    low_usd: float = 0.0
    high_usd: float = 0.0
    """The upper end of the likely cost."""
    prospect: Prospect = field(default_factory=Prospect)
    """Expected number of right pairs per state."""
    added_by_clients: float | None = None
    """Share that the clients' own prompts and tools add to the cost of the neutral ones, by what they
    add at the first states. `None` if no state has them."""
    gated: "Estimate | None" = None
    """The same estimate with the recommended gates, if you set none."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


def forecast(
    lanes: Sequence[tuple[TeacherSpec, Sequence[LaneQuestion]]],
    prices: Mapping[str, Price],
    *,
    gates: Sequence[str] = (),
    learned: Mapping[str, Learned] | None = None,
    adaptations: Mapping[str, tuple[str, ...]] | None = None,
    is_full: bool = False,
) -> Estimate:
    """Sum the estimates over the questions of these lanes.

    Equal requests count once. Gates on states are applied. Gates on votes depend on answers, so the
    share of states that they let through is assumed (`ASSUMED_STUDENT`, `ASSUMED_TEACHERS`).

    Args:
        lanes: the questions, in the order of asking.
        prices: price by teacher.
        gates: gates by name.
        learned: token counts learned from each teacher's earlier answers.
        adaptations: fields that are left out for each teacher's endpoint.
        is_full: also estimate with the recommended gates.
    """
    asked = _asked_once(lanes)
    by_teacher: dict[str, list[Sequence[LaneQuestion]]] = {}
    for teacher, lane in asked:
        by_teacher.setdefault(teacher.name, []).append(lane)
    every = [
        _of_teacher(each, prices[name], (learned or {}).get(name, Learned()))
        for name, each in by_teacher.items()
    ]
    every.sort(key=lambda teacher: teacher.expected_usd / max(1, teacher.n_calls))
    shares = _shares(len(every), gates)
    teachers = tuple(
        replace(_scaled(each, share), adaptations=(adaptations or {}).get(each.teacher, ()))
        for each, share in zip(every, shares, strict=True)
    )
    expected = math.fsum(teacher.expected_usd for teacher in teachers)
    spread = math.fsum(teacher.expected_usd * teacher.spread for teacher in teachers)
    n_states = len({task.state_id for _, lane in asked for task in lane})
    return Estimate(
        n_states=n_states,
        n_calls=sum(teacher.n_calls for teacher in teachers),
        expected_usd=round(expected, 9),
        bound_usd=round(math.fsum(teacher.bound_usd for teacher in teachers), 9),
        teachers=teachers,
        low_usd=round(expected - spread, 9),
        high_usd=round(expected + spread, 9),
        gated=forecast(lanes, prices, gates=RECOMMENDED_GATES, learned=learned)
        if is_full and not gates
        else None,
    )


def _asked_once(
    lanes: Sequence[tuple[TeacherSpec, Sequence[LaneQuestion]]],
) -> list[tuple[TeacherSpec, list[LaneQuestion]]]:
    seen: set[str] = set()
    asked = []
    for teacher, lane in lanes:
        kept = []
        for task in lane:
            if task.question.sha not in seen:
                seen.add(task.question.sha)
                kept.append(task)
        if kept:
            asked.append((teacher, kept))
    return asked


def _shares(n_teachers: int, gates: Sequence[str]) -> list[float]:
    """Share of states at which each teacher, cheapest first, is expected to be asked."""
    shares = [1.0] * n_teachers
    explored = {name.partition(":")[0]: float(name.partition(":")[2] or 0) for name in gates}
    if (share := explored.get("cheap_first")) is None:
        return shares
    # If the first of up to three teachers does what the student did, no pair is possible any more.
    passed = 1.0 if n_teachers > 3 else 1 - ASSUMED_STUDENT * (1 - share)
    asked_on = 1 - ASSUMED_TEACHERS * (1 - share)
    return [1.0, *(passed * asked_on**place for place in range(n_teachers - 1))][:n_teachers]


def _scaled(teacher: TeacherEstimate, share: float) -> TeacherEstimate:
    return replace(
        teacher,
        n_calls=round(teacher.n_calls * share),
        n_prompt_tokens=round(teacher.n_prompt_tokens * share),
        n_cached_tokens=round(teacher.n_cached_tokens * share),
        n_completion_tokens=round(teacher.n_completion_tokens * share),
        expected_usd=round(teacher.expected_usd * share, 9),
    )


def _of_teacher(
    lanes: Sequence[Sequence[LaneQuestion]], price: Price, learned: Learned
) -> TeacherEstimate:
    n_calls = n_prompt = n_cached = n_completion = expected = bound = 0
    for lane in lanes:
        asked: set[int] = set()
        for task in lane:
            question, before = task.question, task.previous
            while before is not None and not (before.is_asked or before.index in asked):
                before = before.previous
            asked.add(task.index)
            most = question.size.bound_tokens
            if before is not None:
                added = question.size.added_bound_tokens(before.question.size)
                most = min(most, learned.expected_tokens(before.question.size) + added)
            n_student_bytes = n_bytes_written(task.state["student_action"])
            call = task.expected(price, before, n_student_bytes=n_student_bytes, learned=learned)
            n_calls += 1
            n_prompt += call.n_prompt_tokens
            n_cached += call.n_cached_tokens
            n_completion += call.n_completion_tokens
            expected += call.cost_nano
            bound += price.bound_nano(most, question.max_completion_tokens)
    teacher = lanes[0][0].teacher
    return TeacherEstimate(
        teacher=teacher.name,
        model=teacher.model,
        n_calls=n_calls,
        n_prompt_tokens=n_prompt,
        n_cached_tokens=n_cached,
        n_completion_tokens=n_completion,
        expected_usd=usd(expected),
        bound_usd=usd(bound),
        price_source=price.source,
        price_date=price.date,
        spread=learned.spread,
    )
