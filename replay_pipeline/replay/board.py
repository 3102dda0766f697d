"""The votes at every state of a run: who waits for whom, and who need not be asked."""

import asyncio
from collections.abc import Callable, Sequence

from replay_pipeline.replay.gates import ASK, Gates, Poll, Verdict
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState


class Board:
    """Keeps one poll per state and lets teachers be asked in turn, cheapest first.

    A teacher waits only for cheaper ones, so nobody waits in a circle.
    """

    def __init__(
        self,
        gates: Gates,
        teachers: Sequence[TeacherSpec],
        expected_usd: Callable[[str, str], float],
    ) -> None:
        self.gates = gates
        self._teachers = list(teachers)
        self._places = {teacher.name: place for place, teacher in enumerate(teachers)}
        self._expected_usd = expected_usd
        self._polls: dict[int, Poll] = {}
        self._decided: dict[tuple[int, int], asyncio.Event] = {}
        self._n_decided: dict[int, int] = {}
        self._answered: set[tuple[int, int]] = set()

    async def verdict(self, index: int, state: TraceState, teacher: TeacherSpec) -> Verdict:
        """Wait for the cheaper teachers at state number `index`; then whether to ask this one."""
        if not self.gates.is_sequential:
            return ASK
        place = self._places[teacher.name]
        for earlier in range(place):
            await self._event(index, earlier).wait()
        left = [
            each
            for later, each in enumerate(self._teachers[place:], place)
            if (index, later) not in self._answered
        ]
        left_usd = sum(self._expected_usd(state["state_id"], each.name) for each in left)
        verdict = self.gates.judge(self._poll(index, state), left, left_usd)
        if verdict.gate and verdict.reason:
            self.saved(verdict.gate, state["state_id"], teacher)
        return verdict

    def decide(
        self, index: int, state: TraceState, teacher: TeacherSpec, answer: TeacherAction | None
    ) -> None:
        """Note what came of asking `teacher` at a state; `None` if it was not asked."""
        if not self.gates.is_sequential:
            return
        place = self._places[teacher.name]
        poll = self._poll(index, state)
        if answer is not None and (index, place) not in self._answered:
            self._answered.add((index, place))
            poll.add(answer)
        event = self._event(index, place)
        if not event.is_set():
            event.set()
            self._n_decided[index] = self._n_decided.get(index, 0) + 1
        if self._n_decided[index] == len(self._teachers):
            self.gates.learn(poll)
            del self._polls[index]

    def saved(self, gate: str, state_id: str, teacher: TeacherSpec) -> None:
        """Count a call that a gate saved."""
        self.gates.saved(gate, self._expected_usd(state_id, teacher.name))

    def _poll(self, index: int, state: TraceState) -> Poll:
        if index not in self._polls:
            self._polls[index] = self.gates.poll(state)
        return self._polls[index]

    def _event(self, index: int, place: int) -> asyncio.Event:
        return self._decided.setdefault((index, place), asyncio.Event())
