"""The replay itself: lanes of questions, each asked once, under one budget."""

import asyncio
import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import msgspec
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.board import Board
from replay_pipeline.replay.lanes import Slots
from replay_pipeline.replay.ledger import (
    Known,
    Ledger,
    Lost,
    NewCall,
    Refused,
    Reserved,
    Settlement,
    encode_row,
)
from replay_pipeline.replay.openrouter import Client, Reply
from replay_pipeline.replay.prices import Price, usd
from replay_pipeline.replay.replies import Answer, Failure
from replay_pipeline.replay.requests import (
    Question,
    RequestBuilder,
    RequestOptions,
    dialect_of,
)
from replay_pipeline.types import Progress, RetryPolicy, TeacherAction, TeacherSpec, TraceState

logger = logging.getLogger(__name__)

_ROW = msgspec.json.Decoder(TeacherAction)
_MOST_BYTES_PER_TOKEN = 6.0
_LEAST_BYTES_CHECKED = 8192
_MAX_SENT_AGAIN = 2
"""How often a call with an unknown outcome is sent again; each counts at its full reservation."""


@dataclass(slots=True)
class Task:
    """A question in its lane."""

    index: int
    """Place in the report: states in order, teachers in order."""
    states: Sequence[TraceState]
    """All states of the run, which may be put together only when they are asked for."""
    state_index: int
    teacher: TeacherSpec
    question: Question
    lost: tuple[Lost, ...] = ()
    gate: str | None = None
    propensity: float = 1.0

    @property
    def state(self) -> TraceState:
        """The state with its messages, which can be large: not to be kept."""
        return self.states[self.state_index]

    @property
    def state_id(self) -> str:
        """Id of the state."""
        return self.question.state_id


class _FreeFailure(Exception):  # noqa: N818 (a signal to tenacity, never seen outside)
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


