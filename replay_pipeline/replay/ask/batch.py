"""Ask by batch: half the price, within a day, in no order.

Use it where order doesn't matter: short states, states of many sessions, a second pass. Long
sessions are cheaper one state after the other, because a batch gets no prompt-cache hits.

The ledger notes a batch before it is submitted, under a key that the batch carries. If the process
dies in between, the next one finds the batch at the provider by that key, so no batch is submitted
twice.
"""

import asyncio
import logging
import math
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import msgspec

from replay_pipeline.errors import ConfigError, TeacherResponseError
from replay_pipeline.replay.ask.asking import (
    Asking,
    AskingOptions,
    checked_ceiling,
    today,
)
from replay_pipeline.replay.ask.outcomes import answered_row, failed_row
from replay_pipeline.replay.ask.run import drained, indexed, lanes_of
from replay_pipeline.replay.buy.tasks import LaneQuestion
from replay_pipeline.replay.dialects import dialect_of
from replay_pipeline.replay.dialects.client import Client
from replay_pipeline.replay.dialects.endpoints import teacher_keys
from replay_pipeline.replay.dialects.prices import Price, nano, usd
from replay_pipeline.replay.dialects.replies import Answer, Failure, read_reply
from replay_pipeline.replay.dialects.requests import Question, RequestBuilder, with_recorded_names
from replay_pipeline.replay.dialects.sizes import Size
from replay_pipeline.replay.money.calls import (
    Known,
    LedgerEntries,
    NewCall,
    Reserved,
    Settlement,
    decode_row,
    encode_row,
)
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.replay.money.lookups import BATCH_KEY
from replay_pipeline.replay.money.schema import Database
from replay_pipeline.settings import DEFAULT_TEACHERS, Settings
from replay_pipeline.types import ReplayReport, TeacherAction, TeacherSpec, TraceState

logger = logging.getLogger(__name__)

MAX_BATCH_CALLS = 1000
_WINDOW_S = 24 * 3600.0
"""A batch is answered within so long, or never."""
_MOST_ABOVE, _MOST_BELOW = 8, 2000
"""A batch costs at most this many times its bound, and at least this fraction of it."""
_FINAL = ("completed", "failed", "expired", "cancelled")


class _Pending(msgspec.Struct):
    """A batch that was handed in, or is about to be: which call each of its answers settles."""

    base_url: str
    teacher: str
    calls: dict[str, int]
    """Request hash to call."""
    batch_id: str | None = None
    """How the provider calls it; `None` until it has said so."""
    key: str = ""
    """How the note calls it; batches of version 0.1.0 go by the provider's name."""
    family: str | None = None
    is_distillable: bool | None = None

    @property
    def name(self) -> str:
        return BATCH_KEY + (self.key or self.batch_id or "")


class _LedgerCall(msgspec.Struct):
    """What the ledger keeps of a call in a batch."""

    id: int
    state_id: str
    model: str
    state: str
    reserved: int


