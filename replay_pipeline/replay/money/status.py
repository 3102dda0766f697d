"""What a ledger holds: money by scope, calls by state, and lost calls."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.dialects.prices import usd
from replay_pipeline.replay.money.database import Database, connect, exists
from replay_pipeline.replay.money.ledger import find_lost


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeStatus:
    """Money under one limit, in US dollars."""

    scope: str
    """`run:…`, `day:…`, `night:…`, `teacher:…` or `partition:…`."""
    spent_usd: float
    held_usd: float
    """Reserved for calls in flight."""
    unknown_usd: float
    """Reserved for calls whose process died before it learned their outcome."""
    overrun_usd: float
    """Part of the spent money that exceeded its reservation."""
    limit_usd: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStatus:
    """The contents of a ledger at one moment."""

    ledger: str
    spent_usd: float
    held_usd: float
    unknown_usd: float
    """Held by lost calls until their outcome is known."""
    calls: dict[str, int]
    """Calls by state: `open`, `answered`, `failed`, `unknown`, `recovered`."""
    errors: dict[str, int]
    """Finished calls without a usable action, by error code."""
    teachers: dict[str, dict[str, int]]
    """Calls by teacher and state."""
    scopes: tuple[ScopeStatus, ...]
    held_until: str | None = None
    """When the last lost call has surely ended, so that a run can settle them all (ISO 8601, UTC)."""
    n_disputed: int = 0
    """Calls whose reported cost can't be true. The column `disputed` of `calls` says why."""
    disputed_usd: float = 0.0
    """Their booked cost, which is the most that they should cost."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


def spent_since(url: str | Path, since: datetime, *, kind: str = "") -> float:
    """Return the US dollars that the ledger booked since then, or 0 without a ledger.

    Only calls that count under a scope of this kind, such as `night:`, are added up. By default, all.

    Raises:
        LedgerError: the ledger can't be read.
    """
    query = "select sum(cost) from calls where settled_at >= ? and scopes like ?"
    return _usd(url, query, since.isoformat(), f"%{kind}%")


def counted_usd(url: str | Path, scope: str) -> float:
    """Return the US dollars that are spent, held, or unknown under a scope, or 0 without a ledger.

    Raises:
        LedgerError: the ledger can't be read.
    """
    return _usd(url, "select spent + held + unknown from scopes where name = ?", scope)


def _usd(url: str | Path, query: str, *values: str) -> float:
    """Return the one sum that a query finds, in US dollars; 0 where there is none."""
    if not exists(url):
        return 0.0
    with _opened(url) as database:
        rows = database.query(query, values)
    return usd(int(rows[0][0] or 0)) if rows else 0.0


def ledger_status(url: str | Path) -> LedgerStatus:
    """Read the contents of a ledger, even while others write to it.

    Raises:
        LedgerError: there is no ledger, or it can't be read.
    """
    with _opened(url) as database:
        states = database.query(
            "select teacher, state, count(*), sum(cost), sum(reserved) from calls "
            "group by teacher, state order by teacher, state"
        )
        errors = database.query(
            "select error_code, count(*) from calls where error_code is not null "
            "group by error_code order by error_code"
        )
        scopes = database.query(
            "select name, spent, held, unknown, overrun, limit_nano from scopes order by name"
        )
        [(held_until,)] = database.query("select max(due_at) from calls where state = 'unknown'")
        [disputed] = database.query(
            "select count(*), coalesce(sum(cost), 0) from calls where disputed is not null"
        )
    return LedgerStatus(
        ledger=database.name,
        held_until=held_until,
        n_disputed=disputed[0],
        disputed_usd=usd(int(disputed[1])),
        errors={row[0]: row[1] for row in errors},
        **_by_state(states),
        scopes=tuple(
            ScopeStatus(
                scope=name, spent_usd=usd(spent), held_usd=usd(held), unknown_usd=usd(unknown),
                overrun_usd=usd(overrun), limit_usd=None if limit is None else usd(limit),
            )
            for name, spent, held, unknown, overrun, limit in scopes
        ),
    )  # fmt: skip


def _by_state(rows: Iterable[tuple[str, str, int, int, int]]) -> dict[str, Any]:
    """Add up calls and money of each teacher and state."""
    calls: dict[str, int] = {}
    teachers: dict[str, dict[str, int]] = {}
    spent = held = unknown = 0
    for teacher, state, count, cost, reserved in rows:
        calls[state] = calls.get(state, 0) + count
        teachers.setdefault(teacher, {})[state] = count
        spent += int(cost)
        held += int(reserved) if state == "open" else 0
        unknown += int(reserved) if state == "unknown" else 0
    return {
        "calls": calls,
        "teachers": teachers,
        "spent_usd": usd(spent),
        "held_usd": usd(held),
        "unknown_usd": usd(unknown),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LostCallReport:
    """One sent call whose outcome isn't known."""

    state_id: str
    teacher: str
    model: str
    sent_at: str
    due_at: str
    """After this time it has surely ended."""
    reserved_usd: float
    """The money that it holds."""
    why: str
    """How the call was lost: `its process died`, `no_reply`, `connection_lost`, `truncated_reply`,
    `no_completion`, `given_up`."""
    what: str
    """What becomes of it."""


def lost_calls(url: str | Path) -> list[LostCallReport]:
    """List the lost calls of a ledger. A run over their states settles those that have ended.

    Raises:
        LedgerError: there is no ledger, or it can't be read.
    """
    with _opened(url) as database:
        lost = find_lost(database)
    now = datetime.now(UTC)
    return [
        LostCallReport(
            state_id=call.state_id,
            teacher=call.teacher,
            model=call.model,
            sent_at=call.sent_at.isoformat(timespec="seconds"),
            due_at=call.due_at.isoformat(timespec="seconds"),
            reserved_usd=usd(call.reserved_nano),
            why=call.error_code or "its process died",
            what="over: the next run asks it again"
            if now >= call.due_at
            else "may still be running",
        )
        for several in lost.values()
        for call in several
    ]


@contextmanager
def _opened(url: str | Path) -> Iterator[Database]:
    """Open a ledger to read it, even while others write to it.

    Raises:
        LedgerError: there is no ledger, or it can't be read.
    """
    if not exists(url):
        raise LedgerError(f"{url}: no ledger here yet; it is created by the first replay")
    database = connect(url, is_read_only=True)
    try:
        yield database
    finally:
        database.close()
