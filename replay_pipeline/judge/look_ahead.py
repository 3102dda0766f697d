"""Find actions that the student takes by itself a few steps later, so that only the order differs."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replay_pipeline.actions import Action
from replay_pipeline.judge.answers import Side
from replay_pipeline.types import FAILURES, DPOPair, TraceState


@dataclass(frozen=True, slots=True)
class AgentStep:
    """The agent's action at one turn of a session."""

    turn_idx: int
    n_user_messages: int
    action: Action


@dataclass(frozen=True, slots=True)
class DeferrablePair:
    """A pair that may turn out to be deferred, with its sides."""

    pair: DPOPair
    row: dict[str, Any]
    """The state's row in `outcomes`."""
    chosen: Action
    rejected: Action
    place: tuple[str, int]
    """Session, and length of the prefix."""
    step: AgentStep | None
    """Step of the session. `None` if it is unknown, or if the side was sampled."""


class LookAhead:
    """The recorded actions of each session by turn.

    Args:
        n_steps: how many steps to look ahead.
        is_same: whether two actions agree.
    """

    def __init__(self, n_steps: int, is_same: Callable[[Action, Action], bool]) -> None:
        self._n_steps = n_steps
        self._is_same = is_same
        self._steps: dict[str, list[AgentStep]] = {}

    def note(self, state: TraceState, side: Side) -> AgentStep | None:
        """Record the agent's action for the look-ahead of earlier states, and return it."""
        session_id, turn_idx = state.get("session_id"), state.get("turn_idx")
        if session_id is None or turn_idx is None or side.source != "recorded":
            return None
        n_user_messages = sum(message.get("role") == "user" for message in state["messages"])
        step = AgentStep(turn_idx, n_user_messages, side.action)
        self._steps.setdefault(session_id, []).append(step)
        return step

    def sort(self) -> None:
        """Sort the steps. Call it once, after all are recorded."""
        for steps in self._steps.values():
            steps.sort(key=lambda step: step.turn_idx)

    def n_steps_to(self, found: DeferrablePair) -> int | None:
        """Return the number of steps until the agent takes the chosen action of a pair, or None if it doesn't soon.

        Also None if the recorded action failed or was refused. Taking the other action next is then
        the best evidence that it was better.
        """
        now = found.step
        if now is None or found.pair.get("outcome") in FAILURES:
            return None
        steps = self._steps[found.place[0]]
        first = bisect_right(steps, now.turn_idx, key=lambda step: step.turn_idx)
        for n, step in enumerate(steps[first : first + self._n_steps], start=1):
            if step.n_user_messages > now.n_user_messages:
                return None  # the user spoke in between: it may have been told to
            if self._is_same(found.chosen, step.action):
                return n
        return None
