"""List lost calls and disputed costs one by one, and settle them on request."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.dialects.client import Client, run_apart
from replay_pipeline.replay.dialects.endpoints import teacher_keys
from replay_pipeline.replay.dialects.prices import usd
from replay_pipeline.replay.money.calls import DisputedCall, LostCall, settled_lost
from replay_pipeline.replay.money.database import exists
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.replay.money.lookups import find_disputed, find_lost
from replay_pipeline.replay.money.scopes import end_dispute
from replay_pipeline.types import TeacherSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LostCallReport:
    """One sent call whose outcome or cost isn't known."""

    state_id: str
    teacher: str
    model: str
    sent_at: str
    due_at: str
    """After this time it has surely ended."""
    reserved_usd: float
    """The money that it holds, or the cost at which it is booked."""
    why: str
    """How the call was lost: `its process died`, `no_reply`, `connection_lost`, `truncated_reply`,
    `no_completion`, `given_up`; or `disputed: ` and why its reported cost can't be true."""
    cost_usd: float | None
    """Its cost by the endpoint's own record, or None without a record."""
    what: str
    """What was done, or what you can do."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


def reconcile(
    ledger: str | Path, teachers: Sequence[TeacherSpec] = (), *, settle: bool = False
) -> list[LostCallReport]:
    """List the lost calls and disputed costs of a ledger, and settle those that have ended.

    Args:
        ledger: path or database URL.
        teachers: teachers whose endpoints may be asked for their record of a call.
        settle: book each ended call at the cost that its endpoint recorded, or else at the most
            that it can have cost. The next run asks its question again. A disputed cost becomes the
            endpoint's recorded cost, or else stays at its bound for good. If false, nothing
            changes.

    Raises:
        LedgerError: there is no ledger, or it can't be read or written.
    """
    if not exists(ledger):
        raise LedgerError(f"{ledger}: no ledger here yet; it is created by the first replay")
    with Ledger(ledger) as opened:
        lost = opened.do(find_lost).result()
        calls = [call for several in lost.values() for call in several]
        disputed = opened.do(find_disputed).result()
        costs = run_apart(_costs([*calls, *disputed], teachers)) if calls or disputed else {}
        reports = []
        for call in calls:
            cost = costs.get(call.call_id)
            is_over = datetime.now(UTC) >= call.due_at
            if settle and is_over:
                booked = call.reserved_nano if cost is None else cost
                opened.settle(settled_lost(call, booked)).result()
            reports.append(_report(call, cost, is_over=is_over, is_settled=settle and is_over))
        for call in disputed:
            cost = costs.get(call.call_id)
            if settle:
                booked = call.cost_nano if cost is None else cost
                opened.do(partial(end_dispute, call=call, cost_nano=booked)).result()
            reports.append(_dispute(call, cost, is_settled=settle))
    return reports


async def _costs(
    calls: Sequence[LostCall | DisputedCall], teachers: Sequence[TeacherSpec]
) -> dict[int, int]:
    """Ask endpoints what they have on record, in nano-dollars by call."""
    by_name = {teacher.name: teacher for teacher in teachers}
    keys = teacher_keys(teachers, is_required=False)
    costs = {}
    async with Client(max_connections=4) as client:
        for call in calls:
            teacher = by_name.get(call.teacher)
            if call.generation_id and teacher:
                cost = await client.generation_cost(
                    teacher.base_url, call.generation_id, keys[teacher.name]
                )
                if cost is not None:
                    costs[call.call_id] = cost
    return costs


def _dispute(call: DisputedCall, cost: int | None, *, is_settled: bool) -> LostCallReport:
    what = "booked at its bound; settled with --settle, at the endpoint's record where it has one"
    if is_settled:
        what = "stays at its bound" if cost is None else "booked at the endpoint's record"
    return LostCallReport(
        state_id=call.state_id,
        teacher=call.teacher,
        model=call.model,
        sent_at=call.sent_at.isoformat(timespec="seconds"),
        due_at=call.due_at.isoformat(timespec="seconds"),
        reserved_usd=usd(call.cost_nano),
        why=f"disputed: {call.why}",
        cost_usd=None if cost is None else usd(cost),
        what=what,
    )


def _report(call: LostCall, cost: int | None, *, is_over: bool, is_settled: bool) -> LostCallReport:
    what = "over: it is asked again by the next run, or settled with --settle"
    if is_settled:
        what = "booked at its bound" if cost is None else "booked at the endpoint's record"
    elif not is_over:
        what = "may still be running"
    return LostCallReport(
        state_id=call.state_id,
        teacher=call.teacher,
        model=call.model,
        sent_at=call.sent_at.isoformat(timespec="seconds"),
        due_at=call.due_at.isoformat(timespec="seconds"),
        reserved_usd=usd(call.reserved_nano),
        why=call.error_code or "its process died",
        cost_usd=None if cost is None else usd(cost),
        what=what,
    )
