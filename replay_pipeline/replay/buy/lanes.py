"""Questions in lanes: one lane for each session and teacher, asked step after step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from replay_pipeline.replay.buy.places import Place, place_of
from replay_pipeline.replay.dialects.base import RequestOptions
from replay_pipeline.replay.dialects.prices import Price
from replay_pipeline.replay.dialects.requests import Prefix, Question, RequestBuilder
from replay_pipeline.replay.dialects.sizes import MIN_CACHED_TOKENS, Learned
from replay_pipeline.replay.money.calls import LostCall
from replay_pipeline.types import Look, TeacherSpec, TraceState

Lanes = list[tuple[TeacherSpec, deque["LaneQuestion"]]]
LEAST_LOOKS_USD = 0.05
"""The share of looks bites only above this: that of a few first steps would pay for no look, and waste their votes."""


@dataclass(slots=True)
class LaneQuestion:
    """A question in its lane."""

    index: int
    """Index in the report, which is ordered by state, then teacher."""
    states: Sequence[TraceState]
    """All states of the run. They may be built only on access."""
    state_index: int
    teacher: TeacherSpec
    question: Question
    lost: tuple[LostCall, ...] = ()
    gate: str | None = None
    propensity: float = 1.0
    previous: "LaneQuestion | None" = None
    """The previous step in its lane, if this prompt starts with that whole prompt."""
    n_read_tokens: int | None = None
    """Prompt tokens that the teacher counted, after it has answered."""
    n_lost: int = 0
    """How often a call of this run was lost."""
    is_asked: bool = False
    """Whether the endpoint has seen this prompt, in this run or before."""
    looks: tuple[Look, ...] = ()
    """What the teacher looked at before: then this is a further step of the question `first`."""
    first: "LaneQuestion | None" = None
    then: "LaneQuestion | None" = None
    """The next step, if the answer only looked."""
    ended_by: str | None = None
    """Why there is no next step although it did."""

    @property
    def state(self) -> TraceState:
        """Build the state with its messages. It can be large, so don't keep it."""
        state = self.states[self.state_index]
        if not self.looks:
            return state
        return {**looked_at(state, self.looks), "state_id": self.state_id}

    @property
    def state_id(self) -> str:
        """Return the id of the state."""
        return self.question.state_id

    def bound_tokens(self) -> int:
        """Return an upper bound on the prompt tokens.

        If the teacher has already counted the beginning of this prompt, only the rest is taken at
        one token per byte.
        """
        bound = self.question.size.bound_tokens
        if self.previous is None or self.previous.n_read_tokens is None:
            return bound
        added = self.question.size.added_bound_tokens(self.previous.question.size)
        return min(bound, self.previous.n_read_tokens + added)

    def expected_nano(
        self,
        price: Price,
        before: "LaneQuestion | None",
        n_student_bytes: int,
        n_looks: float = 0.0,
    ) -> int:
        """Return what a question should cost, if the endpoint has the prompt of `before` in its cache.

        Its looks cost a call each, with the prompt in the cache.
        """
        looks = round(n_looks * self.expected_nano(price, self, n_student_bytes)) if n_looks else 0
        learned = Learned()
        n_prompt = learned.expected_tokens(self.question.size)
        n_cached = learned.expected_tokens(before.question.size) if before is not None else 0
        n_cached = n_cached if n_cached >= MIN_CACHED_TOKENS else 0
        return looks + price.cost_nano(
            n_prompt,
            learned.answer_tokens(n_student_bytes, self.question.max_completion_tokens),
            n_cached_tokens=n_cached,
            n_written_tokens=n_prompt - n_cached if price.cache_write > price.prompt else 0,
        )

    def last_asked(self) -> "LaneQuestion | None":
        """Find the latest earlier step whose prompt the endpoint has seen and this prompt starts with."""
        step = self.previous
        while step is not None and not step.is_asked:
            step = step.previous
        return step


def looked_at(state: TraceState, looks: Sequence[Look]) -> TraceState:
    """Return a state after looks: what a teacher is asked on with."""
    added = [message for look in looks for message in look.messages()]
    return {**state, "messages": [*state["messages"], *added]}


def lanes_of(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    options: RequestOptions,
    places: list[Place] | None = None,
) -> Lanes:
    """Group questions into lanes, one per session and teacher. A state without a session gets its own lane.

    Adds the facts that the buyer needs about each state to `places`.
    """
    builder = RequestBuilder(options)
    lanes: dict[tuple[str, str], tuple[TeacherSpec, deque[LaneQuestion]]] = {}
    prefixes: dict[str, Prefix] = {}
    for i, state in enumerate(states):
        session = state.get("session_id") or f"\0{i}"
        if places is not None:
            places.append(place_of(state, i))
        goes_on, prefixes[session] = builder.begins_with(state, prefixes.get(session))
        for j, teacher in enumerate(teachers):
            _, lane = lanes.setdefault((session, teacher.name), (teacher, deque()))
            question = builder.question(state, teacher)
            task = LaneQuestion(i * len(teachers) + j, states, i, teacher, question)
            task.previous = lane[-1] if goes_on else None
            lane.append(task)
    return list(lanes.values())


def tasks_of(teachers: Sequence[TeacherSpec], lanes: Lanes) -> dict[tuple[int, int], LaneQuestion]:
    """Return the questions of lanes by the indexes of their state and teacher."""
    numbers = {teacher.name: number for number, teacher in enumerate(teachers)}
    return {
        (task.state_index, numbers[teacher.name]): task for teacher, lane in lanes for task in lane
    }
