"""The replay itself: lanes of questions, each asked once, under one budget."""

import asyncio
import logging
import random
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import xxhash
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.asking import Asking, today
from replay_pipeline.replay.bills import Verdict, judged, replayed_bound, token_problem
from replay_pipeline.replay.board import Board
from replay_pipeline.replay.calls import (
    InDoubt,
    Known,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
    decode_row,
    encode_row,
)
from replay_pipeline.replay.dialects import dialect_of
from replay_pipeline.replay.facts import NOT_ASKED
from replay_pipeline.replay.introductions import Introductions
from replay_pipeline.replay.lanes import Slots
from replay_pipeline.replay.ledger import Ledger
from replay_pipeline.replay.openrouter import Client, Reply
from replay_pipeline.replay.prices import Price, usd
from replay_pipeline.replay.replies import OTHER_MODEL, Answer, Failure
from replay_pipeline.replay.requests import Question, RequestBuilder, with_recorded_names
from replay_pipeline.replay.sizes import Learned
from replay_pipeline.types import Progress, TeacherAction, TeacherSpec, TraceState

logger = logging.getLogger(__name__)

Lanes = Sequence[tuple[TeacherSpec, deque["Task"]]]

_MOST_BYTES_PER_TOKEN = 6.0
_LEAST_BYTES_CHECKED = 8192
_MOST_KEPT_BYTES = 1 << 20
"""Of a reply that could not be used, no more than this is kept in the ledger."""
_MOST_OVERRUN = 8.0
"""No more than this many times its bound is reserved for a call, whatever others have cost."""
_MAX_SENT_AGAIN = 2
"""How often one run sends a request again after it was lost."""


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
    lost: tuple[LostCall, ...] = ()
    gate: str | None = None
    propensity: float = 1.0
    previous: "Task | None" = None
    """The step before in its lane, if this prompt begins with the whole of that one's."""
    n_read_tokens: int | None = None
    """Prompt tokens that the teacher read, once it has answered."""
    is_judged: bool = False
    """The gates have had their say."""
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
        """Give the id of the state."""
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

    def last_asked(self) -> "Task | None":
        """Find the nearest step before whose prompt the endpoint has seen and this one begins with."""
        step = self.previous
        while step is not None and not step.is_asked:
            step = step.previous
        return step


class _FreeFailure(Exception):  # noqa: N818 (a signal to tenacity, never seen outside)
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


