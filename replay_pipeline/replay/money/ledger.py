"""The ledger: no limit is ever passed, no paid answer is lost, nothing is paid twice.

Before a request leaves, the ledger reserves the most that it can cost and writes the intent to
disk. Afterwards one transaction stores the answer and replaces the reservation by the real cost.
Every limit is a scope (`run:…`, `day:…`, `night:…`, `teacher:…`, `partition:…`), and for each of them

    spent + held + unknown <= limit

holds at every instant, across processes. Calls in flight reserve `held`. Lost calls, which were
sent and whose outcome nobody knows, reserve `unknown`. A cost above its reservation is booked in
full and flagged (`overrun`), and nothing more is reserved above the limit.

A lost call keeps its reservation until its outcome is known. A router that keeps answers charges an
equal request only once. There, a repeated question takes over the reservation instead of adding
one. Otherwise a few crashes would hold all the money for good.

One thread writes. It commits everything that was requested since its last transaction at once, so a
hundred calls share one wait for the disk.
"""

import contextlib
import glob
import logging
import os
import queue
import socket
import threading
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.dialects.sizes import Learned, merged_ratios
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LedgerEntries,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
)
from replay_pipeline.replay.money.database import Database, connect
from replay_pipeline.types import TeacherSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INSERT = (
    "insert into calls(id, request_sha, state_id, teacher, model, run_id, trace_batch, scopes, "
    "owner, reserved, intent_at, sent_at, due_at, body_sha, state) "
    "values(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_SENDING = "update calls set sent_at = ?, due_at = ? where id = ? and state = 'open'"
_SETTLE = (
    "update calls set state = ?, cost = ?, n_attempts = ?, is_lasting = ?, is_overrun = ?, "
    "settled_at = ?, error_code = ?, row = ?, response = ?, generation_id = ?, disputed = ?, "
    "sent_at = coalesce(?, sent_at), due_at = coalesce(?, due_at) where id = ?"
)
_STOP = object()
_POLL_S = 0.05
_ORPHAN_CHECKS_EVERY = 20


@dataclass(slots=True)
class _Doing:
    action: Callable[[Database], Any]
    future: "Future[Any]"


@dataclass(slots=True)
class _Waiting:
    """A call that waits for its reservation."""

    call: NewCall
    future: "Future[Reserved | Refused | Known | InDoubt]"


@dataclass(slots=True)
class _Settling:
    """A call that is to be settled."""

    settlement: Settlement
    future: "Future[None]"


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


def find_calls(database: Database, request_shas: Sequence[str]) -> LedgerEntries:
    """Find the answers, lost calls, and total cost of these requests."""
    decided: dict[str, Known] = {}
    booked: dict[str, bytes] = {}
    paid: Counter[str] = Counter()
    for chunk in chunks(request_shas):
        rows = database.query(
            "select request_sha, run_id, state, is_lasting, cost, row from calls "
            f"where state in ('answered', 'failed') and request_sha in ({marks(chunk)}) "
            "order by id",
            chunk,
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


def read_pauses(database: Database) -> dict[str, str]:
    """Read until when endpoints take no more calls, and why, by the name of the pause."""
    database.query("delete from ledger where key like 'pause:%' and value < ?", (iso(now()),))
    return dict(database.query("select key, value from ledger where key like 'pause:%'"))


def note_pause(database: Database, name: str, until: datetime, why: str) -> None:
    """Keep until when an endpoint takes no more calls, so that no later run asks it before."""
    database.query(
        "insert into ledger(key, value) values(?, ?) on conflict(key) do update set value = excluded.value",
        (name, f"{iso(until)} {why}"),
    )


@dataclass(slots=True)
class Scope:
    """A limit in nano-dollars, with the sums that count against it."""

    limit: int | None
    spent: int
    held: int
    unknown: int
    overrun: int

    def fits(self, amount: int) -> bool:
        """Return whether this amount can be reserved now."""
        return self.limit is None or self.spent + self.held + self.unknown + amount <= self.limit

    def can_ever_fit(self, amount: int) -> bool:
        """Return whether this amount could be reserved if open calls cost less than they reserved."""
        # Held money may come back, all but what calls cost; lost calls may keep theirs.
        return self.limit is None or self.spent + self.unknown + amount <= self.limit


@dataclass(slots=True)
class Scopes:
    """The scopes that one transaction changes in memory and saves once."""

    database: Database
    known: dict[str, Scope] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def load(self, names: Iterable[str]) -> None:
        """Read scopes that aren't loaded yet, and lock them in order."""
        missing = sorted(set(names) - self.known.keys())
        if missing:
            self.known |= load_scopes(self.database, missing)

    def settle(self, call: CallRow, settlement: Settlement) -> None:
        """Replace the reservation of a call by its cost."""
        for name in call.scopes:
            scope = self.known[name]
            if call.state == "open":
                scope.held -= call.reserved
            else:
                scope.unknown -= call.reserved
            if settlement.state == "unknown":
                scope.unknown += call.reserved
            else:
                scope.spent += settlement.cost_nano
                scope.overrun += max(0, settlement.cost_nano - call.reserved)
        self.changed.update(call.scopes)

    def release(self, names: Iterable[str], amount: int) -> None:
        """Free the reservation of a lost call."""
        for name in names:
            self.known[name].unknown -= amount
            self.changed.add(name)

    def never(self, call: NewCall, taken: Sequence[LostCall]) -> str | None:
        """Return a scope that the call can never fit into, even if other calls free their money."""
        for name in call.scopes:
            if not self.known[name].can_ever_fit(_asked(call, taken, name)):
                return name
        return None

    def full(self, call: NewCall, taken: Sequence[LostCall]) -> list[str]:
        """Return the scopes that have no room for a call now."""
        return [
            name for name in call.scopes if not self.known[name].fits(_asked(call, taken, name))
        ]

    def hold(self, call: NewCall) -> None:
        """Reserve the most that a call can cost."""
        for name in call.scopes:
            self.known[name].held += call.reserved_nano
        self.changed.update(call.scopes)

    def save(self) -> None:
        """Write the changes."""
        if self.changed:
            self.database.run_many(
                "update scopes set spent = ?, held = ?, unknown = ?, overrun = ? where name = ?",
                [
                    (scope.spent, scope.held, scope.unknown, scope.overrun, name)
                    for name in sorted(self.changed)
                    for scope in (self.known[name],)
                ],
            )


def _asked(call: NewCall, taken: Sequence[LostCall], scope: str) -> int:
    """Count what a call needs under a scope beyond what it takes over there."""
    return call.reserved_nano - sum(one.reserved_nano for one in taken if scope in one.scopes)


def open_scopes(
    database: Database,
    names: Iterable[str],
    limits: Mapping[str, int | None],
    *,
    carried_nano: int = 0,
) -> None:
    """Create scopes, and set or remove the named limits. See `Ledger.open_scopes`."""
    for name in sorted({*names, *limits}):
        database.query("insert into scopes(name) values(?) on conflict(name) do nothing", (name,))
        if name not in limits:
            continue
        limit = limits[name]
        [scope] = load_scopes(database, [name]).values()
        in_use = scope.spent + scope.held + scope.unknown - scope.overrun
        # The check must hold for what is in use already when a limit is lowered below it.
        database.query(
            "update scopes set limit_nano = ?, ceiling_nano = ?, carried_nano = ? where name = ?",
            (limit, None if limit is None else max(limit, in_use), carried_nano, name),
        )


def load_scopes(database: Database, names: Sequence[str]) -> dict[str, Scope]:
    """Read scopes and lock them in order.

    Raises:
        LedgerError: a scope is missing.
    """
    rows: list[Any] = []
    lock = " for update" if database.name.startswith("postgres") else ""
    for chunk in chunks(names):
        rows += database.query(
            "select name, limit_nano, spent, held, unknown, overrun from scopes "
            f"where name in ({marks(chunk)}) order by name{lock}",
            chunk,
        )
    if len(rows) != len(names):
        missing = set(names) - {row[0] for row in rows}
        raise LedgerError(f"{database.name}: no scope {', '.join(sorted(missing))}")
    return {name: Scope(*numbers) for name, *numbers in rows}


_Pair = tuple[NewCall, Settlement]


class Unbooked:
    """The side files of one ledger. One process writes each, and the name says which.

    They lie beside the ledger or, where nothing can be written there, under the home, by the identity
    that a ledger keeps wherever it is moved.
    """

    def __init__(self, ledger: str, owner: int, identity: str) -> None:
        self.owner = owner
        self._stems = [Path.home() / ".cache" / "replay-pipeline" / f"{identity}-unbooked-"]
        if "://" not in ledger:
            path = Path(ledger)
            self._stems.insert(0, path.with_name(f"{path.name}-unbooked-"))

    def keep(self, pairs: Sequence[_Pair]) -> Path:
        """Write calls and their outcomes, and wait for the disk.

        Raises:
            LedgerError: they can't be written to any of the places.
        """
        data = b"".join(b"\n" + msgspec.json.encode(pair) for pair in pairs)
        errors = []
        for stem in self._stems:
            path = stem.with_name(f"{stem.name}{self.owner}.jsonl")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                errors.append(f"{path}: {error}")
            else:
                return path
        raise LedgerError("; ".join(errors))

    def left_behind(self, is_alive: Callable[[int], bool]) -> Iterator[tuple[Path, list[_Pair]]]:
        """Read the files of processes that have ended."""
        decode = msgspec.json.Decoder(_Pair).decode
        for stem in self._stems:
            for path in sorted(stem.parent.glob(f"{glob.escape(stem.name)}*.jsonl")):
                owner = int(path.stem.rpartition("-")[2])
                if owner != self.owner and is_alive(owner):
                    continue
                try:
                    lines = path.read_bytes().splitlines()
                except FileNotFoundError:
                    continue  # another process has just booked it
                pairs = []
                for line in lines:
                    # A line that was cut short was written once more, to the other place.
                    with contextlib.suppress(msgspec.DecodeError):
                        pairs.append(decode(line))
                yield path, pairs


class Ledger:
    """One open ledger. You can call every method from any thread, and each returns a future."""

    def __init__(self, url: str | Path, *, is_durable: bool = True) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._n_polls = 0
        self._waiting: deque[_Waiting] = deque()
        """Calls that wait for money, or for another process."""
        self._given_up: set[str] = set()
        self._n_issued = 0
        self._in_flight: dict[int, NewCall] = {}
        self._database = connect(url, is_durable=is_durable)
        self.url = self._database.name
        try:
            self.owner = self._register()
            self._unbooked = Unbooked(self.url, self.owner, self._identity())
            with self._database.transaction():
                self._adopt_orphans(self._database)
            self._book_unbooked()
        except BaseException:
            self._database.close()
            raise
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish open writes, then close. Calls that are still open become unknown."""
        if self._thread.is_alive():
            self._queue.put(_STOP)
            self._thread.join()

    def reserve(self, call: NewCall) -> "Future[Reserved | Refused | Known | InDoubt]":
        """Hold `call.reserved_nano` in every scope of `call`, first come first served.

        This waits while held money may come free, and while another living process has the same
        request in flight. The result is `Refused` if the call can never fit, and `Known` if the
        request was answered meanwhile.
        """
        future: Future[Reserved | Refused | Known | InDoubt] = Future()
        self._queue.put(_Waiting(call, future))
        return future

    def settle(self, settlement: Settlement) -> "Future[None]":
        """Book the cost of a call together with its answer. Returns once both are on disk."""
        future: Future[None] = Future()
        self._queue.put(_Settling(settlement, future))
        return future

    def sending(self, call_id: int, sent_by: datetime) -> "Future[None]":
        """Record that a call may leave later than its reservation said, up to `sent_by`."""

        def note(database: Database) -> None:
            if call := self._in_flight.get(call_id):
                due_at = sent_by + timedelta(seconds=call.timeout_s)
                database.query(_SENDING, (iso(sent_by), iso(due_at), call_id))

        return self.do(note)

    def do(self, action: Callable[[Database], T]) -> "Future[T]":
        """Run `action` on the database, in a transaction of its own."""
        future: Future[T] = Future()
        self._queue.put(_Doing(action, future))
        return future

    def give_up(self, run_id: str) -> None:
        """Refuse every reservation that `run_id` waits for, now and later."""
        self.do(lambda _: self._given_up.add(run_id))

    def open_scopes(self, names: Iterable[str], limits: Mapping[str, int | None]) -> None:
        """Create scopes, and set or remove the named limits.

        The ledger keeps limits: a scope that `limits` doesn't name keeps its limit, a new one starts
        without, and `None` removes it.
        """
        self.do(lambda database: open_scopes(database, names, limits)).result()

    def open_run(
        self, run_id: str, limit: int, *, carried_nano: int = 0, lost: Iterable[LostCall] = ()
    ) -> None:
        """Create the scope of a run, with a limit in nano-dollars that all processes with its name share.

        `carried_nano` is the cost of earlier answers that it reuses. Lost calls of earlier runs for the
        same requests count here too, until their outcome is known.
        """
        name = f"run:{run_id}"

        def open_it(database: Database) -> None:
            limits = {name: max(0, limit - carried_nano)}
            open_scopes(database, (), limits, carried_nano=carried_nano)
            adopted = [each.call_id for each in lost if each.run_id != run_id]
            reserved = 0
            for call in load_calls(database, adopted).values():
                if call.state == "unknown" and name not in call.scopes:
                    scopes = SEPARATOR.join((*call.scopes, name))
                    database.query("update calls set scopes = ? where id = ?", (scopes, call.id))
                    reserved += call.reserved
            # They were allowed when they were sent: they must not break the check here.
            database.query(
                "update scopes set unknown = unknown + ?, ceiling_nano = ceiling_nano + ? "
                "where name = ?",
                (reserved, reserved, name),
            )

        self.do(open_it).result()

    def held_by_lost(self, scope: str) -> tuple[int, datetime | None]:
        """Return the money that lost calls hold under `scope`, and the time when the last has surely ended."""

        def read(database: Database) -> tuple[int, datetime | None]:
            lost = [call for calls in find_lost(database).values() for call in calls]
            due = [call.due_at for call in lost if scope in call.scopes]
            return load_scopes(database, [scope])[scope].unknown, max(due, default=None)

        return self.do(read).result()

    def lookup(self, request_shas: Iterable[str]) -> LedgerEntries:
        """Find the answers and lost calls of these requests."""
        shas = list(dict.fromkeys(request_shas))
        return self.do(lambda database: find_calls(database, shas)).result()

    # --- the writer thread -------------------------------------------------------------------

    def _register(self) -> int:
        while True:
            with self._database.transaction():
                [(owner,)] = self._database.query(
                    "insert into owners(opened_at, host) values(?, ?) returning id",
                    (iso(now()), socket.gethostname()),
                )
            # The lock may be held by a process whose ledger was deleted and is made again here.
            if self._database.claim(owner):
                return owner

    def _identity(self) -> str:
        """Return the name that this ledger keeps wherever it is moved."""
        with self._database.transaction():
            self._database.query(
                "insert into ledger(key, value) values('identity', ?) on conflict(key) do nothing",
                (uuid.uuid4().hex[:16],),
            )
            [(identity,)] = self._database.query("select value from ledger where key = 'identity'")
        return identity

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = self._next_batch()
            if _STOP in batch:
                is_open = False
                batch = [each for each in batch if each is not _STOP]
            self._waiting.extend(each for each in batch if isinstance(each, _Waiting))
            for each in batch:
                if isinstance(each, _Doing):
                    self._do(each)
            self._book([each for each in batch if isinstance(each, _Settling)])
        for waiting in self._waiting:
            waiting.future.set_exception(LedgerError(f"{self.url}: the ledger was closed"))
        with contextlib.suppress(LedgerError), self._database.transaction():
            self._lose(self._database, self.owner)
        self._database.close()

    def _next_batch(self) -> list[Any]:
        batch: list[Any] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._queue.get(timeout=_POLL_S if self._waiting else None))
            while True:
                batch.append(self._queue.get_nowait())
        if not batch:
            self._n_polls += 1
            if self._n_polls % _ORPHAN_CHECKS_EVERY == 0:
                batch.append(_Doing(self._adopt_orphans, Future()))
        return batch

    def _do(self, doing: _Doing) -> None:
        try:
            with self._database.transaction():
                result = doing.action(self._database)
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            doing.future.set_exception(error)
        else:
            doing.future.set_result(result)

    def _book(self, settling: list[_Settling]) -> None:
        """Settle and reserve in one transaction. Callers get their results after the commit."""
        if not settling and not self._waiting:
            return
        try:
            self._transact(settling)
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            for waiting in self._waiting:
                waiting.future.set_exception(error)
            was_alone, self._waiting = not self._waiting, deque()
            if settling and was_alone:
                self._keep(settling, error)
            else:
                # What is paid for must not fail because a reservation did.
                self._book(settling)

    def _transact(self, settling: list[_Settling]) -> None:
        told: list[tuple[Future[Any], Any]] = []
        still_waiting = deque(self._waiting)
        with self._database.transaction():
            calls = self._calls_of(settling)
            lost = find_lost(self._database, [w.call.request_sha for w in still_waiting])
            scopes = Scopes(self._database)
            # All scopes are locked at once and in order: no two processes wait in a circle.
            scopes.load(
                name
                for scopes_of_one in [
                    *(call.scopes for call in calls.values()),
                    *(waiting.call.scopes for waiting in still_waiting),
                    *(each.scopes for several in lost.values() for each in several),
                ]
                for name in scopes_of_one
            )
            self._settle_all(scopes, calls, settling)
            self._reserve_all(scopes, still_waiting, told, lost, calls.keys())
            scopes.save()
        self._waiting = still_waiting
        for each in settling:
            self._in_flight.pop(each.settlement.call_id, None)
            each.future.set_result(None)
        for future, result in told:
            future.set_result(result)

    def _keep(self, settling: list[_Settling], error: Exception) -> None:
        """Write answers that can't be booked to a side file, for the next start to book."""
        pairs = [
            (self._in_flight[each.settlement.call_id], each.settlement)
            for each in settling
            if each.settlement.call_id in self._in_flight
        ]
        place = self._unbooked.keep(pairs)
        told = LedgerError(f"{error}; {len(pairs)} answers wait in {place} and are booked by the "
                           "next run")  # fmt: skip
        for each in settling:
            each.future.set_exception(told)

    def _book_unbooked(self) -> None:
        """Book the answers that an earlier process could not book, each only once."""
        with self._database.transaction():
            for path, pairs in self._unbooked.left_behind(self._database.is_alive):
                settling = [_Settling(settlement, Future()) for _, settlement in pairs]
                calls = self._calls_of(settling)
                here = [
                    each
                    for each, (call, _) in zip(settling, pairs, strict=True)
                    if (found := calls.get(each.settlement.call_id))
                    and found.request_sha == call.request_sha
                ]
                if not here:
                    logger.warning("%s: holds answers of another ledger, and stays as it is", path)
                    continue
                scopes = Scopes(self._database)
                scopes.load(name for call in calls.values() for name in call.scopes)
                self._settle_all(scopes, calls, here)
                scopes.save()
                path.unlink(missing_ok=True)
                logger.warning("%s: booked %d answers of %s", self.url, len(here), path)

    def _calls_of(self, settling: list[_Settling]) -> dict[int, CallRow]:
        settlements = [each.settlement for each in settling]
        ids = [s.call_id for s in settlements] + [i for s in settlements for i in s.recovers]
        return load_calls(self._database, ids)

    def _settle_all(
        self, scopes: Scopes, calls: dict[int, CallRow], settling: list[_Settling]
    ) -> None:
        rows: list[tuple[Any, ...]] = []
        withdrawn: list[tuple[Any, ...]] = []
        settled: set[int] = set()
        for each in (each.settlement for each in settling):
            call = calls.get(each.call_id)
            if call is None or call.state not in ("open", "unknown"):
                if each.call_id not in self._in_flight or each.call_id in settled:
                    continue  # what became of it has been found out, perhaps by another process
                raise LedgerError(f"{self.url}: call {each.call_id} is not open")
            scopes.settle(call, each)
            calls[call.id] = replace(call, state=each.state)
            settled.add(call.id)
            if each.state == "withdrawn":
                withdrawn.append((each.call_id,))
            else:
                sent = self._in_flight.get(each.call_id, call)
                rows.append((*_settled(each, sent), each.call_id))
            for lost in (calls[i] for i in each.recovers if i in calls):
                if lost.state == "unknown":
                    scopes.release(lost.scopes, lost.reserved)
                    calls[lost.id] = replace(lost, state="recovered")
                    rows.append(_recovered(lost.id))
        if withdrawn:
            self._database.run_many("delete from calls where id = ?", withdrawn)
        if rows:
            self._database.run_many(_SETTLE, rows)

    def _reserve_all(
        self,
        scopes: Scopes,
        waiting: deque[_Waiting],
        told: list[tuple[Future[Any], Any]],
        lost: Mapping[str, tuple[LostCall, ...]],
        just_settled: Iterable[int],
    ) -> None:
        if not waiting:
            return
        decided, busy = elsewhere(self._database, [each.call.request_sha for each in waiting])
        blocked: set[str] = set()
        rows: list[tuple[Any, ...]] = []
        recovered: list[tuple[Any, ...]] = []
        moment = now()
        for _ in range(len(waiting)):
            each = waiting.popleft()
            call = each.call
            mine = [
                one for one in lost.get(call.request_sha, ()) if one.call_id not in just_settled
            ]
            taken = mine if call.takes_over else []
            if (clear := self._clear(call, decided, mine)) is not None:
                told.append((each.future, clear))
            elif call.request_sha in busy:
                waiting.append(each)
            elif scope := scopes.never(call, taken):
                told.append((each.future, Refused(scope=scope)))
            elif (full := scopes.full(call, taken)) or not blocked.isdisjoint(call.scopes):
                # First come, first served: whoever waits for a scope keeps later ones waiting.
                blocked.update(full if blocked.isdisjoint(call.scopes) else ())
                waiting.append(each)
            else:
                for one in taken:
                    scopes.release(one.scopes, one.reserved_nano)
                    recovered.append(_recovered(one.call_id))
                call_id = self._issue()
                scopes.hold(call)
                busy.add(call.request_sha)
                self._in_flight[call_id] = call
                rows.append((*self._new_row(call, call_id, moment), "open"))
                reserved = Reserved(
                    call_id=call_id, reserved_nano=call.reserved_nano, sent_by=moment + call.slack
                )
                told.append((each.future, reserved))
        if rows:
            self._database.run_many(_INSERT, rows)
        if recovered:
            self._database.run_many(_SETTLE, recovered)

    def _clear(
        self, call: NewCall, decided: Mapping[str, Known], lost: Sequence[LostCall]
    ) -> Known | Refused | InDoubt | None:
        """Return what is clear without looking at the money."""
        if known := decided.get(call.request_sha):
            return known
        if call.run_id in self._given_up:
            return Refused(scope="stopped")
        if not {one.call_id for one in lost} <= {*call.lost}:
            return InDoubt(lost=tuple(lost))
        return None

    def _new_row(self, call: NewCall, call_id: int, moment: datetime) -> tuple[Any, ...]:
        return (
            call_id, call.request_sha, call.state_id, call.teacher, call.model, call.run_id,
            call.partition, SEPARATOR.join(call.scopes), self.owner, call.reserved_nano,
            iso(moment), iso(moment + call.slack),
            iso(moment + call.slack + timedelta(seconds=call.timeout_s)), call.body_sha,
        )  # fmt: skip

    def _issue(self) -> int:
        self._n_issued += 1
        return (self.owner << 32) + self._n_issued

    def _adopt_orphans(self, database: Database) -> int:
        """Mark the calls of dead owners as unknown. Their reservations stay."""
        owners = database.query("select distinct owner from calls where state = 'open'")
        dead = [
            owner for (owner,) in owners if owner != self.owner and not database.is_alive(owner)
        ]
        return sum(self._lose(database, owner) for owner in dead)

    def _lose(self, database: Database, owner: int) -> int:
        """Move every open call of `owner` from held to unknown."""
        rows = database.query(
            "update calls set state = 'unknown' where owner = ? and state = 'open' "
            "returning scopes, reserved",
            (owner,),
        )
        moved: dict[str, int] = defaultdict(int)
        for names, reserved in rows:
            for name in names.split(SEPARATOR):
                moved[name] += reserved
        for name in sorted(moved):
            database.query(
                "update scopes set held = held - ?, unknown = unknown + ? where name = ?",
                (moved[name], moved[name], name),
            )
        if rows:
            logger.warning(
                "%s: %d calls of a process that died have an unknown outcome; they count at their "
                "full reservation until they are asked again",
                self.url, len(rows),
            )  # fmt: skip
        return len(rows)


def _settled(settlement: Settlement, call: NewCall | CallRow) -> tuple[Any, ...]:
    cost, sent_at, due_at = settlement.cost_nano, None, None
    is_mine = isinstance(call, NewCall)
    if settlement.sent_at and is_mine:
        sent_at = iso(settlement.sent_at)
        due_at = iso(settlement.sent_at + timedelta(seconds=call.timeout_s))
    return (
        settlement.state, cost, settlement.n_attempts, int(settlement.is_lasting),
        int(cost > (call.reserved_nano if is_mine else call.reserved)), iso(now()),
        settlement.error_code, settlement.row, settlement.response, settlement.generation_id,
        settlement.disputed, sent_at, due_at,
    )  # fmt: skip


def _recovered(call_id: int) -> tuple[Any, ...]:
    return ("recovered", 0, 1, 0, 0, iso(now()), *[None] * 7, call_id)