def replay_batch(
    states: Iterable[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    *,
    max_total_usd: float,
    ledger: str | Path | None = None,
    poll_s: float = 30.0,
    stop: threading.Event | None = None,
    **options: Unpack[AskingOptions],
) -> ReplayReport:
    """Replay states by the batch API, for at most `max_total_usd`, and wait for the answers.

    A question that is answered in the ledger, or that a running batch contains, isn't asked again.
    `stop` or an interrupt ends the waiting. The submitted batch goes on, and the next run takes its
    answers. This works with and without an event loop.

    Args:
        states: decision points, in any order.
        teachers: models at endpoints with a batch API (OpenRouter).
        max_total_usd: hard ceiling in US dollars. A batch reserves half the price of single calls.
        ledger: as for `replay_states`.
        poll_s: seconds between two looks at a running batch.
        stop: set it from any thread to stop waiting.
        options: how to ask, see `Asking`; gates do not apply.

    Raises:
        ConfigError: a teacher or option is wrong; raised before any cost.
        PriceError: a teacher's price is not known; raised before any cost.
        TeacherError: an endpoint rejected a batch, or can't be reached.
    """
    asking = Asking.of(**options)
    limit_nano = checked_ceiling(teachers, max_total_usd, asking)
    for teacher in teachers:
        if dialect_of(teacher).name != "openrouter":
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
        self.day = today()
        self.n_sent = 0
        self.n_skipped = 0
        self.newly_spent = 0
        self.refused: dict[str, TeacherAction] = {}
        """Rows of requests that no endpoint would take, by their hash; nothing was sent for them."""
        lanes = lanes_of(states, teachers, asking)
        self.tasks = sorted((task for _, lane in lanes for task in lane), key=lambda t: t.index)
        self.by_sha = {task.question.sha: task for task in self.tasks}

    async def run(self, stop: threading.Event) -> ReplayReport:
        self.keys = teacher_keys(list(self.teachers.values()))
        async with Client(
            max_connections=8, stop=stop, settle_s=self.asking.retry.settle_s
        ) as client:
            await self._collect(client, await self._found_again(client), stop)
            found = await asyncio.to_thread(self.ledger.lookup, self.by_sha)
            n_cached = len(found.decided)
            running = {sha for each in await self._pending() for sha in each.calls}
            missing = [
                task
                for sha, task in self.by_sha.items()
                if not (sha in found.decided or sha in found.lost or sha in running)
            ]
            if missing and self.limit_nano and not stop.is_set():
                teachers = list(self.teachers.values())
                prices = await self.asking.fetch_prices(teachers, keys=self.keys, stop=stop)
                await asyncio.to_thread(self._open_scopes, found)
                for teacher in teachers:
                    mine = [task for task in missing if task.teacher.name == teacher.name]
                    await self._submit(client, teacher, mine, prices[teacher.name])
                await self._collect(client, await self._pending(), stop)
            else:
                self.n_skipped = len(missing)
        known = await asyncio.to_thread(self.ledger.lookup, self.by_sha)
        return self._report(known.decided, n_cached, stop)

    def _open_scopes(self, found: LedgerEntries) -> None:
        scopes = [self.day, *(f"teacher:{name}" for name in self.teachers), *self.asking.scopes()]
        limits = self.asking.limits_nano(self.day, self.teachers)
        self.ledger.open_scopes(scopes, limits, by=f"run:{self.run_id}")
        self.ledger.open_run(
            self.run_id, self.limit_nano, carried_nano=found.paid_nano.total(),
            lost=[each for calls in found.lost.values() for each in calls],
        )  # fmt: skip

    async def _pending(self) -> list[_Pending]:
        def read(database: Database) -> list[_Pending]:
            rows = database.query("select value from ledger where key like ?", (f"{BATCH_KEY}%",))
            return [msgspec.json.decode(value, type=_Pending) for (value,) in rows]

        found = await asyncio.wrap_future(self.ledger.do(read))
        return [each for each in found if each.teacher in self.teachers]

    async def _note(self, pending: _Pending, *, is_done: bool = False) -> None:
        def write(database: Database) -> None:
            database.query("delete from ledger where key = ?", (pending.name,))
            if not is_done:
                value = msgspec.json.encode(pending).decode()
                database.query("insert into ledger(key, value) values(?, ?)", (pending.name, value))

        await asyncio.wrap_future(self.ledger.do(write))

    async def _found_again(self, client: Client) -> list[_Pending]:
        """Return the batches that wait, and find those whose process died before it had their name."""
        found = []
        for pending in await self._pending():
            if pending.batch_id is None:
                calls = await self._calls_of(pending)
                if any(call.state == "open" for call in calls.values()):
                    continue  # another process is handing it in
                key = self.keys[pending.teacher]
                pending.batch_id = await client.find_batch(pending.base_url, pending.key, key)
                if pending.batch_id is None:
                    # It never arrived: its money is free, and its questions are asked again.
                    await self._withdraw(pending)
                    continue
                await self._note(pending)
            found.append(pending)
        return found

    async def _withdraw(self, pending: _Pending) -> None:
        for call_id in pending.calls.values():
            settlement = Settlement(call_id=call_id, state="withdrawn")
            await asyncio.wrap_future(self.ledger.settle(settlement))
        await self._note(pending, is_done=True)

    async def _submit(
        self, client: Client, teacher: TeacherSpec, tasks: list[LaneQuestion], price: Price
    ) -> None:
        builder = RequestBuilder(self.asking.request_options())
        for start in range(0, len(tasks), MAX_BATCH_CALLS):
            calls: dict[str, int] = {}
            requests = []
            for task in tasks[start : start + MAX_BATCH_CALLS]:
                body = builder.body(task.state, teacher, price)
                if problem := builder.broken_rule(body, teacher, price):
                    # One request that an endpoint refuses may cost the whole batch its answers.
                    failure = Failure("invalid_request", f"not sent: {problem}", is_lasting=True)
                    self.refused[task.question.sha] = failed_row(task, failure)
                    continue
                reserved = await self._reserve(task, price)
                if reserved is None:
                    self.n_skipped += 1
                    continue
                calls[task.question.sha] = reserved.call_id
                requests.append({"custom_id": task.question.sha, "body": msgspec.Raw(body)})
            if requests:
                pending = _Pending(
                    teacher.base_url, teacher.name, calls, key=uuid.uuid4().hex,
                    family=teacher.vendor, is_distillable=teacher.is_distillable,
                )  # fmt: skip
                # The endpoint wants endpoint and model before the requests.
                batch = {
                    "endpoint": "/v1/chat/completions",
                    "model": teacher.model,
                    "metadata": {"key": pending.key},
                    "requests": requests,
                }
                await self._hand_in(client, pending, msgspec.json.encode(batch))

    async def _hand_in(self, client: Client, pending: _Pending, body: bytes) -> None:
        await self._note(pending)
        key = self.keys[pending.teacher]
        try:
            pending.batch_id = await client.submit_batch(pending.base_url, body, key)
        except TeacherResponseError:
            await self._withdraw(pending)
            raise
        await self._note(pending)
        n_calls = len(pending.calls)
        self.n_sent += n_calls
        logger.info("%s: submitted %d calls as %s", pending.teacher, n_calls, pending.batch_id)

    async def _reserve(self, task: LaneQuestion, price: Price) -> Reserved | None:
        question = task.question
        bound = price.bound_nano(question.size.bound_tokens, question.max_completion_tokens)
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
                timeout_s=_WINDOW_S,
                is_patient=False,
            )
        )
        result = await asyncio.wrap_future(future)
        return result if isinstance(result, Reserved) else None

    async def _collect(
        self, client: Client, pending: list[_Pending], stop: threading.Event
    ) -> None:
        """Wait for batches and settle their answers."""
        while pending:
            still = []
            for each in pending:
                try:
                    batch = await client.read_batch(
                        each.base_url, each.batch_id or "", self.keys[each.teacher]
                    )
                except TeacherResponseError as error:
                    logger.warning("batch %s is left for the next run: %s", each.batch_id, error)
                    continue
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

    async def _calls_of(self, pending: _Pending) -> dict[str, _LedgerCall]:
        def read(database: Database) -> dict[str, _LedgerCall]:
            return {
                sha: _LedgerCall(call_id, *row)
                for sha, call_id in pending.calls.items()
                for row in database.query(
                    "select state_id, model, state, reserved from calls where id = ?", (call_id,)
                )
            }

        return await asyncio.wrap_future(self.ledger.do(read))

    async def _settle(self, pending: _Pending, batch: Mapping[str, Any]) -> None:
        """Book every answer of a batch, whichever states this run was given."""
        items = batch.get("results")
        results = {
            str(item.get("custom_id")): item
            for item in (items if isinstance(items, list) else [])
            if isinstance(item, dict)
        }
        calls = await self._calls_of(pending)
        calls = {sha: call for sha, call in calls.items() if call.state in ("open", "unknown")}
        read = {sha: _outcome(results.get(sha), batch) for sha in calls}
        costs, disputed = _shared_out(batch, read, calls)
        futures = []
        for sha, call in calls.items():
            outcome, body = read[sha]
            task = _task(pending, sha, call)
            if isinstance(outcome, Answer):
                if asked := self.by_sha.get(sha):
                    action = with_recorded_names(outcome.action, asked.state)
                    outcome = replace(outcome, action=action)
                row = answered_row(task, outcome, costs[sha])
            else:
                row = failed_row(task, outcome)
            futures.append(
                self.ledger.settle(
                    Settlement(
                        call_id=call.id,
                        state="answered" if isinstance(outcome, Answer) else "failed",
                        cost_nano=costs[sha],
                        error_code=row.error_code,
                        row=encode_row(row),
                        response=body,
                        disputed=disputed if costs[sha] else None,
                    )
                )
            )
            self.newly_spent += costs[sha]
        for future in futures:
            await asyncio.wrap_future(future)
        await self._note(pending, is_done=True)

    def _report(
        self, known: Mapping[str, Known], n_cached: int, stop: threading.Event
    ) -> ReplayReport:
        rows = self.refused | {sha: decode_row(each.row) for sha, each in known.items()}
        actions = [
            replace(rows[task.question.sha], state_id=task.state_id)
            for task in self.tasks
            if task.question.sha in rows
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


def _task(pending: _Pending, sha: str, call: _LedgerCall) -> LaneQuestion:
    """Name the question that a call of a batch asked."""
    teacher = TeacherSpec(
        name=pending.teacher,
        model=call.model,
        base_url=pending.base_url,
        family=pending.family,
        is_distillable=pending.is_distillable,
    )
    question = Question(
        state_id=call.state_id,
        teacher=teacher.name,
        sha=sha,
        size=Size(),
        max_completion_tokens=0,
    )
    return LaneQuestion(0, (), 0, teacher, question)


def _outcome(
    item: Mapping[str, Any] | None, batch: Mapping[str, Any]
) -> tuple[Answer | Failure, bytes]:
    """Read one result like the reply to a single call."""
    item = item or {"error": {"message": f"the batch {batch.get('status')} without an answer"}}
    response = item.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        body = msgspec.json.encode(response["body"])
        status = response.get("status_code")
        return read_reply(status if isinstance(status, int) else 200, {}, body), body
    error = item.get("error")
    error = error if isinstance(error, dict) else {"message": str(error)}
    body = msgspec.json.encode(
        {"error": {"code": 500, "message": error.get("message"),
                   "metadata": {"error_type": error.get("error_type") or "server"}}}
    )  # fmt: skip
    return read_reply(500, {}, body), body


def _shared_out(
    batch: Mapping[str, Any],
    read: Mapping[str, tuple[Answer | Failure, bytes]],
    calls: Mapping[str, _LedgerCall],
) -> tuple[dict[str, int], str | None]:
    """Share the cost of a batch out to its answers by their tokens, to the nano-dollar.

    A batch that does not say what it cost is booked answer by answer, at the bound of each that
    does not say either. A cost that can't be true is booked at the bounds, and said why.
    """
    usage = batch.get("usage")
    cost = usage.get("cost") if isinstance(usage, dict) else None
    answers = {sha: answer.usage for sha, (answer, _) in read.items() if isinstance(answer, Answer)}
    bounds = {sha: calls[sha].reserved for sha in answers}
    costs = dict.fromkeys(read, 0)
    if not isinstance(cost, int | float) or not math.isfinite(cost) or cost < 0:
        told = {
            sha: bounds[sha] if u.cost_nano is None else u.cost_nano for sha, u in answers.items()
        }
        problem = _incredible(sum(told.values()), sum(bounds.values()))
        return costs | (bounds if problem else told), problem
    total = nano(round(cost, 12))
    if problem := _incredible(total, sum(bounds.values())):
        return costs | bounds, problem
    weights = {
        sha: (each.n_prompt_tokens or 1) + 4 * (each.n_completion_tokens or 1)
        for sha, each in answers.items()
    }
    whole = math.fsum(weights.values()) or 1.0
    costs |= {sha: int(total * weight / whole) for sha, weight in weights.items()}
    if weights:
        costs[next(iter(weights))] += total - sum(costs.values())
    return costs, None


def _incredible(cost: int, bound: int) -> str | None:
    """Return why the cost of a whole batch can't be true, by the bounds of its answers."""
    if bound // _MOST_BELOW <= cost <= _MOST_ABOVE * bound:
        return None
    return f"the batch says that it cost ${usd(cost):.6f}, where ${usd(bound):.6f} was its bound"