@dataclass(kw_only=True)
class Engine:
    """Asks the questions of one run. Stops sending when told to, never abandons a paid call."""

    ledger: Ledger
    client: Client
    asking: Asking
    prices: Mapping[str, Price]
    keys: Mapping[str, SecretStr | None]
    n_total: int = 0
    on_progress: Callable[[Progress], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    board: Board | None = None
    decided: dict[int, TeacherAction] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    n_sent: int = 0
    n_cached: int = 0
    n_overruns: int = 0
    n_disputed: int = 0
    newly_spent_nano: int = 0
    answered_before: frozenset[str] = frozenset()
    """Teachers of whom the ledger has answers."""
    stopped_teachers: dict[str, Failure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_id = self.asking.run_id or uuid.uuid4().hex[:12]
        self.retry = self.asking.retry
        self.options = self.asking.request_options()
        self._total = Slots(self.asking.max_concurrency)
        self._ratios: dict[str, float] = {}
        self._without_cache: set[str] = set()
        self._later: list[Task] = []
        self._short: list[Task] = []
        self._n_found_out = 0
        self.newly_learned: dict[str, Learned] = {}
        self._fatal: Exception | None = None
        self._day = today()

    @cached_property
    def introductions(self) -> Introductions:
        """What is let through to each endpoint."""
        return Introductions(
            self.prices,
            answered_before=self.answered_before,
            lists_models=lambda teacher: self.client.models(
                teacher.base_url, self.keys[teacher.name], dialect=dialect_of(teacher)
            ),
        )

    def know(self, task: Task, known: Known) -> None:
        """Take over a call that was decided before."""
        row = decode_row(known.row)
        if row.error_code == OTHER_MODEL and self.introductions.is_asked(task.teacher, row.model):
            row = replace(row, error_code=None, error_message=None)  # its name has been told since
        if row.state_id != task.state_id:
            row = replace(row, state_id=task.state_id)
        task.n_read_tokens = row.n_prompt_tokens
        task.is_asked = True
        self.decided[task.index] = row
        self.n_cached += 1
        self.tell(task, row)

    def lose(self, task: Task, lost: Iterable[LostCall]) -> None:
        """Give lost calls a row of their own, until it is known what became of them."""
        task.lost = tuple(lost)
        task.is_asked |= bool(task.lost)
        if task.lost:
            code = task.lost[-1].error_code
            self.decided[task.index] = _row(
                task,
                n_attempts=len(task.lost),
                error_code="outcome_unknown",
                error_message=f"a call was sent and no reply came back{f' ({code})' if code else ''}"
                "; it counts at its full reservation until it is asked again or settled "
                "(replay-pipeline reconcile)",
            )

    def skip(self, task: Task, reason: str) -> None:
        """Count a question that is not asked; one with a lost call has its row already."""
        if task.index not in self.decided:
            self.skipped[reason] += 1

    def tell(self, task: Task, answer: TeacherAction | None) -> None:
        """Let the other teachers at this state go on."""
        if self.board and self.board.gates.is_sequential:
            try:
                self.board.decide(task.state_index, task.state, task.teacher, answer)
            except Exception:
                logger.exception("the vote of %s at %s", task.teacher.name, task.state_id)

    async def run(self, lanes: Lanes) -> None:
        """Ask every question, lane by lane, and those again that a lost call stood in the way of.

        Raises:
            LedgerError: the ledger can't be written; what is paid for was drained first.
        """
        try:
            while lanes:
                n_before = self._n_found_out
                await self._ask_all(lanes)
                lanes = await self._left_over(is_richer=self._n_found_out > n_before)
        finally:
            await self.introductions.close()
        self._report_progress()
        if self._fatal:
            raise self._fatal

    async def _ask_all(self, lanes: Lanes) -> None:
        by_teacher: dict[str, deque[deque[Task]]] = {}
        n_at_once: dict[str, int] = {}
        for teacher, lane in lanes:
            n_at_once[teacher.name] = self.introductions.slots(teacher).size
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

    def meet(self, teacher: TeacherSpec, outcome: Answer | Failure) -> Failure | None:
        """Look at what answered; end a teacher that is not the one that was meant."""
        wrong = self.introductions.meet(teacher, outcome)
        if wrong is not None and self.introductions.is_unwelcome(teacher):
            self.stop_teacher(teacher, wrong)
        return wrong

    async def _left_over(self, *, is_richer: bool) -> Lanes:
        """Give what is worth asking once more: lost calls that are over, and what was too dear.

        Money that a lost call held is free once its outcome is known, so questions that did not
        fit before may fit now.
        """
        later, self._later = self._later, []
        wait_until = datetime.now(UTC) + timedelta(seconds=self.retry.settle_s)
        ready = [task for task in later if _due(task.lost) <= wait_until]
        if ready:
            logger.info("%d lost calls are asked again once they are surely over", len(ready))
            left = max(_due(task.lost) for task in ready) - datetime.now(UTC)
            await self.wait(left.total_seconds())
        again = [] if self.stop.is_set() else ready
        if is_richer and not self.stop.is_set():
            again, self._short = [*again, *self._short], []
        if not again:
            for task in self._short:
                self.skip(task, "stopped" if self.stop.is_set() else "budget")
            self._short = []
        return [(task.teacher, deque([task])) for task in again]

    async def wait(self, seconds: float) -> None:
        """Wait, but no longer than until the run is told to stop."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            if self.stop.is_set():
                return
            await asyncio.sleep(min(left, 0.1))

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
                for slots in (self._total, *self.introductions.all_slots()):
                    slots.resume()

    def _report_progress(self) -> None:
        if self.on_progress:
            n_skipped = sum(n for why, n in self.skipped.items() if why not in NOT_ASKED)
            spent = usd(self.newly_spent_nano)
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

    async def _work(self, lanes: deque[deque[Task]]) -> None:
        while lanes:
            lane = lanes.popleft()
            while lane:
                await self._decide(lane.popleft())

    async def _decide(self, task: Task) -> None:
        """Decide one question. Nothing that happens to it may end the others, which are paid for."""
        try:
            if reason := await self._reason_not_to_ask(task):
                self.skip(task, reason)
            else:
                await self._ask(task)
        except LedgerError as error:
            self._end(error)
            self.skip(task, "ledger_failed")
        except Exception as error:
            logger.exception("%s at %s", task.teacher.name, task.state_id)
            self.decided[task.index] = _row(
                task,
                error_code="unexpected",
                error_message=f"{type(error).__name__}: {error}"[:500],
            )
        self.tell(task, self.decided.get(task.index))

    async def _reason_not_to_ask(self, task: Task) -> str | None:
        if self.board and not self.stop.is_set() and not task.is_judged:
            task.is_judged = True
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
        call = _Call(self, task, body, body_sha)
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
            outcome = call.reply.outcome
            try:
                if isinstance(outcome, Failure) and outcome.may_be_paid:
                    await self._lost(task, call, call.reserved, outcome)
                else:
                    await self._settle(task, call, call.reserved, outcome)
            except LedgerError:
                raise
            except Exception as error:
                logger.exception("the answer of %s at %s", task.teacher.name, task.state_id)
                await self._keep_unread(task, call.reply, call.reserved, error)

    async def _may_ask_again(self, task: Task, body_sha: str) -> bool:
        """Settle what can be known of lost calls; then whether the question may be asked again.

        A call that may still be running is never asked again: both would be paid.
        """
        if datetime.now(UTC) < _due(task.lost):
            self._later.append(task)
            return False
        left, keeps = [], self._keeps_answers(task, body_sha)
        for lost in task.lost:
            cost = None
            if lost.generation_id:
                cost = await self.client.generation_cost(
                    task.teacher.base_url, lost.generation_id, self.keys[task.teacher.name]
                )
            elif not keeps:
                # Nobody can tell whether it was charged: it is booked as if it were, in full.
                cost = lost.reserved_nano
            if cost is None:
                left.append(lost)
                continue
            self.newly_spent_nano += cost
            self._n_found_out += 1
            settlement = settled_lost(lost, cost)
            await asyncio.wrap_future(self.ledger.settle(settlement))
            self.decided[task.index] = decode_row(settlement.row or b"")
        is_too_slow = has_too_short_a_limit(task.lost, task.teacher)
        task.lost = tuple(left)
        return not is_too_slow

    def _keeps_answers(self, task: Task, body_sha: str) -> bool:
        """Whether the endpoint is sure to charge the lost calls and their repetition once only.

        OpenRouter keeps the answer to an equal request (`X-OpenRouter-Cache`) for as long as it
        was told to, so it is charged by the first call or, where that failed, by the second. It
        knows a request by its bytes: where they changed, as with a price, it says nothing of the first.
        """
        kept_s = self.options.response_cache_ttl_s
        oldest = min((lost.sent_at for lost in task.lost), default=datetime.now(UTC))
        return (
            dialect_of(task.teacher).name == "openrouter"
            and task.teacher.base_url not in self._without_cache
            and all(lost.body_sha in (None, body_sha) for lost in task.lost)
            and datetime.now(UTC) - oldest < timedelta(seconds=kept_s)
        )

    async def _lost(self, task: Task, call: "_Call", reserved: Reserved, failure: Failure) -> None:
        """Book a call whose outcome is unknown at its full reservation."""
        logger.warning("%s: %s", task.teacher.name, failure.message)
        await asyncio.wrap_future(
            self.ledger.settle(
                Settlement(
                    call_id=reserved.call_id,
                    state="unknown",
                    n_attempts=call.n_attempts,
                    error_code=failure.code,
                    generation_id=failure.generation_id,
                    sent_at=call.reply.sent_at if call.reply else None,
                    response=call.reply.body[:_MOST_KEPT_BYTES] if call.reply else None,
                )
            )
        )
        found = await asyncio.to_thread(self.ledger.lookup, [task.question.sha])
        self.lose(task, found.lost.get(task.question.sha, ()))
        task.n_lost += 1
        # A call that outlasted its time limit outlasts it again.
        if failure.code not in ("no_reply", "given_up") and task.n_lost <= _MAX_SENT_AGAIN:
            self._later.append(task)

    async def _keep_unread(
        self, task: Task, reply: Reply, reserved: Reserved, error: Exception
    ) -> None:
        """Book a reply that this program can't digest, once and for all, with its bytes."""
        usage = reply.outcome.usage if isinstance(reply.outcome, Answer) else None
        cost = usage.cost_nano if usage else None
        if cost is None or cost > _MOST_OVERRUN * reserved.reserved_nano:
            cost = reserved.reserved_nano
        row = _row(
            task,
            cost_usd=usd(cost),
            finish_reason="error",
            error_code="unexpected",
            error_message=f"{type(error).__name__}: {error}"[:500],
        )
        await asyncio.wrap_future(
            self.ledger.settle(
                Settlement(
                    call_id=reserved.call_id,
                    state="answered",
                    cost_nano=cost,
                    error_code=row.error_code,
                    row=encode_row(row),
                    response=reply.body[:_MOST_KEPT_BYTES],
                )
            )
        )
        self.newly_spent_nano += cost
        self.decided[task.index] = row

    async def _settle(
        self, task: Task, call: "_Call", reserved: Reserved, outcome: Answer | Failure
    ) -> None:
        assert call.reply is not None
        made: dict[str, Any] = {"n_attempts": call.n_attempts, "latency_s": call.latency_s}
        if isinstance(outcome, Failure):
            verdict, row = Verdict(cost_nano=0), failed_row(task, outcome, **made)
        else:
            verdict = await self._verdict(task, call, outcome, reserved)
            action = with_recorded_names(outcome.action, task.state)
            outcome = _checked(task, replace(outcome, action=action), call.wrong)
            row = answered_row(task, outcome, verdict.cost_nano, **made)
            if not outcome.is_replayed and call.wrong is None:
                task.n_read_tokens = _plausible(task, outcome.usage.n_prompt_tokens)
                self._count(task, row, outcome, len(call.reply.body))
        cost = verdict.cost_nano
        # A free failure says nothing of the lost calls whose reservation this one took over.
        is_doubted = isinstance(outcome, Failure) and call.takes_over
        recovers = task.lost if not call.takes_over and isinstance(outcome, Answer) else ()
        await asyncio.wrap_future(
            self.ledger.settle(
                Settlement(
                    call_id=reserved.call_id,
                    state="unknown" if is_doubted else
                    "answered" if isinstance(outcome, Answer) else "failed",
                    cost_nano=cost,
                    n_attempts=call.n_attempts,
                    is_lasting=isinstance(outcome, Failure) and outcome.is_lasting,
                    error_code=None if is_doubted else row.error_code,
                    row=encode_row(row),
                    response=call.reply.body if row.error_code is None
                    else call.reply.body[:_MOST_KEPT_BYTES],
                    generation_id=row.generation_id,
                    disputed=verdict.disputed,
                    recovers=tuple(lost.call_id for lost in recovers)
                    if isinstance(outcome, Answer) and outcome.is_replayed else (),
                )
            )
        )  # fmt: skip
        self.newly_spent_nano += cost
        self._n_found_out += bool(task.lost)
        if verdict.disputed:
            self.n_disputed += 1
            logger.warning(
                "%s: %s; the call is booked at its bound", task.teacher.name, verdict.disputed
            )
        self.decided[task.index] = row
        self._learn(task, call, cost, reserved)
        if isinstance(outcome, Failure) and outcome.stops_teacher:
            self.stop_teacher(task.teacher, outcome)

    def stop_teacher(self, teacher: TeacherSpec, failure: Failure) -> None:
        """Ask a teacher no more in this run."""
        if teacher.name not in self.stopped_teachers:
            self.stopped_teachers[teacher.name] = failure
            logger.error("%s is not asked again in this run: %s", teacher.name, failure.message)

    async def _verdict(
        self, task: Task, call: "_Call", answer: Answer, reserved: Reserved
    ) -> Verdict:
        """Find what an answer cost, together with the lost calls it stands for."""
        assert call.reply is not None
        price, limit = self.prices[task.teacher.name], task.question.max_completion_tokens
        if answer.is_replayed and dialect_of(task.teacher).name == "openrouter":
            if not task.lost:
                return Verdict(cost_nano=0)
            held = max(lost.reserved_nano for lost in task.lost)
            if (paid := await self._recorded_cost(task.teacher, answer, held)) is not None:
                return Verdict(cost_nano=paid)
            bound = replayed_bound(answer, task.question.size, price=price, n_limit=limit)
            told = "from the router's cache, which has no record of what the answer had cost"
            return Verdict(cost_nano=min(bound, held), disputed=told)
        verdict = judged(
            answer, task.question.size, price=price, bound_nano=reserved.reserved_nano,
            n_limit=limit, n_reply_bytes=len(call.reply.body),
        )  # fmt: skip
        if call.takes_over and not call.reply.has_cache:
            # The endpoint keeps no answers after all: the lost calls may have been charged too.
            self._without_cache.add(task.teacher.base_url)
            lost_nano = sum(lost.reserved_nano for lost in task.lost)
            verdict = replace(verdict, cost_nano=verdict.cost_nano + lost_nano)
        return verdict

    async def _recorded_cost(self, teacher: TeacherSpec, answer: Answer, held: int) -> int | None:
        """Ask the router what the call had cost that an answer from its cache was paid with."""
        for name in (answer.paid_generation_id, answer.generation_id):
            if name:
                paid = await self.client.generation_cost(
                    teacher.base_url, name, self.keys[teacher.name]
                )
                # The answer may go by a name of its own, under which it was free.
                is_its_own = name != answer.paid_generation_id and not paid
                if paid is not None and not is_its_own and paid <= _MOST_OVERRUN * held:
                    return paid
        return None

    def _learn(self, task: Task, call: "_Call", cost: int, reserved: Reserved) -> None:
        """Where a provider charged more than can be, reserve more for its next calls.

        The factor is what the dearest call cost over its plain bound, never over a reservation
        that held the factor already: that would compound over the calls in flight.
        """
        if cost <= reserved.reserved_nano:
            return
        self.n_overruns += 1
        name, factor = task.teacher.name, cost / max(1, call.bound_nano)
        self._ratios[name] = min(_MOST_OVERRUN, max(self._ratios.get(name, 1.0), factor * 1.05))
        logger.warning(
            "%s: a call cost $%.6f, more than its bound of $%.6f; it is booked as it is",
            name, usd(cost), usd(call.bound_nano),
        )  # fmt: skip

    def _count(self, task: Task, row: TeacherAction, answer: Answer, n_bytes: int) -> None:
        """Learn the sizes of a teacher's prompts and answers from one that it counted."""
        question = task.question
        if token_problem(answer.usage, question.size, question.max_completion_tokens, n_bytes):
            return
        before, name = task.last_asked(), task.teacher.name
        n_expected = before.n_read_tokens if before and before.n_read_tokens else 0
        self.newly_learned[name] = self.newly_learned.get(name, Learned()).with_answer(
            task.question.size,
            row.n_prompt_tokens if row.error_code != "prompt_truncated" else None,
            row.n_completion_tokens,
            n_expected_cached=n_expected,
            n_cached=row.n_cached_tokens,
        )

    def new_call(self, call: "_Call") -> NewCall:
        """Make the reservation for a call."""
        task = call.task
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
            reserved_nano=round(call.bound_nano * self._ratios.get(teacher.name, 1.0)),
            timeout_s=teacher.timeout_s,
            lost=tuple(lost.call_id for lost in task.lost),
            takes_over=call.takes_over,
            body_sha=call.body_sha,
        )  # fmt: skip

    def takes_over(self, task: Task, body_sha: str) -> bool:
        """Whether asking again may use the money that the lost calls of a question hold.

        A router that broke a call itself may have charged it without keeping its answer; one
        whose caller died has not.
        """
        went_on = all(lost.was_left_alone for lost in task.lost)
        return bool(task.lost) and went_on and self._keeps_answers(task, body_sha)

    def _day_scope(self) -> str:
        scope = today()
        if scope != self._day:
            limits = self.asking.limits_nano(scope, self.prices)
            limits = {name: limit for name, limit in limits.items() if name == scope}
            self.ledger.open_scopes([scope], limits, by=f"run:{self.run_id}")
            self._day = scope
        return scope

    def slots(self, teacher: TeacherSpec) -> tuple[Slots, Slots]:
        """Find room for this teacher's calls, and for all calls."""
        return self.introductions.slots(teacher), self._total


class _Call:
    """One reservation and the attempts made under it."""

    def __init__(self, engine: Engine, task: Task, body: bytes, body_sha: str) -> None:
        self.engine = engine
        self.task = task
        self.body = body
        self.body_sha = body_sha
        self.takes_over = engine.takes_over(task, body_sha)
        self.bound_nano = engine.prices[task.teacher.name].bound_nano(
            task.bound_tokens(), task.question.max_completion_tokens
        )
        self.reply: Reply | None = None
        self.n_attempts = 0
        self.latency_s = 0.0
        self.new = engine.new_call(self)
        self.reserved: Reserved | None = None
        self.sent_by = datetime.max.replace(tzinfo=UTC)
        self.known: Known | None = None
        self.doubted: tuple[LostCall, ...] = ()
        self.wrong: Failure | None = None
        self.refused: str | None = None

    async def make(self) -> None:
        """Send until there is an outcome; only failures that surely cost nothing are retried.

        The money is reserved before a slot is taken: whoever holds a slot waits for the endpoint
        alone, so calls that wait for money and calls that hold it can't block each other.
        """
        if not await self._reserve():
            return
        try:
            await self._attempt()
        except _FreeFailure as error:
            await self._try_again(error)

    async def _try_again(self, first: _FreeFailure) -> None:
        """Retry after a first attempt that surely cost nothing, which most calls never need."""
        policy = self.engine.retry
        failure: _FreeFailure | None = first
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(policy.max_attempts),
                retry=retry_if_exception_type(_FreeFailure),
                wait=self._wait_s,
                sleep=self.engine.wait,
                reraise=True,
            ):
                with attempt:
                    if failure is not None:
                        failure, again = None, failure
                        raise again
                    await self._attempt()
        except _FreeFailure:
            return

    def _wait_s(self, retry_state: RetryCallState) -> float:
        policy = self.engine.retry
        backoff = min(
            policy.max_wait_s, policy.first_wait_s * 2 ** (retry_state.attempt_number - 1)
        )
        backoff *= 0.5 + random.random()
        error = retry_state.outcome.exception() if retry_state.outcome else None
        asked = error.failure.retry_after_s if isinstance(error, _FreeFailure) else None
        # What the endpoint asked for is a lower bound; jitter spreads the calls that return. One
        # that asks for no pause, or for one that has passed, is not asked again at once.
        return backoff if asked is None else max(backoff, asked + min(backoff, asked) * 0.2)

    async def _attempt(self) -> None:
        engine, teacher = self.engine, self.task.teacher
        own, total = engine.slots(teacher)
        async with own.taken(), total.taken():
            if engine.stop.is_set() or teacher.name in engine.stopped_teachers:
                if self.n_attempts == 0:
                    await self._withdraw("stopped" if engine.stop.is_set() else "teacher_stopped")
                return
            if datetime.now(UTC) > self.sent_by:
                await asyncio.wrap_future(self._leaves_now())
            clock = asyncio.get_running_loop().time
            self.n_attempts += 1
            self.task.is_asked = True
            start = clock()
            self.reply = await engine.client.complete(
                teacher.base_url,
                self.body,
                dialect=dialect_of(teacher),
                headers=RequestBuilder(engine.options).headers(teacher),
                key=engine.keys[teacher.name],
                timeout_s=teacher.timeout_s,
                on_sent=self._has_left,
            )
            self.latency_s = clock() - start
            self.wrong = engine.meet(teacher, self.reply.outcome)
        outcome = self.reply.outcome
        if isinstance(outcome, Answer):
            own.succeeded()
            return
        if (outcome.retry_after_s or 0.0) > engine.retry.longest_pause_s:
            engine.stop_teacher(teacher, outcome)
            return
        if outcome.slows_down:
            own.slow_down(outcome.retry_after_s)
        if outcome.is_retryable and not outcome.may_be_paid:
            raise _FreeFailure(outcome)

    def _leaves_now(self) -> "Future[None]":
        """Tell the ledger that the call leaves later than it says: from then on counts its limit."""
        assert self.reserved is not None
        self.sent_by = datetime.now(UTC) + self.new.slack
        return self.engine.ledger.sending(self.reserved.call_id, self.sent_by)

    def _has_left(self) -> None:
        if datetime.now(UTC) > self.sent_by:
            self._leaves_now()

    async def _reserve(self) -> bool:
        result = await asyncio.wrap_future(self.engine.ledger.reserve(self.new))
        if isinstance(result, Reserved):
            self.reserved = result
            self.sent_by = result.sent_by or self.sent_by
        elif isinstance(result, Known):
            self.known = result
        elif isinstance(result, InDoubt):
            self.doubted = result.lost
        elif isinstance(result, Refused):
            self.refused = "stopped" if result.scope == "stopped" else "budget"
        return self.reserved is not None

    async def _withdraw(self, reason: str) -> None:
        """Give a reservation back that no request was sent for."""
        assert self.reserved is not None
        # What was taken over from lost calls is still theirs.
        state = "unknown" if self.takes_over else "withdrawn"
        settlement = Settlement(call_id=self.reserved.call_id, state=state)
        await asyncio.wrap_future(self.engine.ledger.settle(settlement))
        self.reserved = None
        self.refused = reason


