"""The facts about states that are known before any teacher is asked, and an order that covers all states."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from replay_pipeline.judge.strengths import kind_of_state
from replay_pipeline.replay.dialects.sizes import n_bytes_written
from replay_pipeline.types import TraceState, family_of_model

T = TypeVar("T")

_SEGMENT = 5
"""Steps of a session that are asked side by side: one reads what another has put into the cache."""


@dataclass(frozen=True, slots=True)
class Place:
    """The facts about a state that are known before any teacher is asked."""

    session: str
    project: str
    kind: str
    family: str | None = None
    """The student's family."""
    n_answer_bytes: int = 0
    """Size of what the student wrote."""


def place_of(state: TraceState, number: int) -> Place:
    """Return the facts about a state that the buyer needs before any teacher is asked."""
    session = state.get("session_id") or f"\0{number}"
    return Place(
        session=session,
        project=state.get("project") or state.get("cwd") or session,
        kind=kind_of_state(state),
        family=family_of_model(state.get("student_model")),
        n_answer_bytes=n_bytes_written(state["student_action"]),
    )


def coverage(places: Sequence[Place], asked: Iterable[int]) -> dict[str, dict[str, int]]:
    """Count the states, and those at which a teacher was asked."""
    numbers = set(asked)
    names: dict[str, list[str]] = {
        "projects": [place.project for place in places],
        "sessions": [place.session for place in places],
        "kinds": [place.kind for place in places],
        "states": [str(number) for number in range(len(places))],
    }
    return {
        what: {"asked": len({named[number] for number in numbers}), "all": len(set(named))}
        for what, named in names.items()
    }


def asked_by(places: Sequence[Place], asked: Iterable[int]) -> dict[str, dict[str, int]]:
    """Count the states at which a teacher was asked, by project and kind of decision. Includes zeros."""
    numbers = Counter(set(asked))
    found: dict[str, Counter[str]] = {"projects": Counter(), "kinds": Counter()}
    for number, place in enumerate(places):
        found["projects"][place.project] += numbers[number]
        found["kinds"][place.kind] += numbers[number]
    return {what: dict(sorted(counts.items())) for what, counts in found.items()}


def spread(places: Sequence[Place], n_steps: int = _SEGMENT) -> list[list[int]]:
    """Cut sessions into short runs of steps, ordered so that any beginning covers projects and time.

    Projects take turns. Within a project, and within a session, runs that lie far apart come first:
    the beginning, the middle, then the quarters (van der Corput's sequence, 1935).
    """
    sessions: dict[str, dict[str, list[int]]] = {}
    for number, place in enumerate(places):
        sessions.setdefault(place.project, {}).setdefault(place.session, []).append(number)
    queues: list[Iterator[list[int]]] = [
        _turns([
            far_apart([steps[at : at + n_steps] for at in range(0, len(steps), n_steps)])
            for steps in far_apart(list(of_project.values()))
        ])
        for of_project in sessions.values()
    ]  # fmt: skip
    return list(_turns([list(queue) for queue in queues]))


def _turns(queues: Sequence[Sequence[list[int]]]) -> Iterator[list[int]]:
    """Take the first of each, then the second of each, and so on."""
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                yield queue[turn]


def far_apart(items: Sequence[T]) -> list[T]:
    """Order items so that any first part of the list is spread over all items."""
    n_bits = max(1, math.ceil(math.log2(max(2, len(items)))))
    order = (int(f"{i:0{n_bits}b}"[::-1], 2) for i in range(1 << n_bits))
    return [items[i] for i in order if i < len(items)]
