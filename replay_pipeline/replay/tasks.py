"""A question on its way: what is asked of whom, and what is known of its earlier calls."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replay_pipeline.replay.calls import LostCall
from replay_pipeline.replay.requests import Question
from replay_pipeline.types import TeacherSpec, TraceState

Lanes = Sequence[tuple[TeacherSpec, deque["LaneQuestion"]]]


@dataclass(slots=True)
class LaneQuestion:
    """A question in its lane."""

    index: int
    """Place in the report: states in order, teachers in order."""
    states: Sequence[TraceState]
    """All states of the run, which may be put together only when they are asked for."""
    state_index: int
    teacher: TeacherSpec
    question: Question
    lost: tuple[LostCall, ...] = ()
    gate: str | None = None
    propensity: float = 1.0
    previous: "LaneQuestion | None" = None
    """The step before in its lane, if this prompt begins with the whole of that one's."""
    n_read_tokens: int | None = None
    """Prompt tokens that the teacher read, once it has answered."""
    is_left_out: bool = False
    """The policy saved this call; `gate` is why."""
    n_lost: int = 0
    """How often a call of this run was lost."""
    is_asked: bool = False
    """The endpoint has seen this prompt, in this run or before."""

    @property
    def state(self) -> TraceState:
        """Put the state together with its messages, which can be large: not to be kept."""
        return self.states[self.state_index]

    @property
    def state_id(self) -> str:
        """Return the id of the state."""
        return self.question.state_id

    def bound_tokens(self) -> int:
        """Count prompt tokens that can't be passed.

        A teacher that has read the beginning of this prompt has counted it: only what was added
        is taken at one token a byte.
        """
        bound = self.question.size.bound_tokens
        if self.previous is None or self.previous.n_read_tokens is None:
            return bound
        added = self.question.size.added_bound_tokens(self.previous.question.size)
        return min(bound, self.previous.n_read_tokens + added)

    def last_asked(self) -> "LaneQuestion | None":
        """Find the nearest step before whose prompt the endpoint has seen and this one begins with."""
        step = self.previous
        while step is not None and not step.is_asked:
            step = step.previous
        return step
