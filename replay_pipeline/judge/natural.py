"""Find pairs in a session without any teacher: abandoned branches, and actions that the user rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.judge.judgment import OBJECTIONS, Proposal, first_objection
from replay_pipeline.types import AgreementLevel, TraceState


@dataclass(frozen=True, slots=True)
class NaturalPair:
    """A state's preference found in the record itself."""

    state: TraceState
    chosen: Action
    rejected: Action
    source: Literal["rewind", "rejection"]

    @property
    def place(self) -> tuple[str, int]:
        """Return the session and the length of the prefix, which both branches of a rewind share."""
        return self.state.get("session_id") or "", len(self.state["messages"])

    def objection(self, level: AgreementLevel) -> str | None:
        """Return why the record alone makes no pair of it, or None if it does."""
        proposal = Proposal(
            state=self.state,
            chosen=self.chosen,
            rejected=self.rejected,
            level=level,
            spellings=[self.chosen],
        )
        found = first_objection(proposal, OBJECTIONS[self.source])
        return found[0] if found is not None else None


def natural_pairs(states: Sequence[TraceState]) -> Iterator[NaturalPair]:
    """Find the preferences that rewinds and rejections show, each fact once.

    In a rewind, the abandoned one of two actions at the same prefix is the rejected side. In a
    rejection, the user refused an action, and the next action that was not refused succeeded. Later
    actions don't count, because the agent knew more by then than the prompt shows.

    Args:
        states: The states in any order. `turn_idx` sorts the steps of a session.
    """
    seen: set[tuple[tuple[str, int], str, str]] = set()
    sessions: dict[str, list[TraceState]] = {}
    for state in states:
        if (session := state.get("session_id")) is not None:
            sessions.setdefault(session, []).append(state)
        for chosen, rejected in _rewinds(state):
            pair = NaturalPair(state, chosen, rejected, "rewind")
            if (fact := (pair.place, chosen.render(), rejected.render())) not in seen:
                seen.add(fact)
                yield pair
    for steps in sessions.values():
        yield from _rejections(steps)


def _rewinds(state: TraceState) -> Iterator[tuple[Action, Action]]:
    alternatives = state.get("alternatives") or []
    if not alternatives:
        return
    cwd, tools = state.get("cwd"), state.get("tools")
    recorded = _action(state)
    others = [canonical_action(message, cwd=cwd, tools=tools) for message in alternatives]
    if state.get("outcome") == "rewound":
        yield others[-1], recorded
    else:
        yield from ((recorded, other) for other in others)


def _rejections(steps: list[TraceState]) -> Iterator[NaturalPair]:
    steps = sorted(steps, key=lambda state: state.get("turn_idx", 0))
    for place, state in enumerate(steps):
        if state.get("outcome") != "user_rejected":
            continue
        later = (step for step in steps[place + 1 :] if step.get("outcome") != "user_rejected")
        following = next(later, None)
        if following is not None and following.get("outcome") == "ok":
            yield NaturalPair(state, _action(following), _action(state), "rejection")


def _action(state: TraceState) -> Action:
    return canonical_action(state["student_action"], cwd=state.get("cwd"), tools=state.get("tools"))
