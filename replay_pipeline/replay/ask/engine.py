"""A run from its plan to its report: it asks each question once, in order, under one budget.

If a gate looks at answers, or if the money may not last, the run goes in rounds: the buyer chooses
questions, and their answers decide what it chooses next.
"""

import asyncio
import gc
import logging
import math
import threading
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

import xxhash
from pydantic import SecretStr

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.ask.asking import Asking, today
from replay_pipeline.replay.ask.attempts import Attempts, Books, Dispatcher, Slots
from replay_pipeline.replay.ask.looks import known_row, whole
from replay_pipeline.replay.ask.outcomes import (
    NOT_ASKED,
    answer_row,
    by_its_model,
    due,
    failed_row,
    has_too_short_a_limit,
    lost_row,
    unexpected,
)
from replay_pipeline.replay.buy.buying import Buyer, Choice, Market, market_of
from replay_pipeline.replay.buy.estimates import Estimate, Plan, what_is_left
from replay_pipeline.replay.buy.lanes import LaneQuestion, Lanes, lanes_of, tasks_of
from replay_pipeline.replay.buy.places import Place, asked_by, coverage
from replay_pipeline.replay.dialects.client import Client
from replay_pipeline.replay.dialects.endpoints import fetch_prices, teacher_keys
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import LASTING_CODES, OTHER_MODEL, Failure
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.dialects.sizes import Learned, merged_ratios
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LedgerEntries,
    LostCall,
    NewCall,
    decode_row,
)
from replay_pipeline.replay.money.ledger import Ledger, add_learned, read_learned
from replay_pipeline.types import (
    ONLY_LOOKED,
    Progress,
    ReplayReport,
    TeacherAction,
    TeacherSpec,
    TraceState,
)

logger = logging.getLogger(__name__)


_MAX_SENT_AGAIN = 2
"""How often one run sends a request again after it was lost."""