@dataclass(kw_only=True)
class Engine:
    """Asks the questions of one run. Stops sending when told to, never abandons a paid call."""

    run_id: str
    ledger: Ledger
    client: Client
    prices: Mapping[str, Price]
    keys: Mapping[str, SecretStr | None]
    options: RequestOptions
    max_concurrency: int
    extra_scopes: tuple[str, ...] = ()
    daily_limit_nano: int | None = None
    partition: str | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    n_total: int = 0
    on_progress: Callable[[Progress], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    decided: dict[int, TeacherAction] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    n_cached: int = 0
    n_overruns: int = 0
    newly_spent_nano: int = 0
    unknown_nano: int = 0
    stopped_teachers: dict[str, Failure] = field(default_factory=dict)

    board: Board | None = None

    def __post_init__(self) -> None:
        self._total = Slots(self.max_concurrency)
        self._slots: dict[str, Slots] = {}
        self._ratios: dict[str, float] = {}
        self._fatal: Exception | None = None
        self._day = ""

    def know(self, task: Task, known: Known) -> None:
        """Take over a call that was decided before."""
        row = _ROW.decode(known.row)
        if row.state_id != task.state_id:
            row = replace(row, state_id=task.state_id)
        self.decided[task.index] = row
        self.n_cached += 1
        self.tell(task, row)

    def tell(self, task: Task, answer: TeacherAction | None) -> None:
        """Let the other teachers at this state go on."""
        if self.board and self.board.gates.is_sequential:
            self.board.decide(task.state_index, task.state, task.teacher, answer)

    async def run(self, lanes: Sequence[tuple[TeacherSpec, deque[Task]]]) -> None:
        """Ask every question, lane by lane.

        Raises:
            LedgerError: the ledger can't be written; what is paid for was drained first.
        """
        by_teacher: dict[str, deque[deque[Task]]] = {}
        for teacher, lane in lanes:
            self._slots.setdefault(teacher.name, Slots(teacher.max_concurrency))
            by_teacher.setdefault(teacher.name, deque()).append(lane)
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            workers = [
                group.create_task(self._work(teacher_lanes))
                for name, teacher_lanes in by_teacher.items()
                for _ in range(min(len(teacher_lanes), self._slots[name].size,
                                   self.max_concurrency))
            ]  # fmt: skip
            await asyncio.wait(workers) if workers else None
            watcher.cancel()
        self._report_progress()
        if self._fatal:
            raise self._fatal

    async def _watch(self) -> None:
        """Pass on a stop that another thread asked for, and report progress."""
        has_stopped = False
        while True:
            await asyncio.sleep(0.1)
            self._report_progress()
            if self.stop.is_set() and not has_stopped:
                has_stopped = True
                logger.info("stopping: %d calls in flight are awaited", self._total.n_in_use)
                self.ledger.give_up(self.run_id)
                for slots in (self._total, *self._slots.values()):
                    slots.resume()

    def _report_progress(self) -> None:
        if self.on_progress:
            n_skipped = sum(self.skipped.values())
            spent = usd(self.newly_spent_nano)
            n_done = len(self.decided) + n_skipped
            progress = Progress(stage="replay", n_done=n_done, n_total=self.n_total, cost_usd=spent)
            try:
                self.on_progress(progress)
            except Exception as error:  # noqa: BLE001 (raised when all that is paid is in)
                self._fatal = self._fatal or error
                self.on_progress = None
                self.stop.set()

    async def _work(self, lanes: deque[deque[Task]]) -> None:
        while lanes:
            lane = lanes.popleft()
            while lane:
                await self._decide(lane.popleft())

    async def _decide(self, task: Task) -> None:
        try:
            if reason := await self._reason_not_to_ask(task):
                self.skipped[reason] += 1
                return
            await self._ask(task)
        except LedgerError as error:
            self._fatal = self._fatal or error
            self.stop.set()
            self.skipped["ledger_failed"] += 1
        finally:
            self.tell(task, self.decided.get(task.index))

    async def _reason_not_to_ask(self, task: Task) -> str | None:
        if self.board and not self.stop.is_set():
            verdict = await self.board.verdict(task.state_index, task.state, task.teacher)
            if verdict.reason:
                return verdict.reason
            task.gate, task.propensity = verdict.gate, verdict.propensity
        if self.stop.is_set():
            return "stopped"
        if task.teacher.name in self.stopped_teachers:
            return "teacher_stopped"
        return None

    async def _ask(self, task: Task) -> None:
        price = self.prices[task.teacher.name]
        body = RequestBuilder(self.options).body(task.state, task.teacher, price)
        lost = list(task.lost)
        for _ in range(1 + _MAX_SENT_AGAIN):
            if not await self._let_finish(lost):
                self.skipped["stopped"] += 1
                return
            call = _Call(self, task, body)
            await call.make()
            if call.known:
                self.know(task, call.known)
                return
            if call.reserved is None or call.reply is None:
                if lost and lost != list(task.lost):
                    self.decided[task.index] = _unknown_row(task, len(lost))
                else:
                    self.skipped[call.refused or "budget"] += 1
                return
            self.n_sent += 1
            outcome = call.reply.outcome
            if isinstance(outcome, Failure) and outcome.may_be_paid:
                lost.append(await self._lose(call, outcome))
                if self.stop.is_set():
                    break
                continue
            await self._settle(task, call, lost)
            return
        self.decided[task.index] = _unknown_row(task, len(lost))

    async def _let_finish(self, lost: list[Lost]) -> bool:
        """Wait until lost calls can't be running any more; false when told to stop meanwhile."""
        for each in lost:
            while not self.stop.is_set():
                age_s = (datetime.now(UTC) - each.sent_at).total_seconds()
                if age_s >= self.retry.settle_s:
                    break
                await asyncio.sleep(min(0.1, self.retry.settle_s - age_s))
        return not (lost and self.stop.is_set())

    async def _lose(self, call: "_Call", failure: Failure) -> Lost:
        """Book a call whose outcome is unknown at its full reservation."""
        reserved = call.reserved
        assert reserved is not None
        logger.warning("%s: %s", call.task.teacher.name, failure.message)
        self.unknown_nano += reserved.reserved_nano
        await asyncio.wrap_future(
            self.ledger.settle(
                Settlement(
                    call_id=reserved.call_id,
                    state="unknown",
                    n_attempts=call.n_attempts,
                    error_code=failure.code,
                )
            )
        )
        return Lost(
            call_id=reserved.call_id,
            reserved_nano=reserved.reserved_nano,
            run_id=self.run_id,
            sent_at=datetime.now(UTC),
        )

    async def _settle(self, task: Task, call: "_Call", lost: list[Lost]) -> None:
        reserved, reply = call.reserved, call.reply
        assert reserved is not None
        assert reply is not None
        row, cost, recovered = _failed_row(task, call), 0, None
        if isinstance(reply.outcome, Answer):
            cost, recovered = await self._cost(task, reply.outcome, reserved, lost)
            answer = _checked(task, reply.outcome)
            row = _answered_row(task, call, answer, cost)
        await asyncio.wrap_future(
            self.ledger.settle(
                Settlement(
                    call_id=reserved.call_id,
                    state="answered" if isinstance(reply.outcome, Answer) else "failed",
                    cost_nano=cost,
                    n_attempts=call.n_attempts,
                    is_lasting=isinstance(reply.outcome, Failure) and reply.outcome.is_lasting,
                    error_code=row.error_code,
                    row=encode_row(row),
                    response=reply.body,
                    recovers=recovered.call_id if recovered else None,
                )
            )
        )
        if recovered and recovered.run_id == self.run_id:
            self.unknown_nano -= recovered.reserved_nano
        self.newly_spent_nano += cost
        self.decided[task.index] = row
        if cost > reserved.reserved_nano:
            self._overrun(task, cost, reserved)
        if isinstance(reply.outcome, Failure) and reply.outcome.stops_teacher:
            self.stopped_teachers.setdefault(task.teacher.name, reply.outcome)
            logger.error("%s is not asked again: %s", task.teacher.name, reply.outcome.message)

    async def _cost(
        self, task: Task, answer: Answer, reserved: Reserved, lost: list[Lost]
    ) -> tuple[int, Lost | None]:
        """The cost of an answer, and the lost call that had paid for it."""
        if answer.is_replayed and lost:
            paid = None
            if answer.paid_generation_id:
                paid = await self.client.generation_cost(
                    task.teacher.base_url, answer.paid_generation_id, self.keys[task.teacher.name]
                )
            return (lost[0].reserved_nano if paid is None else paid), lost[0]
        if answer.cost_nano is not None:
            return answer.cost_nano, None
        if answer.n_prompt_tokens is None or answer.n_completion_tokens is None:
            return reserved.reserved_nano, None
        return self.prices[task.teacher.name].cost_nano(
            answer.n_prompt_tokens,
            answer.n_completion_tokens,
            n_cached_tokens=answer.n_cached_tokens or 0,
            n_written_tokens=answer.n_written_tokens or 0,
        ), None

    def _overrun(self, task: Task, cost: int, reserved: Reserved) -> None:
        """A provider charged more than could be: reserve more for its next calls."""
        name = task.teacher.name
        ratio = self._ratios.get(name, 1.0) * cost / max(1, reserved.reserved_nano)
        self._ratios[name] = ratio * 1.1
        self.n_overruns += 1
        logger.warning(
            "%s: a call cost $%.6f, more than its bound of $%.6f; it is booked as it is",
            name, usd(cost), usd(reserved.reserved_nano),
        )  # fmt: skip

    def new_call(self, task: Task) -> NewCall:
        """The reservation for `task`."""
        question, teacher = task.question, task.teacher
        bound = self.prices[teacher.name].bound_nano(
            question.prompt_bound_tokens, question.max_completion_tokens
        )
        return NewCall(
            request_sha=question.sha,
            state_id=question.state_id,
            teacher=teacher.name,
            model=teacher.model,
            run_id=self.run_id,
            partition=self.partition,
            scopes=(f"run:{self.run_id}", self._day_scope(), f"teacher:{teacher.name}",
                    *self.extra_scopes),
            reserved_nano=round(bound * self._ratios.get(teacher.name, 1.0)),
        )  # fmt: skip

    def _day_scope(self) -> str:
        scope = f"day:{datetime.now(UTC):%Y-%m-%d}"
        if scope != self._day:
            self.ledger.open_scopes({scope: self.daily_limit_nano})
            self._day = scope
        return scope

    def slots(self, teacher: TeacherSpec) -> tuple[Slots, Slots]:
        """Room for this teacher's calls, and for all calls."""
        return self._slots[teacher.name], self._total


@dataclass(slots=True)
class Sent:
    """What a row says about how its call was made."""

    reply: Reply | None = None
    n_attempts: int = 1
    latency_s: float = 0.0


class _Call(Sent):
    """One reservation and the attempts made under it."""

    def __init__(self, engine: Engine, task: Task, body: bytes) -> None:
        super().__init__(n_attempts=0)
        self.engine = engine
        self.task = task
        self.body = body
        self.reserved: Reserved | None = None
        self.known: Known | None = None
        self.refused: str | None = None

    async def make(self) -> None:
        """Send until there is an outcome; only failures that surely cost nothing are retried.

        The money is reserved before a slot is taken: whoever holds a slot waits for the endpoint
        alone, so calls that wait for money and calls that hold it can't block each other.
        """
        if not await self._reserve():
            return
        policy = self.engine.retry
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(policy.max_attempts),
                retry=retry_if_exception_type(_FreeFailure),
                wait=self._wait_s,
                sleep=self._sleep,
                reraise=True,
            ):
                with attempt:
                    await self._attempt()
        except _FreeFailure:
            return

    async def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until the run is told to stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            if self.engine.stop.is_set():
                return
            await asyncio.sleep(min(left, 0.1))

    def _wait_s(self, retry_state: RetryCallState) -> float:
        policy = self.engine.retry
        backoff = min(
            policy.max_wait_s, policy.first_wait_s * 2 ** (retry_state.attempt_number - 1)
        )
        backoff *= 0.5 + random.random()
        error = retry_state.outcome.exception() if retry_state.outcome else None
        asked = error.failure.retry_after_s if isinstance(error, _FreeFailure) else None
        # What the endpoint asked for is a lower bound; jitter spreads the calls that return.
        return asked + min(backoff, asked) * 0.2 if asked is not None else backoff

    async def _attempt(self) -> None:
        engine, teacher = self.engine, self.task.teacher
        own, total = engine.slots(teacher)
        async with own.taken(), total.taken():
            if engine.stop.is_set() or teacher.name in engine.stopped_teachers:
                if self.n_attempts == 0:
                    await self._withdraw("stopped" if engine.stop.is_set() else "teacher_stopped")
                return
            clock = asyncio.get_running_loop().time
            self.n_attempts += 1
            start = clock()
            self.reply = await engine.client.complete(
                teacher.base_url,
                self.body,
                headers=RequestBuilder(engine.options).headers(teacher),
                key=engine.keys[teacher.name],
                timeout_s=teacher.timeout_s,
            )
            self.latency_s = clock() - start
        outcome = self.reply.outcome
        if isinstance(outcome, Answer):
            own.succeeded()
            return
        if (outcome.retry_after_s or 0.0) > engine.retry.longest_pause_s:
            engine.stopped_teachers.setdefault(teacher.name, outcome)
            logger.error("%s is not asked again in this run: %s", teacher.name, outcome.message)
            return
        if outcome.slows_down:
            own.slow_down(outcome.retry_after_s)
        if outcome.is_retryable and not outcome.may_be_paid:
            raise _FreeFailure(outcome)

    async def _reserve(self) -> bool:
        result = await asyncio.wrap_future(
            self.engine.ledger.reserve(self.engine.new_call(self.task))
        )
        if isinstance(result, Reserved):
            self.reserved = result
        elif isinstance(result, Known):
            self.known = result
        elif isinstance(result, Refused):
            self.refused = "stopped" if result.scope == "stopped" else "budget"
        return self.reserved is not None

    async def _withdraw(self, reason: str) -> None:
        """Give a reservation back that no request was sent for."""
        assert self.reserved is not None
        settlement = Settlement(call_id=self.reserved.call_id, state="withdrawn")
        await asyncio.wrap_future(self.engine.ledger.settle(settlement))
        self.reserved = None
        self.refused = reason


