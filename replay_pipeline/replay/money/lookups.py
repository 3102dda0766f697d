"""Look up calls in the ledger: answered, in flight, lost, or disputed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec

from replay_pipeline.replay.dialects.sizes import Learned, merged_ratios
from replay_pipeline.replay.money.calls import DisputedCall, Known, LedgerEntries, LostCall
from replay_pipeline.replay.money.schema import Database
from replay_pipeline.types import TeacherSpec

SEPARATOR = "\n"
"""Separates the scopes of a call."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """The columns of a call that are needed to settle it."""

    id: int
    request_sha: str
    state: str
    reserved: int
    scopes: tuple[str, ...]


def find_calls(
    database: Database, request_shas: Sequence[str], until: str | None = None
) -> LedgerEntries:
    """Find the answers, lost calls, and total cost of these requests.

    Calls that were settled after `until` (ISO 8601, UTC) are left out.
    """
    decided: dict[str, Known] = {}
    booked: dict[str, bytes] = {}
    paid: Counter[str] = Counter()
    then = " and (settled_at is null or settled_at <= ?)" if until else ""
    for chunk in chunks(request_shas):
        rows = database.query(
            "select request_sha, run_id, state, is_lasting, cost, row from calls "
            f"where state in ('answered', 'failed') and request_sha in ({marks(chunk)})"
            f"{then} order by id",
            (*chunk, *([until] if until else ())),
        )
        for sha, run_id, state, is_lasting, cost, row in rows:
            paid[run_id] += cost
            if state == "answered" or is_lasting:
                decided[sha] = Known(
                    request_sha=sha, run_id=run_id, cost_nano=cost, row=bytes(row or b"null")
                )
            elif cost and row:
                booked[sha] = bytes(row)
    return LedgerEntries(decided, find_lost(database, request_shas), booked, paid)


def find_lost(
    database: Database, request_shas: Sequence[str] | None = None
) -> dict[str, tuple[LostCall, ...]]:
    """Find the lost calls of these requests, or of all, by request."""
    found: dict[str, tuple[LostCall, ...]] = {}
    for chunk in [None] if request_shas is None else chunks(request_shas):
        rows = database.query(
            "select request_sha, id, state_id, teacher, model, run_id, scopes, reserved, "
            "coalesce(sent_at, intent_at), due_at, error_code, generation_id, body_sha "
            "from calls where state = 'unknown'"
            + ("" if chunk is None else f" and request_sha in ({marks(chunk)})")
            + " order by id",
            chunk or (),
        )
        for sha, call_id, state_id, teacher, model, run_id, scopes, reserved, *times, error, gen, body in rows:  # fmt: skip
            sent_at, due_at = times
            call = LostCall(
                call_id=call_id,
                request_sha=sha,
                state_id=state_id,
                teacher=teacher,
                model=model,
                run_id=run_id,
                scopes=tuple(scopes.split(SEPARATOR)),
                reserved_nano=reserved,
                sent_at=datetime.fromisoformat(sent_at),
                due_at=datetime.fromisoformat(due_at),
                error_code=error,
                generation_id=gen,
                body_sha=body,
            )
            found[sha] = (*found.get(sha, ()), call)
    return found


def find_disputed(database: Database) -> list[DisputedCall]:
    """Find the calls that were booked at their bound because their reported cost wasn't believed."""
    rows = database.query(
        "select id, state_id, teacher, model, cost, disputed, coalesce(sent_at, intent_at), "
        "coalesce(due_at, intent_at), generation_id from calls where disputed is not null order by id"
    )
    return [
        DisputedCall(
            call_id=call_id,
            state_id=state_id,
            teacher=teacher,
            model=model,
            cost_nano=cost,
            why=why,
            sent_at=datetime.fromisoformat(sent_at),
            due_at=datetime.fromisoformat(due_at),
            generation_id=generation_id,
        )
        for call_id, state_id, teacher, model, cost, why, sent_at, due_at, generation_id in rows
    ]


def elsewhere(database: Database, shas: list[str]) -> tuple[dict[str, Known], set[str]]:
    """Return the requests that were answered meanwhile, and those in flight."""
    decided: dict[str, Known] = {}
    busy: set[str] = set()
    for chunk in chunks(shas):
        rows = database.query(
            "select request_sha, run_id, state, cost, row from calls "
            f"where state in ('answered', 'open') and request_sha in ({marks(chunk)})",
            chunk,
        )
        for sha, run_id, state, cost, row in rows:
            if state == "open":
                busy.add(sha)
            else:
                decided[sha] = Known(request_sha=sha, run_id=run_id, cost_nano=cost, row=bytes(row))
    return decided, busy


def load_calls(database: Database, ids: Sequence[int]) -> dict[int, CallRow]:
    """Read calls by id. Missing ids are left out."""
    calls = {}
    for chunk in chunks(ids):
        rows = database.query(
            f"select id, request_sha, state, reserved, scopes from calls where id in ({marks(chunk)})",
            chunk,
        )
        for call_id, sha, state, reserved, scopes in rows:
            calls[call_id] = CallRow(call_id, sha, state, reserved, tuple(scopes.split(SEPARATOR)))
    return calls


def chunks(items: Iterable[Any], size: int = 500) -> Iterable[list[Any]]:
    """Split a list into parts that fit into one SQL statement."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def marks(chunk: Sequence[Any]) -> str:
    """Return one SQL placeholder for each item."""
    return ",".join("?" * len(chunk))


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def iso(moment: datetime) -> str:
    """Return a time in the ledger's text form."""
    return moment.isoformat(timespec="milliseconds")


_SIZE_KEY = "size:"


def read_learned(database: Database, teachers: Iterable[TeacherSpec]) -> dict[str, Learned]:
    """Read the learned ratios from a ledger, by teacher."""
    rows = database.query("select key, value from ledger where key like ?", (f"{_SIZE_KEY}%",))
    kept = {key: msgspec.json.decode(value, type=Learned) for key, value in rows}
    return {t.name: kept[_SIZE_KEY + t.model] for t in teachers if _SIZE_KEY + t.model in kept}


def add_learned(
    database: Database, teachers: Iterable[TeacherSpec], new: Mapping[str, Learned]
) -> None:
    """Add the learned ratios of a run to the ledger."""
    known = read_learned(database, teachers)
    for teacher in teachers:
        if teacher.name in new:
            both = merged_ratios(known.get(teacher.name, Learned()), new[teacher.name])
            key, value = _SIZE_KEY + teacher.model, msgspec.json.encode(both).decode()
            database.query("delete from ledger where key = ?", (key,))
            database.query("insert into ledger(key, value) values(?, ?)", (key, value))
