"""What a replay would take, before anything is paid."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from replay_pipeline.replay.engine import Task
from replay_pipeline.replay.gates import parse_gates
from replay_pipeline.replay.prices import Price, usd
from replay_pipeline.types import Message, TeacherSpec
from replay_pipeline.windows import window_messages

ASSUMED_STUDENT = 0.5
"""How often the cheapest teacher is assumed to do what the student did."""
ASSUMED_TEACHERS = 0.6
"""How often two teachers are assumed to agree."""

_MIN_CACHED_TOKENS = 1024
_MIN_ANSWER_TOKENS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherEstimate:
    """What one teacher would take."""

    teacher: str
    model: str
    n_calls: int
    n_prompt_tokens: int
    n_cached_tokens: int
    """Prompt tokens that a provider's prompt cache should serve."""
    n_completion_tokens: int
    expected_usd: float
    bound_usd: float
    """What can't be passed: the sum of the reservations."""
    price_source: str
    price_date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a replay would take, per teacher and in all, in tokens and US dollars."""

    n_states: int
    n_calls: int
    expected_usd: float
    bound_usd: float
    teachers: tuple[TeacherEstimate, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self)


def forecast(
    lanes: Sequence[tuple[TeacherSpec, Sequence[Task]]],
    prices: Mapping[str, Price],
    window: str,
    *,
    gates: Sequence[str] = (),
) -> Estimate:
    """Add up what the questions of these lanes would take.

    Equal requests count once. Gates about states are applied; for gates about votes the share of
    states at which each teacher is still asked is assumed (`ASSUMED_STUDENT`, `ASSUMED_TEACHERS`).
    """
    lanes = _asked_once(lanes, gates)
    by_teacher: dict[str, list[tuple[TeacherSpec, Sequence[Task]]]] = {}
    for teacher, lane in lanes:
        by_teacher.setdefault(teacher.name, []).append((teacher, lane))
    every = [_of_teacher(each, prices[name], window) for name, each in by_teacher.items()]
    every.sort(key=lambda teacher: teacher.expected_usd / max(1, teacher.n_calls))
    shares = _shares(len(every), gates)
    teachers = tuple(_scaled(each, share) for each, share in zip(every, shares, strict=True))
    return Estimate(
        n_states=len({task.state_id for _, lane in lanes for task in lane}),
        n_calls=sum(teacher.n_calls for teacher in teachers),
        expected_usd=round(math.fsum(teacher.expected_usd for teacher in teachers), 9),
        bound_usd=round(math.fsum(teacher.bound_usd for teacher in teachers), 9),
        teachers=teachers,
    )


def _asked_once(
    lanes: Sequence[tuple[TeacherSpec, Sequence[Task]]], gates: Sequence[str]
) -> list[tuple[TeacherSpec, list[Task]]]:
    tasks = {task.state_index: task for _, lane in lanes for task in lane}
    indices = sorted(tasks)
    screened = parse_gates(gates).screen_states(tasks[index].state for index in indices)
    left_out = {indices[place] for place in screened}
    seen: set[str] = set()
    asked = []
    for teacher, lane in lanes:
        kept = []
        for task in lane:
            if task.question.sha not in seen and task.state_index not in left_out:
                seen.add(task.question.sha)
                kept.append(task)
        if kept:
            asked.append((teacher, kept))
    return asked


def _shares(n_teachers: int, gates: Sequence[str]) -> list[float]:
    """Share of states at which each teacher, cheapest first, is expected to be asked."""
    kinds = {name.partition(":")[0]: name.partition(":")[2] for name in gates}
    shares = [1.0] * n_teachers
    if "cheap_screen" in kinds:
        explored = float(kinds["cheap_screen"] or 0)
        passed = 1 - ASSUMED_STUDENT * (1 - explored)
        shares = [1.0, *[passed] * (n_teachers - 1)]
    if "cheap_first" in kinds:
        for place in range(2, n_teachers):
            shares[place] = shares[place - 1] * (1 - ASSUMED_TEACHERS)
    return shares[:n_teachers]


def _scaled(teacher: TeacherEstimate, share: float) -> TeacherEstimate:
    if share == 1:
        return teacher
    return replace(
        teacher,
        n_calls=round(teacher.n_calls * share),
        n_prompt_tokens=round(teacher.n_prompt_tokens * share),
        n_cached_tokens=round(teacher.n_cached_tokens * share),
        n_completion_tokens=round(teacher.n_completion_tokens * share),
        expected_usd=round(teacher.expected_usd * share, 9),
    )


def _of_teacher(
    lanes: list[tuple[TeacherSpec, Sequence[Task]]], price: Price, window: str
) -> TeacherEstimate:
    n_calls = n_prompt = n_cached = n_completion = expected = bound = 0
    for _, lane in lanes:
        previous: Task | None = None
        for task in lane:
            question = task.question
            prompt = question.expected_prompt_tokens
            cached = _cached_tokens(previous, task, prompt, window)
            completion = _answer_tokens(task)
            n_calls += 1
            n_prompt += prompt
            n_cached += cached
            n_completion += completion
            expected += price.cost_nano(prompt, completion, n_cached_tokens=cached)
            bound += price.bound_nano(question.prompt_bound_tokens, question.max_completion_tokens)
            previous = task
    teacher = lanes[0][0]
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
    )


def _cached_tokens(previous: Task | None, task: Task, n_prompt: int, window: str) -> int:
    """Prompt tokens that the step before, in the same lane, left in the provider's cache."""
    if previous is None:
        return 0
    shared = _shared_prefix_bytes(
        window_messages(previous.state["messages"], window),
        window_messages(task.state["messages"], window),
    )
    cached = round(n_prompt * min(1.0, shared / max(1, task.question.n_prompt_bytes)))
    return cached if cached >= _MIN_CACHED_TOKENS else 0


def _shared_prefix_bytes(before: list[Message], after: list[Message]) -> int:
    """Bytes of the messages that two prefixes have in common at their front."""
    total = 0
    for one, other in zip(before, after, strict=False):
        if one is not other and one != other:
            break
        total += len(msgspec.json.encode(other))
    return total


def _answer_tokens(task: Task) -> int:
    """A teacher's action is about as long as the student's."""
    action = task.state["student_action"]
    size = len(str(action)) // 4
    return min(task.question.max_completion_tokens, max(_MIN_ANSWER_TOKENS, size))
