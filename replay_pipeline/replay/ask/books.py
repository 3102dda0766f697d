"""Settle each call with the ledger once, and learn from what it cost."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import SecretStr

from replay_pipeline.replay.ask.attempts import Attempts
from replay_pipeline.replay.ask.outcomes import (
    answer_row,
    answered_row,
    checked,
    failed_row,
    plausible,
    unexpected,
)
from replay_pipeline.replay.buy.tasks import LaneQuestion
from replay_pipeline.replay.dialects import dialect_of
from replay_pipeline.replay.dialects.client import Client, Reply
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.replies import Answer, Failure
from replay_pipeline.replay.dialects.requests import with_recorded_names
from replay_pipeline.replay.dialects.sizes import Learned
from replay_pipeline.replay.money.bills import BookedCost, judged, replayed_bound, token_problem
from replay_pipeline.replay.money.calls import (
    LostCall,
    Reserved,
    Settlement,
    decode_row,
    encode_row,
    settled_lost,
)
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import TeacherAction, TeacherSpec

logger = logging.getLogger(__name__)

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
    kept_s: float
    """How long the router was asked to keep an answer for a free re-send."""
    newly_spent_nano: int = 0
    n_overruns: int = 0
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
            and datetime.now(UTC) - oldest < timedelta(seconds=self.kept_s)
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
        self, task: LaneQuestion, call: Attempts, reserved: Reserved, failure: Failure
    ) -> tuple[LostCall, ...]:
        """Book a call with an unknown outcome at its full reservation, and return all lost calls."""
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
        return found.lost.get(task.question.sha, ())

    async def keep_unread(
        self, task: LaneQuestion, reply: Reply, reserved: Reserved, error: Exception
    ) -> TeacherAction:
        """Book a reply that this program can't read, for good, and keep its bytes."""
        usage = reply.outcome.usage if isinstance(reply.outcome, Answer) else None
        cost = usage.cost_nano if usage else None
        if cost is None or cost > _MOST_OVERRUN * reserved.reserved_nano:
            cost = reserved.reserved_nano
        row = answer_row(
            task,
            cost_usd=usd(cost),
            finish_reason="error",
            **unexpected(error),
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
        return row

    async def settle(
        self, task: LaneQuestion, call: Attempts, reserved: Reserved, outcome: Answer | Failure
    ) -> TeacherAction:
        """Book a call whose outcome is known, and return its row."""
        assert call.reply is not None
        made: dict[str, Any] = {"n_attempts": call.n_attempts, "latency_s": call.latency_s}
        takes_over, cost = call.new.takes_over, 0
        if isinstance(outcome, Failure):
            row = failed_row(task, outcome, **made)
            settlement = Settlement(
                call_id=reserved.call_id,
                # It says nothing of the lost calls whose reservation this one took over.
                state="unknown" if takes_over else "failed",
                is_lasting=outcome.is_lasting,
                error_code=None if takes_over else row.error_code,
            )
        else:
            verdict = await self._verdict(task, call, outcome, reserved)
            cost = verdict.cost_nano
            action = with_recorded_names(outcome.action, task.state)
            outcome = checked(task, replace(outcome, action=action), call.wrong)
            row = answered_row(task, outcome, cost, **made)
            if not outcome.is_replayed and call.wrong is None:
                task.n_read_tokens = plausible(task, outcome.usage.n_prompt_tokens)
                self._count(task, row, outcome, len(call.reply.body))
            recovers = task.lost if outcome.is_replayed and not takes_over else ()
            settlement = Settlement(
                call_id=reserved.call_id,
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
        self._learn(task, call, cost, reserved)
        return row

    def _tell(self, task: LaneQuestion, verdict: BookedCost) -> None:
        if verdict.disputed:
            self.n_disputed += 1
            told = f"{verdict.disputed}; the call is booked at its bound"
            logger.warning("%s: %s", task.teacher.name, told)

    async def _verdict(
        self, task: LaneQuestion, call: Attempts, answer: Answer, reserved: Reserved
    ) -> BookedCost:
        """Find what an answer cost, together with the lost calls it stands for."""
        assert call.reply is not None
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
            answer, task.question.size, price=price, bound_nano=reserved.reserved_nano,
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

    def _learn(self, task: LaneQuestion, call: Attempts, cost: int, reserved: Reserved) -> None:
        """Report where a provider charged more than can be, reserve more for its next calls.

        The factor is what the dearest call cost over its plain bound, never over a reservation
        that held the factor already: that would compound over the calls in flight.
        """
        if cost <= reserved.reserved_nano:
            return
        self.n_overruns += 1
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