class Rounds:
    """The rounds of one run.

    If `is_chosen`, an answer from the ledger counts only when its question is chosen. So a run that
    was stopped and continued makes the same choices as one that wasn't. Otherwise the lanes leave out
    what is known.
    """

    def __init__(self, replay: "Replay", *, is_chosen: bool) -> None:
        self.replay = replay
        self.is_chosen = is_chosen
        self.tasks: dict[tuple[int, int], LaneQuestion] = {}
        self.market: Market

    async def run(self, lanes: Lanes) -> None:
        """Ask round after round until nothing is left to ask, or the money is used up.

        Raises:
            LedgerError: the ledger can't be written. Calls in flight were awaited first.
        """
        replay = self.replay
        self.tasks = tasks_of(replay.teachers, lanes)
        self.market = market_of(
            self.tasks, replay.places, replay.teachers, replay.prices,
            lambda state: replay.policy.poll(replay.states[state]), replay.looks.n_most,
        )  # fmt: skip
        buyer = Buyer(self.market, replay.policy)
        bought: set[tuple[int, int]] = set()
        n_refused = self.replay.n_refused
        while not self.replay.stop.is_set() and self.replay.n_refused == n_refused:
            choices = buyer.next_round(usd(self.replay.limit_nano - self._spent_nano(bought)))
            if not choices:
                break
            bought |= {(choice.state, choice.teacher) for choice in choices}
            await self.replay.ask(self._open(self._lanes(choices)))
            self._file(buyer, choices)
        if buyer.doubts_first:
            replay.doubted_teacher = replay.teachers[buyer.teachers[0]].name
        rest = self._rest(lanes, bought)
        if self.is_chosen or self.replay.stop.is_set():
            if self.is_chosen:
                await self._look_again(rest)
            self._leave_out(rest, buyer)
        else:
            # What is left of the money may still pay for shorter prompts than the last one.
            turn = {state: turn for turn, state in enumerate(buyer.order)}
            rest.sort(key=lambda lane: min(turn[task.state_index] for task in lane[1]))
            await self.replay.ask(self._open(rest))

    def _open(self, lanes: Lanes) -> Lanes:
        return self.replay.take_known(lanes) if self.is_chosen else lanes

    def _spent_nano(self, bought: set[tuple[int, int]]) -> int:
        """Return what the questions chosen so far have cost, as far as it counts against the ceiling."""
        paid: dict[str, float] = {}
        if not self.is_chosen and self.replay.asking.counts_recorded:
            paid = {sha: usd(known.cost_nano) for sha, known in self.replay.found.decided.items()}
        for key in bought:
            task = self.tasks[key]
            row = self.replay.decided.get(task.index)
            is_new = task.question.sha not in self.replay.found.decided
            if row is not None and (is_new or self.replay.asking.counts_recorded):
                paid[task.question.sha] = row.cost_usd
        return round(sum(paid.values()) * 1e9)

    def _lanes(self, choices: Sequence[Choice]) -> Lanes:
        lanes: dict[tuple[str, int], tuple[TeacherSpec, deque[LaneQuestion]]] = {}
        for choice in choices:
            task = self.tasks[choice.state, choice.teacher]
            step: LaneQuestion | None = task if choice.propensity < 1 else None
            while step is not None:
                step.gate, step.propensity = choice.gate, choice.propensity
                step = step.then
            key = self.replay.places[choice.state].session, choice.teacher
            _, lane = lanes.setdefault(key, (self.replay.teachers[choice.teacher], deque()))
            lane.append(task)
        return list(lanes.values())

    def _file(self, buyer: Buyer, choices: Sequence[Choice]) -> None:
        """Report to the buyer what came of its choices."""
        if not self.replay.policy.is_in_turn:
            return
        for number in sorted({choice.state for choice in choices}):
            state = self.replay.states[number]
            poll = self.replay.policy.poll(state)
            paid: dict[int, float] = {}
            for teacher in range(len(self.replay.teachers)):
                task = self.tasks.get((number, teacher))
                row = self.replay.decided.get(task.index) if task else None
                if row is None:
                    continue
                poll.add(row)
                if any(c.state == number and c.teacher == teacher for c in choices):
                    paid[teacher] = row.cost_usd
            buyer.file(number, poll, paid)

    def _rest(self, lanes: Lanes, bought: set[tuple[int, int]]) -> Lanes:
        indexes = {self.tasks[key].index for key in bought}
        left = (
            (teacher, deque(t for t in lane if t.index not in indexes)) for teacher, lane in lanes
        )
        return [each for each in left if each[1]]

    async def _look_again(self, rest: Lanes) -> None:
        """Learn what was answered since the run began: a state left out may ask as another one does."""
        tasks = [task for _, lane in rest for task in lane]
        late, _ = await asyncio.to_thread(self.replay.looks.look_up, self.replay.ledger, tasks)
        self.replay.found.decided.update(late.decided)

    def _leave_out(self, rest: Lanes, buyer: Buyer) -> None:
        """Pass on what is known already, and why the rest was not asked."""
        for _, lane in self._open(rest):
            for task in lane:
                verdict = buyer.stopped.get(task.state_index)
                if verdict is not None:
                    gate, reason = verdict.gate, verdict.reason or ""
                else:
                    gate, reason = None, "stopped" if self.replay.stop.is_set() else "budget"
                if gate:
                    task.gate = gate
                self.replay.skip(task, reason)