def _due(lost: Iterable[LostCall]) -> datetime:
    """Say when the last of these calls is surely over."""
    return max((each.due_at for each in lost), default=datetime.now(UTC))


def has_too_short_a_limit(lost: Sequence[LostCall], teacher: TeacherSpec) -> bool:
    """Say whether calls outlasted the time limit of a teacher, which has not been raised since.

    Every further call would be lost too, and paid for. An endpoint that keeps its answers is
    asked once more, since the answer may be there by now.
    """
    timed_out = [each for each in lost if each.error_code == "no_reply"]
    most = 2 if dialect_of(teacher).name == "openrouter" else 1
    longest = max((each.due_at - each.sent_at for each in timed_out), default=timedelta())
    return len(timed_out) >= most and timedelta(seconds=teacher.timeout_s) <= longest


def settled_lost(lost: LostCall, cost: int) -> Settlement:
    """Book a lost call at what is known of its cost, or at its bound; its answer stays lost."""
    is_too_slow = lost.error_code == "no_reply"
    waited_s = (lost.due_at - lost.sent_at).total_seconds()
    row = TeacherAction(
        state_id=lost.state_id,
        teacher=lost.teacher,
        model=lost.model,
        cost_usd=usd(cost),
        latency_s=waited_s if is_too_slow else 0.0,
        request_sha=lost.request_sha,
        generation_id=lost.generation_id,
        error_code=lost.error_code or "outcome_unknown",
        error_message=f"no reply within {waited_s:g} s: raise the teacher's timeout_s"
        if is_too_slow
        else "no reply came back; it is booked at the most it can have cost",
    )
    return Settlement(
        call_id=lost.call_id,
        state="failed",
        cost_nano=cost,
        is_lasting=is_too_slow,
        error_code=row.error_code,
        row=encode_row(row),
        generation_id=lost.generation_id,
    )


