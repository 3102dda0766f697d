"""A reservation and its attempts, and the dispatcher that sends all calls of a run."""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from replay_pipeline.replay.ask.introductions import Introductions
from replay_pipeline.replay.ask.lanes import Slots
from replay_pipeline.replay.buy.tasks import LaneQuestion
from replay_pipeline.replay.dialects import RequestOptions, dialect_of
from replay_pipeline.replay.dialects.client import Client, Reply
from replay_pipeline.replay.dialects.replies import Answer, Failure
from replay_pipeline.replay.dialects.requests import RequestBuilder
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
)
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import RetryPolicy, TeacherSpec

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Dispatcher:
    """The sender of all calls of a run. It holds the slots, the endpoints, and the stop signal."""

    ledger: Ledger
    client: Client
    keys: Mapping[str, SecretStr | None]
    options: RequestOptions
    retry: RetryPolicy
    stop: threading.Event
    total: Slots
    """The slots that all teachers share."""
    introductions: Introductions
    stopped_teachers: dict[str, Failure] = field(default_factory=dict)

    def reason_not_to_send(self, teacher: TeacherSpec) -> str | None:
        """Return why no more calls go to a teacher, or None while they do."""
        if self.stop.is_set():
            return "stopped"
        return "teacher_stopped" if teacher.name in self.stopped_teachers else None

    async def send(
        self, teacher: TeacherSpec, body: bytes, *, on_sent: Callable[[], None]
    ) -> Reply:
        """Send one request, exactly once."""
        return await self.client.complete(
            teacher.base_url,
            body,
            dialect=dialect_of(teacher),
            headers=RequestBuilder(self.options).headers(teacher),
            key=self.keys[teacher.name],
            timeout_s=teacher.timeout_s,
            on_sent=on_sent,
        )

    def meet(self, teacher: TeacherSpec, outcome: Answer | Failure) -> Failure | None:
        """Check which model answered, and stop the teacher if it is another one."""
        wrong = self.introductions.meet(teacher, outcome)
        if wrong is not None and self.introductions.is_unwelcome(teacher):
            self.stop_teacher(teacher, wrong)
        return wrong

    def stop_teacher(self, teacher: TeacherSpec, failure: Failure) -> None:
        """Stop asking a teacher for the rest of this run."""
        if teacher.name not in self.stopped_teachers:
            self.stopped_teachers[teacher.name] = failure
            logger.error("%s is not asked again in this run: %s", teacher.name, failure.message)

    def resume(self) -> None:
        """Wake everything that waits for a slot, so that it sees that the run was stopped."""
        for slots in (self.total, *self.introductions.all_slots()):
            slots.resume()

    async def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the run is stopped."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            if self.stop.is_set():
                return
            await asyncio.sleep(min(left, 0.1))


class _FreeFailure(Exception):  # noqa: N818 (a signal to tenacity, never seen outside)
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


class Attempts:
    """One reservation and the attempts made under it.

    Args:
        dispatcher: the sender of all calls.
        task: the question.
        body: the request body.
        new: the call to reserve money for.
        bound_nano: the most that it can cost by the price list.
    """

    def __init__(
        self, dispatcher: Dispatcher, task: LaneQuestion, body: bytes, new: NewCall, bound_nano: int
    ) -> None:
        self.dispatcher = dispatcher
        self.task = task
        self.body = body
        self.new = new
        self.bound_nano = bound_nano
        self.reply: Reply | None = None
        self.wrong: Failure | None = None
        self.n_attempts = 0
        self.latency_s = 0.0
        self.reserved: Reserved | None = None
        self.sent_by = datetime.max.replace(tzinfo=UTC)
        self.known: Known | None = None
        self.doubted: tuple[LostCall, ...] = ()
        self.refused: str | None = None

    async def make(self) -> None:
        """Send until there is an outcome. Only failures that surely cost nothing are retried.

        Money is reserved before a slot is taken. So a call in a slot waits only for the endpoint,
        and calls that wait for money can't block calls that hold it.
        """
        if not await self._reserve():
            return
        try:
            await self._attempt()
        except _FreeFailure as error:
            await self._try_again(error)

    async def _try_again(self, first: _FreeFailure) -> None:
        """Retry after a first attempt that surely cost nothing, which most calls never need."""
        policy = self.dispatcher.retry
        failure: _FreeFailure | None = first
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(policy.max_attempts),
                retry=retry_if_exception_type(_FreeFailure),
                wait=self._wait_s,
                sleep=self.dispatcher.wait,
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
        policy = self.dispatcher.retry
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
        dispatcher, teacher = self.dispatcher, self.task.teacher
        own = dispatcher.introductions.slots(teacher)
        async with own.taken(), dispatcher.total.taken():
            if reason := dispatcher.reason_not_to_send(teacher):
                if self.n_attempts == 0:
                    await self._withdraw(reason)
                return
            if datetime.now(UTC) > self.sent_by:
                await asyncio.wrap_future(self._leaves_now())
            clock = asyncio.get_running_loop().time
            self.n_attempts += 1
            self.task.is_asked = True
            start = clock()
            self.reply = await dispatcher.send(teacher, self.body, on_sent=self._has_left)
            self.latency_s = clock() - start
            self.wrong = dispatcher.meet(teacher, self.reply.outcome)
        outcome = self.reply.outcome
        if isinstance(outcome, Answer):
            own.succeeded()
            return
        if (outcome.retry_after_s or 0.0) > dispatcher.retry.longest_pause_s:
            dispatcher.stop_teacher(teacher, outcome)
            return
        if outcome.slows_down:
            own.slow_down(outcome.retry_after_s)
        if outcome.is_retryable and not outcome.may_be_paid:
            raise _FreeFailure(outcome)

    def _leaves_now(self) -> "Future[None]":
        """Record in the ledger that the call leaves later than it says: its limit counts from then on."""
        assert self.reserved is not None
        self.sent_by = datetime.now(UTC) + self.new.slack
        return self.dispatcher.ledger.sending(self.reserved.call_id, self.sent_by)

    def _has_left(self) -> None:
        if datetime.now(UTC) > self.sent_by:
            self._leaves_now()

    async def _reserve(self) -> bool:
        result = await asyncio.wrap_future(self.dispatcher.ledger.reserve(self.new))
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
        """Return a reservation that no request was sent for."""
        assert self.reserved is not None
        # What was taken over from lost calls is still theirs.
        state = "unknown" if self.new.takes_over else "withdrawn"
        settlement = Settlement(call_id=self.reserved.call_id, state=state)
        await asyncio.wrap_future(self.dispatcher.ledger.settle(settlement))
        self.reserved = None
        self.refused = reason
