"""Ask by batch: half the price, within a day, in no order.

For what needs no order: short states, states of many sessions, a second pass. Long sessions are
cheaper in lanes, since a batch reads nothing from the prompt cache.

A batch is known to the ledger before its answers are, so a run that is stopped or killed finds it
again and takes its answers over.
"""

import asyncio
import logging
import math
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.replay.asking import Asking, ReplayOptions, check, fetch_prices, keys_of
from replay_pipeline.replay.database import Database
from replay_pipeline.replay.engine import Task, row_of
from replay_pipeline.replay.ledger import (
    BATCH_KEY,
    Known,
    Ledger,
    NewCall,
    Refused,
    Reserved,
    Settlement,
    encode_row,
)
from replay_pipeline.replay.openrouter import Client
from replay_pipeline.replay.prices import floor_nano, nano, usd
from replay_pipeline.replay.replies import Answer, read_reply
from replay_pipeline.replay.requests import RequestBuilder, dialect_of
from replay_pipeline.replay.run import drained, indexed, lanes_of
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.types import ReplayReport, TeacherAction, TeacherSpec, TraceState

logger = logging.getLogger(__name__)

MAX_BATCH_CALLS = 1000
_FINAL = ("completed", "failed", "expired", "cancelled")
_ROW = msgspec.json.Decoder(TeacherAction)


class _Pending(msgspec.Struct):
    """A batch that was handed in: which call each of its answers settles."""

    batch_id: str
    base_url: str
    teacher: str
    calls: dict[str, int]
    """Request hash to call."""


def replay_batch(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    ledger: str | Path | None = None,
    poll_s: float = 30.0,
    stop: threading.Event | None = None,
    **options: Unpack[ReplayOptions],
) -> ReplayReport:
    """Replay states by batch API, for at most `max_total_usd`, and wait for the answers.

    Answers in the ledger are not asked again, those of a batch that is still running included.
    Setting `stop`, or an interrupt, ends the waiting; what was handed in goes on, and the next
    run takes its answers. Works with and without an event loop.

    Args:
        states: decision points, in any order.
        teachers: models at endpoints with a batch API (OpenRouter).
        max_total_usd: hard ceiling in US dollars; reserved at half the price of single calls.
        ledger: as for `replay_states`.
        poll_s: seconds between two looks at a running batch.
        stop: set it from any thread to stop waiting.
        options: how to ask, see `Asking`; gates do not apply.

    Raises:
        ConfigError: a teacher or option is wrong; raised before any cost.
        PriceError: a teacher's price is not known; raised before any cost.
        TeacherError: an endpoint did not take a batch, or can't be reached.
    """
    asking = Asking.of(**options)
    limit_nano = check(teachers, max_total_usd, asking)
    for teacher in teachers:
        if dialect_of(teacher) != "openrouter":
            raise ConfigError(f"teacher {teacher.name}: its endpoint has no batch API")
    stop = stop or threading.Event()
    url = str(ledger or Settings.load().ledger_url())
    with Ledger(url, is_durable=asking.is_durable) as opened:
        run = _BatchRun(indexed(states), teachers, limit_nano, asking, opened, poll_s)
        return drained(run.run(stop), stop)