def _checked(task: Task, answer: Answer, wrong: Failure | None) -> Answer:
    """Flag an answer of another model, or to a prompt that the server cut short without saying so, as Ollama does.

    A chat template that knows no tools leaves them out as silently (SmolLM2's, Gemma's).
    """
    if wrong is not None:
        return replace(answer, error_code=wrong.code, error_message=wrong.message)
    n_tokens, size = answer.usage.n_prompt_tokens, task.question.size
    if (
        n_tokens is None
        or answer.is_replayed
        or dialect_of(task.teacher).is_whole
        or n_tokens > size.n_bytes / _MOST_BYTES_PER_TOKEN
        or size.n_bytes < _LEAST_BYTES_CHECKED
    ):
        return answer
    seen = f"the server read {n_tokens} tokens of a prompt of {size.n_bytes} bytes"
    if n_tokens > (size.n_bytes - size.n_tool_bytes) / _MOST_BYTES_PER_TOKEN:
        why = "its chat template drops the tools; serve the model with one that knows tools"
    else:
        why = "raise its context length (Ollama: OLLAMA_CONTEXT_LENGTH) or choose a window"
    return replace(answer, error_code="prompt_truncated", error_message=f"{seen}: {why}")


def _plausible(task: Task, n_tokens: int | None) -> int | None:
    """Trust a count of prompt tokens only where it can be the count of the whole prompt."""
    least = task.question.size.n_bytes / _MOST_BYTES_PER_TOKEN
    return n_tokens if n_tokens is not None and n_tokens >= least else None


