"""The replay itself: it asks each question once, in order, under one budget."""

import asyncio
import logging
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property

import xxhash
from pydantic import SecretStr

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.ask.asking import Asking, today
from replay_pipeline.replay.ask.attempts import Attempts, Dispatcher
from replay_pipeline.replay.ask.books import Books
from replay_pipeline.replay.ask.facts import NOT_ASKED
from replay_pipeline.replay.ask.introductions import Introductions
from replay_pipeline.replay.ask.lanes import Slots
from replay_pipeline.replay.ask.outcomes import (
    answer_row,
    due,
    failed_row,
    has_too_short_a_limit,
    lost_row,
    unexpected,
)
from replay_pipeline.replay.buy.tasks import LaneQuestion, Lanes
from replay_pipeline.replay.dialects import dialect_of
from replay_pipeline.replay.dialects.client import Client
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import OTHER_MODEL, Failure
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.money.calls import Known, LostCall, NewCall, Reserved, decode_row
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import Progress, TeacherAction

logger = logging.getLogger(__name__)

_MAX_SENT_AGAIN = 2
"""How often one run sends a request again after it was lost."""


@dataclass(kw_only=True)
class Engine:
    """The engine that asks the questions of one run. On a stop, it sends no more and waits for paid calls."""

    ledger: Ledger
    client: Client
    asking: Asking
    prices: Mapping[str, Price]
    keys: Mapping[str, SecretStr | None]
    n_total: int = 0
    on_progress: Callable[[Progress], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    decided: dict[int, TeacherAction] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    n_cached: int = 0
    answered_before: frozenset[str] = frozenset()
    """Teachers that have answers in the ledger."""

    def __post_init__(self) -> None:
        self.run_id = self.asking.run_id or uuid.uuid4().hex[:12]
        self.options = self.asking.request_options()
        self.books = Books(
            ledger=self.ledger,
            client=self.client,
            keys=self.keys,
            prices=self.prices,
            kept_s=self.options.response_cache_ttl_s,
        )
        self._later: list[LaneQuestion] = []
        self._short: list[LaneQuestion] = []
        self._fatal: Exception | None = None
        self._day = today()

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """Return the sender of all calls, after the earlier answers are loaded."""
        return Dispatcher(
            ledger=self.ledger,
            client=self.client,
            keys=self.keys,
            options=self.options,
            retry=self.asking.retry,
            stop=self.stop,
            total=Slots(self.asking.max_concurrency),
            introductions=Introductions(
                self.prices,
                answered_before=self.answered_before,
                lists_models=lambda teacher: self.client.models(
                    teacher.base_url, self.keys[teacher.name], dialect=dialect_of(teacher)
                ),
            ),
        )

    def know(self, task: LaneQuestion, known: Known) -> None:
        """Take over a call that the ledger already decided."""
        row = decode_row(known.row)
        is_asked = self.dispatcher.introductions.is_asked
        if row.error_code == OTHER_MODEL and is_asked(task.teacher, row.model):
            row = replace(row, error_code=None, error_message=None)  # its name has been told since
        if row.state_id != task.state_id:
            row = replace(row, state_id=task.state_id)
        task.n_read_tokens = row.n_prompt_tokens
        task.is_asked = True
        self.decided[task.index] = row
        self.n_cached += 1

    def lose(self, task: LaneQuestion, lost: Iterable[LostCall]) -> None:
        """Write a row for each lost call until its outcome is known."""
        task.lost = tuple(lost)
        task.is_asked |= bool(task.lost)
        if task.lost:
            self.decided[task.index] = lost_row(task)

    def skip(self, task: LaneQuestion, reason: str) -> None:
        """Count a question that isn't asked. If it has a lost call, its row exists already."""
        if task.index not in self.decided:
            self.skipped[reason] += 1

    async def run(self, lanes: Lanes) -> None:
        """Ask every question, lane by lane, then repeat those that a lost call blocked.

        Raises:
            LedgerError: the ledger can't be written. Calls in flight were awaited first.
        """
        try:
            while lanes:
                n_before = self.books.n_found_out
                await self._ask_all(lanes)
                lanes = await self._left_over(is_richer=self.books.n_found_out > n_before)
        finally:
            await self.dispatcher.introductions.close()
        self._report_progress()
        if self._fatal:
            raise self._fatal

    async def _ask_all(self, lanes: Lanes) -> None:
        by_teacher: dict[str, deque[deque[LaneQuestion]]] = {}
        n_at_once: dict[str, int] = {}
        for teacher, lane in lanes:
            n_at_once[teacher.name] = self.dispatcher.introductions.slots(teacher).size
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
            progress = Progress(stage="replay", n_done=n_done, n_total=self.n_total, cost_usd=spent)
            try:
                self.on_progress(progress)
            except Exception as error:  # noqa: BLE001 (raised when all that is paid is in)
                self._end(error)
                self.on_progress = None

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
        """Decide one question. Nothing that happens to it may end the others, which are paid for."""
        try:
            if reason := self.dispatcher.reason_not_to_send(task.teacher):
                self.skip(task, reason)
            else:
                await self._ask(task)
        except LedgerError as error:
            self._end(error)
            self.skip(task, "ledger_failed")
        except Exception as error:
            logger.exception("%s at %s", task.teacher.name, task.state_id)
            self.decided[task.index] = answer_row(task, **unexpected(error))

    async def _ask(self, task: LaneQuestion) -> None:
        builder, price = RequestBuilder(self.options), self.prices[task.teacher.name]
        before = task.last_asked()
        n_asked = before.question.size.n_messages if before else 0
        body = builder.body(task.state, task.teacher, price, n_asked=n_asked)
        body_sha = xxhash.xxh3_128_hexdigest(body)
        if task.lost and not await self._may_ask_again(task, body_sha):
            return
        if problem := builder.broken_rule(body, task.teacher, price):
            # Refused here for nothing, rather than by an endpoint after money was held for it.
            failure = Failure("invalid_request", f"not sent: {problem}", is_lasting=True)
            self.decided.setdefault(task.index, failed_row(task, failure))
            return
        bound_nano = self.books.bound_nano(task)
        new = self._new_call(task, body_sha, bound_nano)
        call = Attempts(self.dispatcher, task, body, new, bound_nano)
        await call.make()
        if call.known:
            self.know(task, call.known)
        elif call.doubted:
            # Its process died after this run had looked: come back when it is surely over.
            self.lose(task, call.doubted)
            self._later.append(task)
        elif call.reserved is None and call.refused == "budget":
            self._short.append(task)
        elif call.reserved is None or call.reply is None:
            self.skip(task, call.refused or "stopped")
        else:
            self.n_sent += 1
            await self._book(task, call, call.reserved)

    async def _book(self, task: LaneQuestion, call: Attempts, reserved: Reserved) -> None:
        """Have a call that was sent booked, and decide its question by what came back.

        Raises:
            LedgerError: the booking failed.
        """
        assert call.reply is not None
        outcome = call.reply.outcome
        try:
            if isinstance(outcome, Failure) and outcome.may_be_paid:
                self.lose(task, await self.books.lose(task, call, reserved, outcome))
                task.n_lost += 1
                # A call that outlasted its time limit outlasts it again.
                is_worth_it = outcome.code not in ("no_reply", "given_up")
                if is_worth_it and task.n_lost <= _MAX_SENT_AGAIN:
                    self._later.append(task)
            else:
                self.decided[task.index] = await self.books.settle(task, call, reserved, outcome)
                if isinstance(outcome, Failure) and outcome.stops_teacher:
                    self.dispatcher.stop_teacher(task.teacher, outcome)
        except LedgerError:
            raise
        except Exception as error:
            logger.exception("the answer of %s at %s", task.teacher.name, task.state_id)
            row = await self.books.keep_unread(task, call.reply, reserved, error)
            self.decided[task.index] = row

    async def _may_ask_again(self, task: LaneQuestion, body_sha: str) -> bool:
        """Settle what can be known of lost calls; then whether the question may be asked again.

        A call that may still be running is never asked again: both would be paid.
        """
        if datetime.now(UTC) < due(task.lost):
            self._later.append(task)
            return False
        is_too_slow = has_too_short_a_limit(task.lost, task.teacher)
        if row := await self.books.find_out(task, body_sha):
            self.decided[task.index] = row
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
            self.ledger.open_scopes([scope], limits, by=f"run:{self.run_id}")
            self._day = scope
        return scope
