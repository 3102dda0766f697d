"""One question's way to a booked answer: a slot, a reservation, attempts, and the bill.

`Slots` limits how many calls run at once. `Dispatcher` sends the calls of a run, `Attempts` makes
those of one question under one reservation, and `Books` settles each with the ledger.
"""

import asyncio
import hashlib
import logging
import random
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from replay_pipeline.replay.ask.outcomes import (
    answer_row,
    answered_row,
    by_its_model,
    checked,
    failed_row,
    plausible,
    unexpected,
)
from replay_pipeline.replay.buy.lanes import LaneQuestion
from replay_pipeline.replay.dialects.client import Client, Reply
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import (
    MALFORMED,
    NO_COMPLETION,
    OTHER_MODEL,
    Answer,
    Failure,
)
from replay_pipeline.replay.dialects.requests import with_recorded_names
from replay_pipeline.replay.dialects.servers import KEPT_S, dialect_of
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.replay.money.bills import BookedCost, judged, replayed_bound, token_problem
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
    decode_row,
    encode_row,
    settled_lost,
)
from replay_pipeline.replay.money.ledger import Ledger, note_pause, read_pauses
from replay_pipeline.types import RetryPolicy, TeacherAction, TeacherSpec

logger = logging.getLogger(__name__)


_DECREASE = 0.7
"""Fraction of the slots that stays when an endpoint asks for less."""
_COOLDOWN_S = 1.0
"""Seconds between two cuts."""
_POLL_S = 0.1


class Slots:
    """The number of calls in flight. It shrinks when an endpoint asks for less, and grows back.

    Additive increase, multiplicative decrease: a round of successes adds one slot, and a request to
    slow down removes a third, at most once per cooldown. Nothing is sent during a pause. Until
    `open` is called, at most `n_first` are in flight.
    """

    def __init__(self, size: int, *, n_first: int | None = None) -> None:
        self.size = size
        self.limit = float(size if n_first is None else min(size, n_first))
        self._is_open = n_first is None
        from anyio import CapacityLimiter  # noqa: PLC0415 (of the extra `replay`)

        self._limiter = CapacityLimiter(int(self.limit))
        self._last_cut = self._paused_until = float("-inf")

    @property
    def n_in_use(self) -> int:
        """Return how many slots are held."""
        return self._limiter.borrowed_tokens

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Wait for a slot, first come first served, and hold it."""
        async with self._limiter:
            while (pause_s := self._paused_until - time.perf_counter()) > 0:  # noqa: ASYNC110 (a stop ends it)
                await asyncio.sleep(min(pause_s, _POLL_S))
            yield

    def _allow(self, limit: float) -> None:
        self.limit = limit
        self._limiter.total_tokens = int(limit)

    def open(self) -> None:
        """Allow as many calls as there are slots. A second call has no effect."""
        if not self._is_open:
            self._is_open = True
            self._allow(self.size)

    def narrow(self, n_first: int) -> None:
        """Allow fewer calls, but at least one, until `open` is called."""
        if not self._is_open:
            self._allow(max(1, min(self.size, n_first)))

    def succeeded(self) -> None:
        """Add a fraction of a slot after a successful call."""
        if self._is_open:
            self._allow(min(self.size, self.limit + 1 / self.limit))

    def slow_down(self, pause_s: float | None) -> None:
        """Remove slots and pause, because the endpoint asks for it."""
        now = time.perf_counter()
        if pause_s:
            self._paused_until = max(self._paused_until, now + pause_s)
        if now - self._last_cut >= _COOLDOWN_S:
            self._last_cut = now
            self._allow(max(1.0, self.limit * _DECREASE))

    def resume(self) -> None:
        """End a pause, so that waiting calls see that the run was stopped."""
        self._paused_until = float("-inf")


_N_FIRST = 3
"""So many calls are in flight at most until an endpoint has sent a chat completion of the model that
was asked; and so many replies in a row that are none end it."""
_MOST_FRUITLESS = 20
"""After so many calls in a row that were lost, or met no such model, a teacher is asked no more."""
_LEASTMALFORMED = 10
"""From so many answers with calls that can't be read on, their share decides."""
_ANY = "*"
_CHOSEN_FOR_YOU = re.compile(r"^(openrouter/|@)")
"""Names under which a router picks a model itself."""


