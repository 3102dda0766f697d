"""A replay in rounds: the buyer chooses questions, and their answers decide what it chooses next."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from replay_pipeline.replay.ask.asking import Asking
from replay_pipeline.replay.ask.engine import Engine
from replay_pipeline.replay.buy.buying import Buyer, Choice, Market
from replay_pipeline.replay.buy.places import Place
from replay_pipeline.replay.buy.policy import Policy
from replay_pipeline.replay.buy.tasks import LaneQuestion
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.replay.money.calls import LedgerEntries
from replay_pipeline.types import GateReport, TeacherSpec, TraceState

Lanes = list[tuple[TeacherSpec, deque[LaneQuestion]]]

_MIN_CACHED_TOKENS = 1024


@dataclass(kw_only=True)
class Rounds:
    """The rounds of one run.

    An answer from the ledger counts only when its question is chosen. So a run that was stopped and
    continued makes the same choices as one that wasn't.
    """

    engine: Engine
    asking: Asking
    policy: Policy
    states: Sequence[TraceState]
    teachers: Sequence[TeacherSpec]
    places: Sequence[Place]
    prices: Mapping[str, Price]
    limit_nano: int
    found: LedgerEntries
    take_known: Callable[[Lanes], Lanes] | None
    """Returns the known answers. None if that was done already and the lanes leave these questions out."""
    tasks: dict[tuple[int, int], LaneQuestion] = field(default_factory=dict)
    n_rounds: int = 0
    buyer: Buyer | None = None
    """The buyer, or None before the run begins."""

    async def run(self, lanes: Lanes) -> None:
        """Ask round after round until nothing is left to ask, or the money is used up.

        Raises:
            LedgerError: the ledger can't be written. Calls in flight were awaited first.
        """
        numbers = {teacher.name: number for number, teacher in enumerate(self.teachers)}
        self.tasks = {
            (task.state_index, numbers[teacher.name]): task
            for teacher, lane in lanes
            for task in lane
        }
        buyer = self.buyer = self._buyer()
        bought: set[tuple[int, int]] = set()
        n_refused = self.engine.skipped["budget"]
        while not self.engine.stop.is_set() and self.engine.skipped["budget"] == n_refused:
            choices = buyer.next_round(usd(self.limit_nano - self._spent_nano(bought)))
            if not choices:
                break
            self.n_rounds += 1
            bought |= {(choice.state, choice.teacher) for choice in choices}
            await self.engine.run(self._open(self._lanes(choices)))
            self._file(buyer, choices)
        rest = self._rest(lanes, bought)
        if self.take_known or self.engine.stop.is_set():
            if self.take_known:
                await self._look_again(rest)
            self._leave_out(rest, buyer)
        else:
            # What is left of the money may still pay for shorter prompts than the last one.
            turn = {state: turn for turn, state in enumerate(buyer.order)}
            rest.sort(key=lambda lane: min(turn[task.state_index] for task in lane[1]))
            await self.engine.run(self._open(rest))

    def _open(self, lanes: Lanes) -> Lanes:
        return self.take_known(lanes) if self.take_known else lanes

    def reports(self) -> tuple[GateReport, ...]:
        """Return the savings of each gate."""
        return tuple(self._report(name) for name in self.policy.names)

    def _report(self, name: str) -> GateReport:
        of_it = [(key, task) for key, task in self.tasks.items() if task.gate == name]
        saved = [key for key, task in of_it if task.is_left_out]
        return GateReport(
            gate=name,
            n_calls_saved=len(saved),
            saved_usd=round(sum(self._cost_usd(*key, is_warm=True) for key in saved), 9),
            n_explored=sum(
                task.propensity < 1 and task.index in self.engine.decided for _, task in of_it
            ),
        )

    def _buyer(self) -> Buyer:
        market = Market(
            places=self.places,
            teachers=self.teachers,
            cost_usd=lambda state, teacher, is_warm: self._cost_usd(
                state, teacher, is_warm=is_warm
            ),
            bound_usd=self._bound_usd,
            open_poll=lambda state: self.policy.poll(self.states[state]),
            is_open=lambda state, teacher: (state, teacher) in self.tasks,
        )
        return Buyer(market, self.policy)

    def _cost_usd(self, state: int, teacher: int, *, is_warm: bool) -> float:
        """Return what a call should cost. What earlier runs have taught is left out: it changes."""
        task = self.tasks[state, teacher]
        tokens = Learned().expected_tokens(task.question.size)
        cached = 0
        if is_warm and task.previous is not None:
            cached = Learned().expected_tokens(task.previous.question.size)
        cached = cached if cached >= _MIN_CACHED_TOKENS else 0
        price = self.prices[self.teachers[teacher].name]
        written = tokens - cached if price.cache_write > price.prompt else 0
        answer = Learned().answer_tokens(
            self.places[state].n_answer_bytes, task.question.max_completion_tokens
        )
        return usd(
            price.cost_nano(tokens, answer, n_cached_tokens=cached, n_written_tokens=written)
        )

    def _bound_usd(self, state: int, teacher: int) -> float:
        task = self.tasks[state, teacher]
        price = self.prices[self.teachers[teacher].name]
        return usd(price.bound_nano(task.bound_tokens(), task.question.max_completion_tokens))

    def _spent_nano(self, bought: set[tuple[int, int]]) -> int:
        """Return what the questions chosen so far have cost, as far as it counts against the ceiling."""
        paid: dict[str, float] = {}
        if self.take_known is None and self.asking.counts_recorded:
            paid = {sha: usd(known.cost_nano) for sha, known in self.found.decided.items()}
        for key in bought:
            task = self.tasks[key]
            row = self.engine.decided.get(task.index)
            is_new = task.question.sha not in self.found.decided
            if row is not None and (is_new or self.asking.counts_recorded):
                paid[task.question.sha] = row.cost_usd
        return round(sum(paid.values()) * 1e9)

    def _lanes(self, choices: Sequence[Choice]) -> Lanes:
        lanes: dict[tuple[str, int], tuple[TeacherSpec, deque[LaneQuestion]]] = {}
        for choice in choices:
            task = self.tasks[choice.state, choice.teacher]
            if choice.propensity < 1:
                task.gate, task.propensity = choice.gate, choice.propensity
            key = self.places[choice.state].session, choice.teacher
            _, lane = lanes.setdefault(key, (self.teachers[choice.teacher], deque()))
            lane.append(task)
        return list(lanes.values())

    def _file(self, buyer: Buyer, choices: Sequence[Choice]) -> None:
        """Report to the buyer what came of its choices."""
        if not self.policy.is_in_turn:
            return
        for number in sorted({choice.state for choice in choices}):
            state = self.states[number]
            poll = self.policy.poll(state)
            paid: dict[int, float] = {}
            for teacher in range(len(self.teachers)):
                task = self.tasks.get((number, teacher))
                row = self.engine.decided.get(task.index) if task else None
                if row is None:
                    continue
                poll.add(row)
                if any(c.state == number and c.teacher == teacher for c in choices):
                    paid[teacher] = row.cost_usd
            buyer.file(number, poll, paid)

    def _rest(self, lanes: Lanes, bought: set[tuple[int, int]]) -> Lanes:
        numbers = {teacher.name: number for number, teacher in enumerate(self.teachers)}
        left = (
            (
                teacher,
                deque(t for t in lane if (t.state_index, numbers[teacher.name]) not in bought),
            )
            for teacher, lane in lanes
        )
        return [each for each in left if each[1]]

    async def _look_again(self, rest: Lanes) -> None:
        """Learn what was answered since the run began: a state left out may ask as another one does."""
        shas = [task.question.sha for _, lane in rest for task in lane]
        late = await asyncio.to_thread(self.engine.ledger.lookup, shas)
        self.found.decided.update(late.decided)

    def _leave_out(self, rest: Lanes, buyer: Buyer) -> None:
        """Pass on what is known already, and why the rest was not asked."""
        for _, lane in self._open(rest):
            for task in lane:
                verdict = buyer.stopped.get(task.state_index)
                if verdict is not None:
                    gate, reason = verdict.gate, verdict.reason or ""
                else:
                    gate, reason = None, "stopped" if self.engine.stop.is_set() else "budget"
                if gate:
                    task.gate, task.is_left_out = gate, True
                self.engine.skip(task, reason)