def answered_row(task: Task, answer: Answer, cost: int, **made: Any) -> TeacherAction:
    """Make the row of a paid answer. `made` says how the call was made."""
    usage = answer.usage
    return replace(
        _row(task, **made),
        action=answer.action,
        model=answer.model or task.teacher.model,
        provider=answer.provider,
        finish_reason=answer.finish_reason,
        cost_usd=usd(cost),
        n_prompt_tokens=usage.n_prompt_tokens,
        n_completion_tokens=usage.n_completion_tokens,
        n_cached_tokens=usage.n_cached_tokens,
        n_reasoning_tokens=usage.n_reasoning_tokens,
        generation_id=answer.generation_id,
        error_code=answer.error_code,
        error_message=answer.error_message,
        gate=task.gate,
        propensity=task.propensity,
        logprobs=answer.logprobs if task.teacher.top_logprobs else None,
    )


def failed_row(task: Task, failure: Failure, **made: Any) -> TeacherAction:
    """Make the row of a call that brought no answer and cost nothing."""
    return _row(task, error_code=failure.code, error_message=failure.message, **made)


def _row(task: Task, **more: Any) -> TeacherAction:
    return TeacherAction(
        state_id=task.state_id,
        teacher=task.teacher.name,
        model=task.teacher.model,
        family=task.teacher.vendor,
        request_sha=task.question.sha,
        is_distillable=task.teacher.is_distillable,
        **more,
    )