class _BatchRun:
    def __init__(
        self,
        states: Sequence[TraceState],
        teachers: Sequence[TeacherSpec],
        limit_nano: int,
        asking: Asking,
        ledger: Ledger,
        poll_s: float,
    ) -> None:
        self.states = states
        self.teachers = {teacher.name: teacher for teacher in teachers}
        self.limit_nano = limit_nano
        self.asking = asking
        self.ledger = ledger
        self.poll_s = poll_s
        self.run_id = asking.run_id or uuid.uuid4().hex[:12]
        self.day = f"day:{datetime.now(UTC):%Y-%m-%d}"
        self.n_sent = 0
        self.n_skipped = 0
        self.newly_spent = 0
        lanes = lanes_of(states, teachers, asking)
        self.tasks = sorted((task for _, lane in lanes for task in lane), key=lambda t: t.index)
        self.by_sha = {task.question.sha: task for task in self.tasks}

    async def run(self, stop: threading.Event) -> ReplayReport:
        self.keys = keys_of(list(self.teachers.values()))
        async with Client(max_connections=8) as client:
            await self._collect(client, await self._pending(), stop)
            known, _ = await asyncio.to_thread(self.ledger.lookup, self.by_sha)
            n_cached = len(known)
            missing = [task for sha, task in self.by_sha.items() if sha not in known]
            running = {sha for each in await self._pending() for sha in each.calls}
            missing = [task for task in missing if task.question.sha not in running]
            if missing and self.limit_nano and not stop.is_set():
                prices = await fetch_prices(
                    list(self.teachers.values()), self.asking, keys=self.keys
                )
                await asyncio.to_thread(self._open_scopes, known)
                for teacher in self.teachers.values():
                    mine = [task for task in missing if task.teacher.name == teacher.name]
                    await self._submit(client, teacher, mine, prices[teacher.name])
                await self._collect(client, await self._pending(), stop)
            else:
                self.n_skipped = len(missing)
        known, _ = await asyncio.to_thread(self.ledger.lookup, self.by_sha)
        return self._report(known, n_cached, stop)

    def _open_scopes(self, known: Mapping[str, Known]) -> None:
        limits = self.asking.limits_nano(self.teachers)
        day = self.asking.limits_usd.get("day")
        limits[self.day] = None if day is None else floor_nano(day)
        self.ledger.open_scopes(limits)
        carried = sum(each.cost_nano for each in known.values())
        self.ledger.open_run(self.run_id, self.limit_nano, carried_nano=carried)

    async def _pending(self) -> list[_Pending]:
        def read(database: Database) -> list[_Pending]:
            rows = database.query("select value from ledger where key like ?", (f"{BATCH_KEY}%",))
            return [msgspec.json.decode(value, type=_Pending) for (value,) in rows]

        found = await asyncio.wrap_future(self.ledger.do(read))
        return [each for each in found if each.teacher in self.teachers]

    async def _submit(
        self, client: Client, teacher: TeacherSpec, tasks: list[Task], price: Any
    ) -> None:
        builder = RequestBuilder(self.asking.request_options())
        for start in range(0, len(tasks), MAX_BATCH_CALLS):
            calls: dict[str, int] = {}
            requests = []
            for task in tasks[start : start + MAX_BATCH_CALLS]:
                reserved = await self._reserve(task, price)
                if reserved is None:
                    self.n_skipped += 1
                    continue
                calls[task.question.sha] = reserved.call_id
                body = builder.body(task.state, teacher, price)
                requests.append({"custom_id": task.question.sha, "body": msgspec.Raw(body)})
            if requests:
                # The endpoint wants these fields in this order.
                batch = {
                    "endpoint": "/v1/chat/completions",
                    "model": teacher.model,
                    "requests": requests,
                }
                await self._hand_in(client, teacher, msgspec.json.encode(batch), calls)

    async def _hand_in(
        self, client: Client, teacher: TeacherSpec, body: bytes, calls: dict[str, int]
    ) -> None:
        batch_id = await client.submit_batch(teacher.base_url, body, self.keys[teacher.name])
        pending = _Pending(batch_id, teacher.base_url, teacher.name, calls)

        def note(database: Database) -> None:
            database.query(
                "insert into ledger(key, value) values(?, ?)",
                (BATCH_KEY + batch_id, msgspec.json.encode(pending).decode()),
            )

        await asyncio.wrap_future(self.ledger.do(note))
        self.n_sent += len(calls)
        logger.info("%s: %d calls handed in as %s", teacher.name, len(calls), batch_id)

    async def _reserve(self, task: Task, price: Any) -> Reserved | None:
        question = task.question
        bound = price.bound_nano(question.prompt_bound_tokens, question.max_completion_tokens)
        future = self.ledger.reserve(
            NewCall(
                request_sha=question.sha,
                state_id=question.state_id,
                teacher=question.teacher,
                model=task.teacher.model,
                run_id=self.run_id,
                scopes=(
                    f"run:{self.run_id}",
                    self.day,
                    f"teacher:{question.teacher}",
                    *self.asking.scopes(),
                ),
                reserved_nano=-(-bound // 2),
                is_patient=False,
            )
        )
        result = await asyncio.wrap_future(future)
        return None if isinstance(result, Known | Refused) else result

    async def _collect(
        self, client: Client, pending: list[_Pending], stop: threading.Event
    ) -> None:
        """Wait for batches and settle their answers."""
        while pending:
            still = []
            for each in pending:
                batch = await client.read_batch(
                    each.base_url, each.batch_id, self.keys[each.teacher]
                )
                if batch.get("status") in _FINAL:
                    await self._settle(each, batch)
                else:
                    still.append(each)
            pending = still
            waited = 0.0
            while pending and waited < self.poll_s:
                if stop.is_set():
                    return
                await asyncio.sleep(min(0.2, self.poll_s))
                waited += 0.2

    async def _settle(self, pending: _Pending, batch: Mapping[str, Any]) -> None:
        results = {
            str(item.get("custom_id")): item
            for item in batch.get("results") or []
            if isinstance(item, dict)
        }
        if not pending.calls.keys() <= self.by_sha.keys():
            logger.info("%s holds answers to other states; it is left to a run over those",
                        pending.batch_id)  # fmt: skip
            return
        read = {sha: _outcome(results.get(sha), batch) for sha in pending.calls}
        costs = _shared_out(batch, read)
        futures = []
        for sha, call_id in pending.calls.items():
            outcome, body = read[sha]
            row = row_of(self.by_sha[sha], outcome, costs[sha])
            futures.append(
                self.ledger.settle(
                    Settlement(
                        call_id=call_id,
                        state="answered" if isinstance(outcome, Answer) else "failed",
                        cost_nano=costs[sha],
                        error_code=row.error_code,
                        row=encode_row(row),
                        response=body,
                    )
                )
            )
            self.newly_spent += costs[sha]
        for future in futures:
            await asyncio.wrap_future(future)
        done = (BATCH_KEY + pending.batch_id,)
        await asyncio.wrap_future(
            self.ledger.do(
                lambda database: database.query("delete from ledger where key = ?", done)
            )
        )

    def _report(
        self, known: Mapping[str, Known], n_cached: int, stop: threading.Event
    ) -> ReplayReport:
        actions = [
            replace(_ROW.decode(known[task.question.sha].row), state_id=task.state_id)
            for task in self.tasks
            if task.question.sha in known
        ]
        paid = {task.question.sha: known[task.question.sha].cost_nano
                for task in self.tasks if task.question.sha in known}  # fmt: skip
        return ReplayReport(
            actions=actions,
            n_states=len(self.states),
            n_sent=self.n_sent,
            n_cached=n_cached,
            spent_usd=usd(sum(paid.values())),
            newly_spent_usd=usd(self.newly_spent),
            max_total_usd=usd(self.limit_nano),
            stop_reason="stopped" if stop.is_set() else "budget" if self.n_skipped else "completed",
            skipped={"budget": self.n_skipped} if self.n_skipped else {},
        )


def _outcome(item: Mapping[str, Any] | None, batch: Mapping[str, Any]) -> tuple[Any, bytes]:
    """One result, read like the reply to a single call."""
    item = item or {"error": {"message": f"the batch {batch.get('status')} without an answer"}}
    response = item.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        body = msgspec.json.encode(response["body"])
        return read_reply(int(response.get("status_code") or 200), {}, body), body
    error = item.get("error") or {}
    body = msgspec.json.encode(
        {"error": {"code": 500, "message": error.get("message"),
                   "metadata": {"error_type": error.get("error_type") or "server"}}}
    )  # fmt: skip
    return read_reply(500, {}, body), body


def _shared_out(batch: Mapping[str, Any], read: Mapping[str, tuple[Any, bytes]]) -> dict[str, int]:
    """The cost of a batch, shared out to its answers by their tokens, to the nano-dollar."""
    usage = batch.get("usage") or {}
    total = nano(round(float(usage.get("cost") or 0.0), 12))
    weights = {
        sha: (answer.n_prompt_tokens or 1) + 4 * (answer.n_completion_tokens or 1)
        if isinstance(answer, Answer)
        else 0
        for sha, (answer, _) in read.items()
    }
    whole = math.fsum(weights.values()) or 1.0
    costs = {sha: int(total * weight / whole) for sha, weight in weights.items()}
    if paying := [sha for sha, weight in weights.items() if weight]:
        costs[paying[0]] += total - sum(costs.values())
    return costs
