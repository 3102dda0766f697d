"""Let teachers go on behind their votes for a few steps, each carried out on the files: data to imitate, unfiltered.

A vote that acts is carried out, and the teacher is asked on with what its client would have shown. Each step is an
ordinary question, booked and resumed as such.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from replay_pipeline.actions import canonical_action
from replay_pipeline.replay.buy.lanes import looked_at
from replay_pipeline.types import (
    Look,
    LookAnswer,
    Message,
    ReplayReport,
    TeacherAction,
    TraceState,
)

CarriedOut = Callable[[TraceState, Sequence[Message]], Sequence[LookAnswer] | None]
"""Returns what the calls of the last of some steps at a state show, or None where they can't be carried out."""
Ask = Callable[[str, Sequence[TraceState], float], ReplayReport]
"""Asks a teacher at some states, for at most so many US dollars."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A teacher's way from a state."""

    state: TraceState
    last: TeacherAction
    looks: tuple[Look, ...]
    """All steps before `last`."""
    acts: tuple[Message, ...] = ()
    """The steps from the vote on that were carried out."""


@dataclass(slots=True)
class WentOn:
    """The steps behind the votes."""

    actions: list[TeacherAction] = field(default_factory=list)
    paid_usd: float = 0.0
    """What was newly paid for them, or may have been."""
    is_complete: bool = True

    @property
    def cost_usd(self) -> float:
        """Return what they cost, whenever that was paid."""
        return math.fsum(each.cost_usd for each in self.actions)


def continued(
    states: Iterable[TraceState],
    votes: Iterable[TeacherAction],
    carried_out: CarriedOut,
    ask: Ask,
    *,
    n_steps: int,
    max_usd: float,
) -> WentOn:
    """Return the steps behind the votes.

    Each vote has at most `n_steps` behind it, and `max_usd` is the ceiling of what is paid now.
    """
    acting: dict[str, list[TeacherAction]] = defaultdict(list)
    for vote in filter(_acts, votes):
        acting[vote.state_id].append(vote)
    ways = [
        _Way(state, vote, vote.looks)
        for state in states
        for vote in acting.get(state["state_id"], ())
    ]
    found = WentOn()
    for number in range(1, n_steps + 1):
        open_ways = [way for each in ways if (way := _after(each, carried_out)) is not None]
        by_teacher: Mapping[str, list[_Way]] = defaultdict(list)
        for way in open_ways:
            by_teacher[way.last.teacher].append(way)
        ways = []
        for teacher, own in by_teacher.items():
            prompts = [_prompt(way, number) for way in own]
            report = ask(teacher, prompts, max(0.0, max_usd - found.paid_usd))
            found.paid_usd += report.newly_spent_usd + report.unknown_usd
            found.is_complete &= report.stop_reason in ("completed", "mostly_failed")
            rows = {row.state_id: row for row in report.actions if row.error_code is None}
            for way, prompt in zip(own, prompts, strict=True):
                if (row := rows.get(prompt["state_id"])) is not None:
                    step = replace(
                        row, state_id=way.state["state_id"], looks=way.looks, n_after=number
                    )
                    found.actions.append(step)
                    ways.append(replace(way, last=step))
    return found


def _acts(vote: TeacherAction) -> bool:
    """Return whether a vote calls a tool."""
    return vote.error_code is None and bool(vote.action and vote.action.get("tool_calls"))


def _after(way: _Way, carried_out: CarriedOut) -> _Way | None:
    """Return a way after its last step was carried out, or None where it ends."""
    action = way.last.action
    cwd, tools = way.state.get("cwd"), way.state.get("tools") or None
    if not _acts(way.last) or action is None:
        return None
    if not canonical_action(action, cwd=cwd, tools=tools).is_valid:
        return None
    calls = [
        {**call, "id": call.get("id") or f"step_{len(way.looks)}_{number}"}
        for number, call in enumerate(action["tool_calls"])
    ]
    action = {**action, "tool_calls": calls}
    acts = (*way.acts, action)
    answers = carried_out(way.state, acts)
    if answers is None or len(answers) != len(calls):
        return None
    look = Look(
        action=action, answers=tuple(answers), request_sha=way.last.request_sha or "",
    )  # fmt: skip
    return replace(way, looks=(*way.looks, look), acts=acts)


def _prompt(way: _Way, number: int) -> TraceState:
    state_id = f"{way.state['state_id']}>{way.last.teacher}+{number}"
    return {**looked_at(way.state, way.looks), "state_id": state_id}