def is_model(teacher: TeacherSpec, answered: str | None, *, also: str | None = None) -> bool:
    """Return whether an answer comes from the requested model, by its name.

    Endpoints add a date, a size, or a folder to the name, and may reorder its words
    (`claude-sonnet-4.5` answers as `anthropic/claude-4.5-sonnet-20250929`). `also` is another name
    of the model.
    """
    asked = teacher.answers_as or teacher.model
    if not answered or asked == _ANY or _CHOSEN_FOR_YOU.match(asked):
        return True
    names = [asked] if also is None or teacher.answers_as else [asked, also]
    return any(_names(name, answered) for name in names)


def _names(asked: str, answered: str) -> bool:
    core = asked.partition(":")[0].rpartition("/")[2]
    return _words(core) <= _words(answered) or _joined(core) in _joined(answered)


def _words(name: str) -> set[str]:
    return {*re.findall(r"[a-z0-9]+", name.lower())} - {"latest"}


def _joined(name: str) -> str:
    return "".join(re.findall(r"[a-z0-9]+", name.lower()))


@dataclass(kw_only=True)
class Dispatcher:
    """The sender of all calls of a run. It holds the slots, the endpoints, and the stop signal.

    The slots of a teacher stay few until its endpoint has shown that it serves the intended model.
    """

    ledger: Ledger
    client: Client
    keys: Mapping[str, SecretStr | None]
    retry: RetryPolicy
    stop: threading.Event
    total: Slots
    """The slots that all teachers share."""
    prices: Mapping[str, Price]
    """Price by teacher. It may contain another name of the model."""
    stopped_teachers: dict[str, Failure] = field(default_factory=dict)
    _slots: dict[str, Slots] = field(default_factory=dict)
    _met: set[str] = field(default_factory=set)
    _n_wrong: Counter[str] = field(default_factory=Counter)
    _n_fruitless: Counter[str] = field(default_factory=Counter)
    """Replies in a row that were lost, or met no such model, by teacher."""
    _n_answers: Counter[str] = field(default_factory=Counter)
    _n_malformed: Counter[str] = field(default_factory=Counter)

    def slots(self, teacher: TeacherSpec) -> Slots:
        """Return the slots of a teacher."""
        if teacher.name not in self._slots:
            self._slots[teacher.name] = Slots(teacher.max_concurrency, n_first=_N_FIRST)
        return self._slots[teacher.name]

    def reason_not_to_send(self, teacher: TeacherSpec) -> str | None:
        """Return why no more calls go to a teacher, or None while they do."""
        if self.stop.is_set():
            return "stopped"
        return "teacher_stopped" if teacher.name in self.stopped_teachers else None

    def meet(self, teacher: TeacherSpec, outcome: Answer | Failure) -> Failure | None:
        """Check which model answered, and stop the teacher if it is the wrong one.

        Returns:
            What is wrong with the reply if no chat endpoint or another model sent it.
        """
        name, wrong = teacher.name, None
        self._tally(teacher, outcome)
        if isinstance(outcome, Failure):
            if outcome.code != NO_COMPLETION:
                return None
            wrong = outcome
        elif name not in self._met and not self.is_asked(teacher, outcome.model):
            told = (
                f"{teacher.model} was asked, and the answer is of {outcome.model}; check address and "
                "model, or set the teacher's answers_as to that name"
            )
            wrong = Failure(OTHER_MODEL, told)
        if wrong is None:
            self._n_wrong[name] = 0
            self._met.add(name)
            self._slots[name].open()
            return None
        self._n_wrong[name] += 1
        # With those that are in flight it makes no more than were let go at first.
        self._slots[name].narrow(_N_FIRST - self._n_wrong[name])
        if self._n_wrong[name] >= _N_FIRST:
            self.stop_teacher(teacher, wrong)
        return wrong

    def is_asked(self, teacher: TeacherSpec, answered: str | None) -> bool:
        """Return whether an answer comes from the requested model, by its name."""
        price = self.prices.get(teacher.name)
        return is_model(teacher, answered, also=price.canonical_slug if price else None)

    def _tally(self, teacher: TeacherSpec, outcome: Answer | Failure) -> None:
        """Stop a teacher whose calls come to nothing, or whose answers can't be read."""
        name = teacher.name
        if isinstance(outcome, Answer):
            self._n_fruitless[name] = 0
            self._n_answers[name] += 1
            self._n_malformed[name] += outcome.error_code in MALFORMED
            n, n_answers = self._n_malformed[name], self._n_answers[name]
            if n >= _LEASTMALFORMED and 2 * n > n_answers:
                told = (
                    f"{n} of {n_answers} answers hold calls that can't be read: serve the model with "
                    f"the parser of its own calls ({outcome.error_message})"
                )
                self.stop_teacher(teacher, Failure("malformed_call", told))
        elif outcome.may_be_paid or outcome.code in ("not_found", "unreachable"):
            self._n_fruitless[name] += 1
            if self._n_fruitless[name] >= _MOST_FRUITLESS:
                told = f"{_MOST_FRUITLESS} calls in a row came to nothing: {outcome.message}"
                self.stop_teacher(teacher, replace(outcome, message=told))

    def stop_teacher(self, teacher: TeacherSpec, failure: Failure) -> None:
        """Stop asking a teacher for the rest of this run."""
        if teacher.name not in self.stopped_teachers:
            self.stopped_teachers[teacher.name] = failure
            logger.error("%s is not asked again in this run: %s", teacher.name, failure.message)

    def pause(self, teacher: TeacherSpec, failure: Failure) -> None:
        """Stop asking a teacher until its endpoint lifts a limit, in this run and in later ones."""
        until = datetime.now(UTC) + timedelta(seconds=failure.retry_after_s or 0.0)
        name, why = self._pause_of(teacher), failure.message
        self.ledger.do(lambda database: note_pause(database, name, until, why))
        self.stop_teacher(teacher, replace(failure, message=_goes_on(until, why)))

    async def recall_pauses(self, teachers: Iterable[TeacherSpec]) -> None:
        """Stop the teachers whose endpoints told an earlier run to come back later than now."""
        noted = await asyncio.wrap_future(self.ledger.do(read_pauses))
        for teacher in teachers:
            if found := noted.get(self._pause_of(teacher)):
                until, _, why = found.partition(" ")
                told = _goes_on(datetime.fromisoformat(until), why)
                self.stop_teacher(teacher, Failure("rate_limited", told))

    def _pause_of(self, teacher: TeacherSpec) -> str:
        """Name the limit of a model at an endpoint: another key has another one."""
        key = self.keys.get(teacher.name)
        whose = f"{teacher.base_url} {teacher.model} {key.get_secret_value() if key else ''}"
        return f"pause:{hashlib.blake2b(whose.encode(), digest_size=8).hexdigest()}"

    def resume(self) -> None:
        """Wake everything that waits for a slot, so that it sees that the run was stopped."""
        for slots in (self.total, *self._slots.values()):
            slots.resume()

    async def wait(self, seconds: float) -> None:
        """Wait for some seconds, or until the run is stopped."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            if self.stop.is_set():
                return
            await asyncio.sleep(min(left, _POLL_S))


def _goes_on(until: datetime, why: str) -> str:
    here = until.astimezone()
    days = (here.date() - datetime.now().astimezone().date()).days
    day = {0: "", 1: " tomorrow"}.get(days, f" on {here:%Y-%m-%d}")
    return f"{why}; it goes on at {here:%H:%M}{day}"


class _FreeFailure(Exception):  # noqa: N818 (a signal to tenacity, never seen outside)
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Attempts:
    """One reservation and the attempts made under it. `bound_nano` is the most that one can cost by the price list."""

    reserved: Reserved
    """Once money is reserved."""
    reply: Reply
    """Once a call was sent."""

    def __init__(
        self, dispatcher: Dispatcher, task: LaneQuestion, body: bytes, new: NewCall, bound_nano: int
    ) -> None:
        self.dispatcher = dispatcher
        self.task = task
        self.body = body
        self.new = new
        self.bound_nano = bound_nano
        self.wrong: Failure | None = None
        self.n_attempts = 0
        self.latency_s = 0.0
        self.sent_by = datetime.max.replace(tzinfo=UTC)
        self._not_sent: str | None = None

    async def make(self) -> Known | InDoubt | str | None:
        """Send until there is an outcome, or return why nothing was sent.

        Only failures that surely cost nothing are retried. Money is reserved before a slot is taken. So
        a call in a slot waits only for the endpoint, and calls that wait for money can't block calls
        that hold it.
        """
        found = await asyncio.wrap_future(self.dispatcher.ledger.reserve(self.new))
        if isinstance(found, Refused):
            return "stopped" if found.scope == "stopped" else "budget"
        if not isinstance(found, Reserved):
            return found
        self.reserved, self.sent_by = found, found.sent_by or self.sent_by
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.dispatcher.retry.max_attempts),
            retry=retry_if_exception_type(_FreeFailure),
            wait=self._wait_s,
            sleep=self.dispatcher.wait,
            reraise=True,
        )
        with suppress(_FreeFailure):
            await retrying(self._attempt)
        return self._not_sent

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
        own = dispatcher.slots(teacher)
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
            dialect = dialect_of(teacher)
            self.reply = await dispatcher.client.complete(
                teacher.base_url,
                self.body,
                dialect=dialect,
                headers=dialect.headers(),
                key=dispatcher.keys[teacher.name],
                timeout_s=teacher.timeout_s,
                on_sent=self._has_left,
            )
            self.latency_s = clock() - start
            self.wrong = dispatcher.meet(teacher, self.reply.outcome)
        outcome = self.reply.outcome
        if isinstance(outcome, Answer):
            own.succeeded()
            return
        if (outcome.retry_after_s or 0.0) > dispatcher.retry.longest_pause_s:
            dispatcher.pause(teacher, outcome)
            return
        if outcome.slows_down:
            own.slow_down(outcome.retry_after_s)
        if outcome.is_retryable and not outcome.may_be_paid:
            raise _FreeFailure(outcome)

    def _leaves_now(self) -> "Future[None]":
        """Record in the ledger that the call leaves later than it says: its limit counts from then on."""
        self.sent_by = datetime.now(UTC) + self.new.slack
        return self.dispatcher.ledger.sending(self.reserved.call_id, self.sent_by)

    def _has_left(self) -> None:
        if datetime.now(UTC) > self.sent_by:
            self._leaves_now()

    async def _withdraw(self, reason: str) -> None:
        """Return a reservation that no request was sent for."""
        # What was taken over from lost calls is still theirs.
        state = "unknown" if self.new.takes_over else "withdrawn"
        settlement = Settlement(call_id=self.reserved.call_id, state=state)
        await asyncio.wrap_future(self.dispatcher.ledger.settle(settlement))
        self._not_sent = reason


_MOST_KEPT_BYTES = 1 << 20
"""Of a reply that could not be used, no more than this is kept in the ledger."""
_MOST_OVERRUN = 8.0
"""No more than this many times its bound is reserved for a call, whatever others have cost."""


@dataclass(kw_only=True)
class Books:
    """The bookkeeper of a run. It settles calls, and reserves more if a provider overcharges."""

    ledger: Ledger
    client: Client
    keys: Mapping[str, SecretStr | None]
    prices: Mapping[str, Price]
    newly_spent_nano: int = 0
    n_disputed: int = 0
    n_found_out: int = 0
    """Lost calls whose outcome is known by now, so that their reserved money is free again."""
    newly_learned: dict[str, Learned] = field(default_factory=dict)
    _ratios: dict[str, float] = field(default_factory=dict)
    _without_cache: set[str] = field(default_factory=set)

    def bound_nano(self, task: LaneQuestion) -> int:
        """Return the most that a call for a question can cost, by the price list."""
        price = self.prices[task.teacher.name]
        return price.bound_nano(task.bound_tokens(), task.question.max_completion_tokens)

    def reserved_nano(self, teacher: TeacherSpec, bound_nano: int) -> int:
        """Return the reservation of a call. It is above the bound if earlier calls cost more than theirs."""
        return round(bound_nano * self._ratios.get(teacher.name, 1.0))

    def takes_over(self, task: LaneQuestion, body_sha: str) -> bool:
        """Return whether a repeated question may use the money that its lost calls hold.

        A router that itself failed during a call may have charged for it without keeping the
        answer. If only the caller died, the router has the answer.
        """
        went_on = all(lost.was_left_alone for lost in task.lost)
        return bool(task.lost) and went_on and self.keeps_answers(task, body_sha)

    def keeps_answers(self, task: LaneQuestion, body_sha: str) -> bool:
        """Return whether the endpoint charges lost calls and their repetitions only once.

        OpenRouter keeps the answer to an equal request (`X-OpenRouter-Cache`) for as long as asked.
        So only the first call is charged or, if that failed, the second. It compares requests byte
        by byte. If the bytes changed, for example with a price, the second call is a new one.
        """
        oldest = min((lost.sent_at for lost in task.lost), default=datetime.now(UTC))
        return (
            dialect_of(task.teacher).name == "openrouter"
            and task.teacher.base_url not in self._without_cache
            and all(lost.body_sha in (None, body_sha) for lost in task.lost)
            and datetime.now(UTC) - oldest < timedelta(seconds=KEPT_S)
        )

    async def find_out(self, task: LaneQuestion, body_sha: str) -> TeacherAction | None:
        """Settle the lost calls of a question as far as possible, and return the row of the last."""
        row: TeacherAction | None = None
        left, keeps = [], self.keeps_answers(task, body_sha)
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
            self.n_found_out += 1
            settlement = settled_lost(lost, cost)
            await asyncio.wrap_future(self.ledger.settle(settlement))
            row = decode_row(settlement.row or b"")
        task.lost = tuple(left)
        return row

    async def lose(
        self, task: LaneQuestion, call: Attempts, failure: Failure
    ) -> tuple[LostCall, ...]:
        """Book a call with an unknown outcome at its full reservation, and return all lost calls."""
        logger.warning("%s: %s", task.teacher.name, failure.message)
        settlement = Settlement(
            call_id=call.reserved.call_id,
            state="unknown",
            n_attempts=call.n_attempts,
            error_code=failure.code,
            generation_id=failure.generation_id,
            sent_at=call.reply.sent_at,
            response=call.reply.body[:_MOST_KEPT_BYTES],
        )
        await asyncio.wrap_future(self.ledger.settle(settlement))
        found = await asyncio.to_thread(self.ledger.lookup, [task.question.sha])
        return found.lost.get(task.question.sha, ())

    async def keep_unread(
        self, task: LaneQuestion, call: Attempts, error: Exception
    ) -> TeacherAction:
        """Book a reply that this program can't read, for good, and keep its bytes."""
        outcome, most = call.reply.outcome, call.reserved.reserved_nano
        cost = outcome.usage.cost_nano if isinstance(outcome, Answer) else None
        if cost is None or cost > _MOST_OVERRUN * most:
            cost = most
        row = answer_row(task, cost_usd=usd(cost), finish_reason="error", **unexpected(error))
        settlement = Settlement(
            call_id=call.reserved.call_id,
            state="answered",
            cost_nano=cost,
            error_code=row.error_code,
            row=encode_row(row),
            response=call.reply.body[:_MOST_KEPT_BYTES],
        )
        await asyncio.wrap_future(self.ledger.settle(settlement))
        self.newly_spent_nano += cost
        return row

    async def settle(
        self, task: LaneQuestion, call: Attempts, outcome: Answer | Failure
    ) -> TeacherAction:
        """Book a call whose outcome is known, and return its row."""
        made: dict[str, Any] = {"n_attempts": call.n_attempts, "latency_s": call.latency_s}
        takes_over, cost = call.new.takes_over, 0
        if isinstance(outcome, Failure):
            row = failed_row(task, outcome, **made)
            settlement = Settlement(
                call_id=call.reserved.call_id,
                # It says nothing of the lost calls whose reservation this one took over.
                state="unknown" if takes_over else "failed",
                is_lasting=outcome.is_lasting,
                error_code=None if takes_over else row.error_code,
            )
        else:
            verdict = await self._verdict(task, call, outcome)
            cost = verdict.cost_nano
            action = with_recorded_names(outcome.action, task.state)
            outcome = checked(task, replace(outcome, action=action), call.wrong)
            is_asked = call.dispatcher.is_asked(task.teacher, outcome.model)
            row = by_its_model(answered_row(task, outcome, cost, **made), is_asked=is_asked)
            if not outcome.is_replayed and call.wrong is None:
                task.n_read_tokens = plausible(task, outcome.usage.n_prompt_tokens)
                self._count(task, row, outcome, len(call.reply.body))
            recovers = task.lost if outcome.is_replayed and not takes_over else ()
            settlement = Settlement(
                call_id=call.reserved.call_id,
                state="answered",
                cost_nano=cost,
                error_code=row.error_code,
                disputed=verdict.disputed,
                recovers=tuple(lost.call_id for lost in recovers),
            )
            self._tell(task, verdict)
        is_whole = row.error_code is None
        settlement = replace(
            settlement,
            n_attempts=call.n_attempts,
            row=encode_row(row),
            response=call.reply.body if is_whole else call.reply.body[:_MOST_KEPT_BYTES],
            generation_id=row.generation_id,
        )
        await asyncio.wrap_future(self.ledger.settle(settlement))
        self.newly_spent_nano += cost
        self.n_found_out += bool(task.lost)
        self._learn(task, call, cost)
        return row

    def _tell(self, task: LaneQuestion, verdict: BookedCost) -> None:
        if verdict.disputed:
            self.n_disputed += 1
            told = f"{verdict.disputed}; the call is booked at ${usd(verdict.cost_nano):.6f}"
            logger.warning("%s: %s", task.teacher.name, told)

    async def _verdict(self, task: LaneQuestion, call: Attempts, answer: Answer) -> BookedCost:
        """Find what an answer cost, together with the lost calls it stands for."""
        price, limit = self.prices[task.teacher.name], task.question.max_completion_tokens
        if answer.is_replayed and dialect_of(task.teacher).name == "openrouter":
            if not task.lost:
                return BookedCost(cost_nano=0)
            held = max(lost.reserved_nano for lost in task.lost)
            if (paid := await self._recorded_cost(task.teacher, answer, held)) is not None:
                return BookedCost(cost_nano=paid)
            bound = replayed_bound(answer, task.question.size, price=price, n_limit=limit)
            told = "from the router's cache, which has no record of what the answer had cost"
            return BookedCost(cost_nano=min(bound, held), disputed=told)
        verdict = judged(
            answer, task.question.size, price=price, bound_nano=call.reserved.reserved_nano,
            n_limit=limit, n_reply_bytes=len(call.reply.body),
        )  # fmt: skip
        if call.new.takes_over and not call.reply.has_cache:
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

    def _learn(self, task: LaneQuestion, call: Attempts, cost: int) -> None:
        """Report where a provider charged more than can be, reserve more for its next calls.

        The factor is what the dearest call cost over its plain bound, never over a reservation
        that held the factor already: that would compound over the calls in flight.
        """
        if cost <= call.reserved.reserved_nano:
            return
        name, factor = task.teacher.name, cost / max(1, call.bound_nano)
        self._ratios[name] = min(_MOST_OVERRUN, max(self._ratios.get(name, 1.0), factor * 1.05))
        logger.warning(
            "%s: a call cost $%.6f, more than its bound of $%.6f; its full cost is booked",
            name, usd(cost), usd(call.bound_nano),
        )  # fmt: skip

    def _count(self, task: LaneQuestion, row: TeacherAction, answer: Answer, n_bytes: int) -> None:
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

    def count_looks(self, step: LaneQuestion, row: TeacherAction) -> None:
        """Learn how often a teacher looks before it acts, from a question that was asked to its end."""
        if step.then is not None or row.error_code is not None:
            return
        n_first = (step.first or step).n_read_tokens or 0
        n_added = max(0, (step.n_read_tokens or 0) - n_first) if n_first else 0
        name = step.teacher.name
        before = self.newly_learned.get(name, Learned())
        self.newly_learned[name] = before.with_looks(len(step.looks), n_added)