class Replay:
    """One run, under a ceiling. When any thread sets `stop`, it sends no more and waits for paid calls.

    `on_progress` is called from the loop that asks.
    """

    ledger: Ledger
    client: Client
    books: Books
    dispatcher: Dispatcher
    found: LedgerEntries

    def __init__(
        self,
        states: Sequence[TraceState],
        teachers: Sequence[TeacherSpec],
        limit_nano: int,
        ledger: str,
        asking: Asking,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.states = states
        self.teachers = teachers
        self.limit_nano = limit_nano
        self.ledger_url = ledger
        self.asking = asking
        self.options = asking.request_options()
        self.looks = asking.asking_on()
        self.on_progress = on_progress
        self.stop = stop or threading.Event()
        self.run_id = asking.run_id or uuid.uuid4().hex[:12]
        self.policy = asking.policy().among(len({teacher.vendor for teacher in teachers}))
        self.places: list[Place] = []
        self.keys: Mapping[str, SecretStr | None] = {}
        self.prices: Mapping[str, Price] = {}
        self.rounds: Rounds | None = None
        self.doubted_teacher: str | None = None
        self.decided: dict[int, TeacherAction] = {}
        """Row of each decided question, by its index."""
        self._waiting: dict[int, tuple[LaneQuestion, TeacherAction]] = {}
        """By the same index, steps that only looked, behind which their teacher isn't asked on yet."""
        self.skipped: Counter[str] = Counter()
        self._unfinished: Counter[str] = Counter()
        self.n_sent = 0
        self.n_cached = 0
        self._later: list[LaneQuestion] = []
        self._short: list[LaneQuestion] = []
        self._fatal: Exception | None = None
        self.learned: Mapping[str, Learned] = {}
        self._day = today()

    async def run(self) -> ReplayReport:
        """Ask what is not answered yet, and report everything.

        Raises:
            ConfigError: an endpoint doesn't serve a model, or a key is missing.
            PriceError: a price is not known.
            LedgerError: the ledger can't be read or written. Calls in flight were awaited first.
        """
        lanes = await asyncio.to_thread(
            lanes_of, self.states, self.teachers, self.options, self.places
        )
        self.ledger = await asyncio.to_thread(
            Ledger, self.ledger_url, is_durable=self.asking.is_durable
        )
        try:
            tasks = [task for _, lane in lanes for task in lane]
            self.found, is_all = await asyncio.to_thread(self.looks.look_up, self.ledger, tasks)
            is_all &= not _forget_outgrown(self.found, lanes)
            if self.limit_nano and not is_all:
                self.keys = teacher_keys(self.teachers)
                self.prices = await fetch_prices(
                    self.teachers,
                    keys=self.keys,
                    folder=self.asking.price_folder,
                    settle_s=self.asking.retry.settle_s,
                    stop=self.stop,
                )
            async with Client(
                max_connections=self.asking.max_concurrency,
                stop=self.stop,
                settle_s=self.asking.retry.settle_s,
            ) as self.client:
                expected = await self._ask_lanes(lanes)
            held = await asyncio.to_thread(self.ledger.held_by_lost, f"run:{self.run_id}")
            left = await asyncio.to_thread(self._left, lanes)
            return self._report(expected, left, *held)
        finally:
            await asyncio.to_thread(self.ledger.close)

    async def _ask_lanes(self, lanes: Lanes) -> Estimate | None:
        await asyncio.to_thread(self._open_scopes)
        self.learned = await asyncio.wrap_future(
            self.ledger.do(lambda database: read_learned(database, self.teachers))
        )
        self.books = Books(
            ledger=self.ledger,
            client=self.client,
            keys=self.keys,
            prices=self.prices,
        )
        self.dispatcher = Dispatcher(
            ledger=self.ledger,
            client=self.client,
            keys=self.keys,
            retry=self.asking.retry,
            stop=self.stop,
            total=Slots(self.asking.max_concurrency),
            prices=self.prices,
        )
        if self.keys:
            await self.dispatcher.recall_pauses(self.teachers)
        # What is known counts when its question is chosen, as in the run that had it asked.
        is_chosen = bool(self.policy.is_in_turn and self.prices)
        open_lanes = lanes if is_chosen else self.take_known(lanes)
        expected, is_short = None, False
        if self.prices:
            known = partial(known_row, entries=self.found)
            expected = what_is_left(self._plan(lanes, known, self.learned))
            spent = usd(sum(each.cost_nano for each in self.found.decided.values()))
            is_short = spent + expected.expected_usd > usd(self.limit_nano)
        if not self.limit_nano:
            for task in (task for _, lane in open_lanes for task in lane):
                self.skip(task, "budget")
            self._end_looks()
            return expected
        # Nothing of the plan dies while questions are asked, so the collector, which would walk
        # through all of it again and again, leaves it alone.
        gc.freeze()
        self.rounds = Rounds(self, is_chosen=is_chosen)
        try:
            await (self.rounds.run(open_lanes) if is_chosen or is_short else self.ask(open_lanes))
            self._end_looks()
        finally:
            gc.unfreeze()
            new = self.books.newly_learned
            await asyncio.wrap_future(
                self.ledger.do(lambda database: add_learned(database, self.teachers, new))
            )
        return expected

    def _plan(
        self,
        lanes: Lanes,
        known: Callable[[LaneQuestion], Callable[[], TeacherAction] | None],
        learned: Mapping[str, Learned],
    ) -> Plan:
        return Plan(
            states=self.states, teachers=self.teachers, lanes=lanes, places=self.places,
            policy=self.policy, prices=self.prices, find=known, learned=learned,
            max_looks=self.looks.n_most, looks_share=self.looks.share,
        )  # fmt: skip

    def _in_hand(self, task: LaneQuestion) -> Callable[[], TeacherAction] | None:
        row = self.decided.get(task.index)
        return None if row is None or _may_pass(row) else lambda: row

    def _open_scopes(self) -> None:
        names = [teacher.name for teacher in self.teachers]
        scopes = [today(), *(f"teacher:{name}" for name in names), *self.asking.scopes()]
        self.ledger.open_scopes(scopes, self.asking.limits_nano(today(), names))
        carried = 0
        if self.asking.counts_recorded:
            carried = self.found.paid_nano.total() - self.found.paid_nano[self.run_id]
        self.ledger.open_run(
            self.run_id,
            self.limit_nano,
            carried_nano=carried,
            lost=[each for calls in self.found.lost.values() for each in calls],
        )

    def take_known(self, lanes: Lanes) -> Lanes:
        """Take over what the ledger knows of these questions, and return those that are left.

        Of a question, this is its first step: behind looks, an answer counts when its turn comes. So a run that was
        stopped asks the same teachers on as one that wasn't.
        """
        open_lanes = []
        for teacher, lane in lanes:
            if left := deque(task for task in lane if not self._is_taken(task)):
                open_lanes.append((teacher, left))
        # Calls with an unknown outcome first: learning it frees the money they hold.
        return sorted(open_lanes, key=lambda lane: not any(task.lost for task in lane[1]))

    def _is_taken(self, step: LaneQuestion) -> bool:
        """Take over what the ledger knows of a step, and return whether that is its answer."""
        found, sha = self.found, step.question.sha
        if known := found.decided.get(sha):
            self.know(step, known)
            return True
        if booked := found.booked.get(sha):
            self._keep(step, replace(decode_row(booked), state_id=step.state_id))
        self.lose(step, found.lost.get(sha, ()))
        return False

    def _left(self, lanes: Lanes) -> Estimate | None:
        """Return what is left to ask, as `estimate` does; `None` where nothing is, or nobody knows a price."""
        is_left = any(self.skipped[reason] for reason in NOT_ASKED) or any(
            map(_may_pass, self.decided.values())
        )
        if not is_left or not self.prices:
            return None
        new = self.books.newly_learned
        learned = {
            teacher.name: merged_ratios(
                self.learned.get(teacher.name, Learned()), new.get(teacher.name, Learned())
            )
            for teacher in self.teachers
        }
        return what_is_left(self._plan(lanes, self._in_hand, learned))

    def _report(
        self,
        expected: Estimate | None,
        left: Estimate | None,
        unknown_nano: int,
        held_until: datetime | None,
    ) -> ReplayReport:
        actions = _each_paid_once(self.decided)
        asked = {index // len(self.teachers) for index in self.decided}
        by_teacher = dict.fromkeys((teacher.name for teacher in self.teachers), 0.0)
        for action in actions:
            by_teacher[action.teacher] += action.cost_usd
        return ReplayReport(
            actions=actions,
            n_states=len(self.states),
            n_sent=self.n_sent,
            n_cached=self.n_cached,
            spent_usd=round(math.fsum(action.cost_usd for action in actions), 9),
            newly_spent_usd=usd(self.books.newly_spent_nano),
            max_total_usd=usd(self.limit_nano),
            stop_reason=self._stop_reason(),
            skipped=dict(self.skipped),
            cost_by_teacher_usd={name: round(cost, 9) for name, cost in by_teacher.items()},
            forecast_usd=expected.expected_usd if expected else None,
            left=_in_short(left) if left else None,
            doubted_teacher=self.doubted_teacher,
            n_open=sum(_may_pass(action) for action in actions),
            unknown_usd=usd(unknown_nano),
            held_until=held_until.isoformat(timespec="seconds") if held_until else None,
            coverage=coverage(self.places, asked),
            asked_by=asked_by(self.places, asked),
            n_disputed=self.books.n_disputed,
            answered_by_others=self._others(actions),
            stopped_teachers={
                name: failure.message for name, failure in self.dispatcher.stopped_teachers.items()
            },
        )

    def _others(self, actions: Iterable[TeacherAction]) -> dict[str, dict[str, int]]:
        """Count the answers of other models than the asked one, by teacher."""
        is_asked = self.dispatcher.is_asked
        teachers = {teacher.name: teacher for teacher in self.teachers}
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for row in actions:
            teacher = teachers[row.teacher]
            if row.action is not None and not is_asked(teacher, row.model):
                found[row.teacher][row.model or "unknown"] += 1
        return {name: dict(counts) for name, counts in found.items()}

    def _stop_reason(
        self,
    ) -> Literal["completed", "mostly_failed", "budget", "stopped", "teacher_stopped"]:
        if self.stop.is_set():
            return "stopped"
        if self.n_refused:
            return "budget"
        if self.dispatcher.stopped_teachers:
            return "teacher_stopped"
        n_failed = sum(
            row.error_code is not None and row.error_code not in ONLY_LOOKED
            for row in self.decided.values()
        )
        return "mostly_failed" if 2 * n_failed > len(self.decided) else "completed"

    def know(self, task: LaneQuestion, known: Known) -> TeacherAction:
        """Take over a call that the ledger already decided, and return its row."""
        row = decode_row(known.row)
        is_asked = self.dispatcher.is_asked
        if row.error_code == OTHER_MODEL and is_asked(task.teacher, row.model):
            row = replace(row, error_code=None, error_message=None)  # its name has been told since
        row = by_its_model(row, is_asked=is_asked(task.teacher, row.model))
        if row.state_id != task.state_id:
            row = replace(row, state_id=task.state_id)
        task.n_read_tokens = row.n_prompt_tokens
        task.is_asked = True
        self._keep(task, row)
        self.n_cached += 1
        return row

    def lose(self, task: LaneQuestion, lost: Iterable[LostCall]) -> None:
        """Write a row for each lost call until its outcome is known."""
        task.lost = tuple(lost)
        task.is_asked |= bool(task.lost)
        if task.lost:
            self._keep(task, lost_row(task))

    def _keep(self, step: LaneQuestion, row: TeacherAction) -> None:
        """Keep the row of a question, with what its teacher looked at before."""
        self.decided[step.index] = whole(step, row)
        self._waiting.pop(step.index, None)
        if step.then is not None:
            self._waiting[step.index] = step, row

    def skip(self, task: LaneQuestion, reason: str) -> None:
        """Count a question that isn't asked. If it has a lost call or was begun, its row exists already."""
        if task.index not in self.decided:
            self.skipped[reason] += 1
        elif task.looks and not task.lost:
            self._unfinished[reason] += 1

    @property
    def n_refused(self) -> int:
        """Return how many questions the money did not reach, or not to their end."""
        return self.skipped["budget"] + self._unfinished["budget"]

    async def ask(self, lanes: Lanes) -> None:
        """Ask every question, lane by lane, then repeat those that a lost call blocked, and ask on behind looks.

        Raises:
            LedgerError: the ledger can't be written. Calls in flight were awaited first.
        """
        lanes = lanes or self._to_ask_on()
        while lanes:
            n_before = self.books.n_found_out
            await self._ask_all(lanes)
            lanes = await self._left_over(is_richer=self.books.n_found_out > n_before)
            lanes = lanes or self._to_ask_on()
        self._report_progress()
        if self._fatal:
            raise self._fatal

    def _to_ask_on(self) -> Lanes:
        """Return the next steps of teachers that only looked, as many as looks may cost."""
        steps: list[LaneQuestion] = []
        while not (steps or self.stop.is_set()):
            chosen = self.looks.affordable(self._waiting.values(), [*self.decided.values()])
            if not chosen:
                break
            for step, _ in chosen:
                del self._waiting[step.index]
            nexts = [step.then for step, _ in chosen if step.then is not None]
            steps = [step for step in nexts if not self._is_taken(step)]
        # Of one session one after the other: if the cache has forgotten the first steps, each reads what the last wrote.
        lanes: dict[tuple[str, str], tuple[TeacherSpec, deque[LaneQuestion]]] = {}
        for step in sorted(steps, key=lambda step: step.state_index):
            key = self.places[step.state_index].session, step.teacher.name
            lanes.setdefault(key, (step.teacher, deque()))[1].append(step)
        return [*lanes.values()]

    def _end_looks(self) -> None:
        """End the questions behind whose looks nobody may be asked on. Those of a stopped run stay open."""
        for step in [step for step, _ in self._waiting.values()]:
            while step.then is not None and step.then.question.sha in self.found.decided:
                step = step.then  # it was paid for, whatever looks may cost now
                self._is_taken(step)
        if not self.stop.is_set():
            for step, row in self.looks.end([*self._waiting.values()], [*self.decided.values()]):
                self._keep(step, row)

    async def _ask_all(self, lanes: Lanes) -> None:
        by_teacher: dict[str, deque[deque[LaneQuestion]]] = {}
        n_at_once: dict[str, int] = {}
        for teacher, lane in lanes:
            n_at_once[teacher.name] = self.dispatcher.slots(teacher).size
            by_teacher.setdefault(teacher.name, deque()).append(lane)
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            workers = [
                group.create_task(self._work(teacher_lanes))
                for name, teacher_lanes in by_teacher.items()
                for _ in range(
                    min(len(teacher_lanes), n_at_once[name], self.asking.max_concurrency)
                )
            ]
            await asyncio.wait(workers) if workers else None
            watcher.cancel()

    async def _left_over(self, *, is_richer: bool) -> Lanes:
        """Return what is worth asking once more: lost calls that are over, and what was too dear.

        Money that a lost call held is free once its outcome is known, so questions that did not
        fit before may fit now.
        """
        later, self._later = self._later, []
        wait_until = datetime.now(UTC) + timedelta(seconds=self.asking.retry.settle_s)
        ready = [task for task in later if due(task.lost) <= wait_until]
        if ready:
            logger.info("%d lost calls will be asked again once they have surely ended", len(ready))
            left = max(due(task.lost) for task in ready) - datetime.now(UTC)
            await self.dispatcher.wait(left.total_seconds())
        again = [] if self.stop.is_set() else ready
        if is_richer and not self.stop.is_set():
            again, self._short = [*again, *self._short], []
        if not again:
            for task in self._short:
                self.skip(task, "stopped" if self.stop.is_set() else "budget")
            self._short = []
        return [(task.teacher, deque([task])) for task in again]

    async def _watch(self) -> None:
        """Pass on a stop that another thread asked for, and report progress."""
        has_stopped = False
        while True:
            await asyncio.sleep(0.1)
            self._report_progress()
            if self.stop.is_set() and not has_stopped:
                has_stopped = True
                n_in_flight = self.dispatcher.total.n_in_use
                logger.info("stopping: waiting for %d calls in flight", n_in_flight)
                self.ledger.give_up(self.run_id)
                self.dispatcher.resume()

    def _report_progress(self) -> None:
        if self.on_progress:
            n_skipped = sum(n for why, n in self.skipped.items() if why not in NOT_ASKED)
            spent = usd(self.books.newly_spent_nano)
            n_done = len(self.decided) + n_skipped
            progress = Progress(
                stage="replay",
                n_done=n_done,
                n_total=len(self.states) * len(self.teachers),
                cost_usd=spent,
            )
            self.on_progress(progress)

    def _end(self, error: Exception) -> None:
        """Stop sending, and raise `error` once what is paid for is in."""
        self._fatal = self._fatal or error
        self.stop.set()

    async def _work(self, lanes: deque[deque[LaneQuestion]]) -> None:
        while lanes:
            lane = lanes.popleft()
            while lane:
                await self._decide(lane.popleft())

    async def _decide(self, task: LaneQuestion) -> None:
        """Ask a question, and if its teacher only looks, answer what it looks for.

        Nothing that happens to it may end the others, which are paid for.
        """
        try:
            if reason := self.dispatcher.reason_not_to_send(task.teacher):
                self.skip(task, reason)
            elif (row := await self._ask(task)) is not None:
                if self.looks.answer is not None:
                    await asyncio.to_thread(self.looks.follow, task, row, task.state)
                    self.books.count_looks(task, row)
                self._keep(task, row)
        except LedgerError as error:
            self._end(error)
            self.skip(task, "ledger_failed")
        except Exception as error:
            logger.exception("%s at %s", task.teacher.name, task.state_id)
            self._keep(task, answer_row(task, **unexpected(error)))

    async def _ask(self, task: LaneQuestion) -> TeacherAction | None:
        """Ask one question, and return its row if it is decided now."""
        builder, price = RequestBuilder(self.options), self.prices[task.teacher.name]
        before = task.last_asked()
        n_asked = before.question.size.n_messages if before else 0
        body = builder.body(task.state, task.teacher, price, n_asked=n_asked)
        body_sha = xxhash.xxh3_128_hexdigest(body)
        if task.lost and not await self._may_ask_again(task, body_sha):
            return None
        if builder.lacks_tools(price):
            # Refused here for nothing, rather than by the router after money was held for it.
            told = "not sent: no endpoint of this model lists tools"
            failure = Failure("invalid_request", told, is_lasting=True)
            self.decided.setdefault(task.index, failed_row(task, failure))
            return None
        bound_nano = self.books.bound_nano(task)
        new = self._new_call(task, body_sha, bound_nano)
        call = Attempts(self.dispatcher, task, body, new, bound_nano)
        match await call.make():
            case None:
                self.n_sent += 1
                return await self._book(task, call)
            case Known() as known:
                return self.know(task, known)
            case InDoubt() as doubt:
                # Its process died after this run had looked: come back when it is surely over.
                self.lose(task, doubt.lost)
                self._later.append(task)
            case "budget":
                self._short.append(task)
            case reason:
                self.skip(task, reason)
        return None

    async def _book(self, task: LaneQuestion, call: Attempts) -> TeacherAction | None:
        """Have a call that was sent booked, and return its row by what came back, or None if that was lost.

        Raises:
            LedgerError: the booking failed.
        """
        outcome = call.reply.outcome
        try:
            if isinstance(outcome, Failure) and outcome.may_be_paid:
                self.lose(task, await self.books.lose(task, call, outcome))
                task.n_lost += 1
                # A call that outlasted its time limit outlasts it again.
                is_worth_it = outcome.code not in ("no_reply", "given_up")
                if is_worth_it and task.n_lost <= _MAX_SENT_AGAIN:
                    self._later.append(task)
                return None
            row = await self.books.settle(task, call, outcome)
            if isinstance(outcome, Failure) and outcome.stops_teacher:
                self.dispatcher.stop_teacher(task.teacher, outcome)
            return row
        except LedgerError:
            raise
        except Exception as error:
            logger.exception("the answer of %s at %s", task.teacher.name, task.state_id)
            return await self.books.keep_unread(task, call, error)

    async def _may_ask_again(self, task: LaneQuestion, body_sha: str) -> bool:
        """Settle what can be known of lost calls; then whether the question may be asked again.

        A call that may still be running is never asked again: both would be paid.
        """
        if datetime.now(UTC) < due(task.lost):
            self._later.append(task)
            return False
        is_too_slow = has_too_short_a_limit(task.lost, task.teacher)
        if row := await self.books.find_out(task, body_sha):
            self._keep(task, row)
        return not is_too_slow

    def _new_call(self, task: LaneQuestion, body_sha: str, bound_nano: int) -> NewCall:
        """Make the reservation for a call."""
        question, teacher = task.question, task.teacher
        return NewCall(
            request_sha=question.sha,
            state_id=question.state_id,
            teacher=teacher.name,
            model=teacher.model,
            run_id=self.run_id,
            partition=self.asking.partition,
            scopes=(f"run:{self.run_id}", self._day_scope(), f"teacher:{teacher.name}",
                    *self.asking.scopes()),
            reserved_nano=self.books.reserved_nano(teacher, bound_nano),
            timeout_s=teacher.timeout_s,
            lost=tuple(lost.call_id for lost in task.lost),
            takes_over=self.books.takes_over(task, body_sha),
            body_sha=body_sha,
        )  # fmt: skip

    def _day_scope(self) -> str:
        scope = today()
        if scope != self._day:
            limits = self.asking.limits_nano(scope, self.prices)
            limits = {name: limit for name, limit in limits.items() if name == scope}
            self.ledger.open_scopes([scope], limits)
            self._day = scope
        return scope


def _forget_outgrown(found: LedgerEntries, lanes: Lanes) -> int:
    """Have questions asked again whose calls outlasted a time limit that has been raised since; count them."""
    n_forgotten = 0
    for teacher, lane in lanes:
        for task in lane:
            step: LaneQuestion | None = task
            while step is not None:
                if _may_answer_now(found.decided.get(step.question.sha), teacher):
                    del found.decided[step.question.sha]
                    n_forgotten += 1
                step = step.then
    return n_forgotten


def _may_answer_now(known: Known | None, teacher: TeacherSpec) -> bool:
    """Return whether a call that outlasted its time limit would have more time now."""
    if known is None or b'"no_reply"' not in known.row:
        return False
    row = decode_row(known.row)
    return row.error_code == "no_reply" and teacher.timeout_s > row.latency_s


def _each_paid_once(decided: Mapping[int, TeacherAction]) -> list[TeacherAction]:
    """Return the decided rows in order; an answer that serves several states costs at the first."""
    paid: set[str | None] = set()
    actions = []
    for index in sorted(decided):
        action = decided[index]
        twice_usd = [look.cost_usd for look in action.looks if look.request_sha in paid]
        looks_usd = sum(look.cost_usd for look in action.looks)
        if action.request_sha in paid:
            twice_usd.append(action.cost_usd - looks_usd)
        if twice_usd:
            left_usd = max(0.0, action.cost_usd - sum(twice_usd)) if action.looks else 0.0
            action = replace(action, cost_usd=left_usd)
        actions.append(action)
        paid |= {action.request_sha, *(look.request_sha for look in action.looks)}
    return actions


def _in_short(left: Estimate) -> dict[str, Any]:
    names = ("n_calls", "expected_usd", "low_usd", "high_usd", "pairs", "positives")
    return {name: getattr(left, name) for name in names}


def _may_pass(action: TeacherAction) -> bool:
    """Return whether the next run asks again: nothing came back, and the reason need not last."""
    has_reply = action.finish_reason is not None
    return (
        action.error_code is not None and not has_reply and (action.error_code not in LASTING_CODES)
    )