def row_of(task: Task, outcome: Answer | Failure, cost: int) -> TeacherAction:
    """The row of a call that was not made by this engine, e.g. by batch."""
    call = Sent(reply=Reply(outcome))
    if isinstance(outcome, Answer):
        return _answered_row(task, call, outcome, cost)
    return _failed_row(task, call)


def _checked(task: Task, answer: Answer) -> Answer:
    """Flag an answer to a prompt that the server cut short without saying so, as Ollama does."""
    n_tokens, n_bytes = answer.n_prompt_tokens, task.question.n_prompt_bytes
    if (
        n_tokens is None
        or answer.is_replayed
        or dialect_of(task.teacher) in ("openrouter", "litellm")
        or n_tokens > n_bytes / _MOST_BYTES_PER_TOKEN
        or n_bytes < _LEAST_BYTES_CHECKED
    ):
        return answer
    return replace(
        answer,
        error_code="prompt_truncated",
        error_message=f"the server read {n_tokens} tokens of a prompt of {n_bytes} bytes: raise its "
        "context length (Ollama: OLLAMA_CONTEXT_LENGTH) or choose a window",
    )


def _answered_row(task: Task, call: Sent, answer: Answer, cost: int) -> TeacherAction:
    return TeacherAction(
        state_id=task.state_id,
        teacher=task.teacher.name,
        action=answer.action,
        model=answer.model or task.teacher.model,
        family=task.teacher.vendor,
        provider=answer.provider,
        finish_reason=answer.finish_reason,
        latency_s=round(call.latency_s, 6),
        cost_usd=usd(cost),
        n_prompt_tokens=answer.n_prompt_tokens,
        n_completion_tokens=answer.n_completion_tokens,
        n_cached_tokens=answer.n_cached_tokens,
        n_reasoning_tokens=answer.n_reasoning_tokens,
        n_attempts=call.n_attempts,
        request_sha=task.question.sha,
        generation_id=answer.generation_id,
        is_distillable=task.teacher.is_distillable,
        error_code=answer.error_code,
        error_message=answer.error_message,
        gate=task.gate,
        propensity=task.propensity,
    )


def _failed_row(task: Task, call: Sent) -> TeacherAction:
    outcome = call.reply.outcome if call.reply else None
    failure = outcome if isinstance(outcome, Failure) else None
    return TeacherAction(
        state_id=task.state_id,
        teacher=task.teacher.name,
        model=task.teacher.model,
        family=task.teacher.vendor,
        latency_s=round(call.latency_s, 6),
        n_attempts=max(1, call.n_attempts),
        request_sha=task.question.sha,
        is_distillable=task.teacher.is_distillable,
        error_code=failure.code if failure else None,
        error_message=failure.message if failure else None,
    )


def _unknown_row(task: Task, n_lost: int) -> TeacherAction:
    return TeacherAction(
        state_id=task.state_id,
        teacher=task.teacher.name,
        model=task.teacher.model,
        family=task.teacher.vendor,
        n_attempts=n_lost,
        request_sha=task.question.sha,
        is_distillable=task.teacher.is_distillable,
        error_code="outcome_unknown",
        error_message="the call was sent and no reply came back; it counts at its full "
        "reservation and is asked again on the next run",
    )
