"""The ledger: no limit is ever passed, no paid answer is lost, nothing is paid twice.

Before a request leaves, the most it can cost is reserved and the intent is on disk; after it, the
real cost settles the reservation together with the answer, in one transaction. Every limit is a
scope (`run:…`, `day:…`, `teacher:…`, `partition:…`, `tag:…`), and for each of them

    spent + held + unknown <= limit

holds at every instant, across processes: `held` is reserved by calls in flight, `unknown` by calls
whose process died before it knew their outcome. A cost above its reservation is booked as it is
and flagged (`overrun`); no further reservation is made above the limit.

One thread writes. It takes whatever has been asked since its last transaction and commits it as
one, so that a hundred calls share one wait for the disk.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.database import Database, connect

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCall:
    """A call about to be made, and the most it can cost."""

    request_sha: str
    state_id: str
    teacher: str
    model: str
    run_id: str
    scopes: tuple[str, ...]
    reserved_nano: int
    partition: str | None = None
    is_patient: bool = True
    """Wait while money that is held may come back; otherwise be refused at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """The money is held and the intent is on disk: the request may leave."""

    call_id: int
    reserved_nano: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The call can never fit under `scope`, or waiting for it was given up."""

    scope: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A call that was decided before."""

    request_sha: str
    run_id: str
    cost_nano: int
    row: bytes
    """JSON of the `TeacherAction`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A call that was sent and whose outcome is not known."""

    call_id: int
    reserved_nano: int
    run_id: str
    sent_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """What became of a reserved call."""

    call_id: int
    state: Literal["answered", "failed", "unknown", "withdrawn"]
    """`withdrawn`: nothing was sent; the call is forgotten."""
    cost_nano: int = 0
    n_attempts: int = 1
    is_lasting: bool = False
    error_code: str | None = None
    row: bytes | None = None
    response: bytes | None = None
    recovers: int | None = None
    """A lost call that turned out to be the one that was paid: its reservation is released."""


@dataclass(slots=True)
class _Scope:
    limit: int | None
    spent: int
    held: int
    unknown: int
    overrun: int

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.spent + self.held + self.unknown + amount <= self.limit

    def can_ever_fit(self, amount: int) -> bool:
        return self.limit is None or self.spent + self.unknown + amount <= self.limit


@dataclass(slots=True)
class _Waiting:
    call: NewCall
    future: "Future[Reserved | Refused | Known]"


@dataclass(slots=True)
class _Settling:
    settlement: Settlement
    future: "Future[None]"


@dataclass(slots=True)
class _Doing:
    action: Callable[[Database], Any]
    future: "Future[Any]"


_STOP = object()
_SEPARATOR = "\n"
_POLL_S = 0.05
_ORPHAN_CHECKS_EVERY = 20


class Ledger:
    """One open ledger. Every method may be called from any thread and gives back a future."""

    def __init__(self, url: str | Path, *, is_durable: bool = True) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: deque[_Waiting] = deque()
        self._give_up: set[str] = set()
        self._n_issued = 0
        self._n_polls = 0
        self._database = connect(url, is_durable=is_durable)
        self.url = self._database.name
        try:
            self.owner = self._register()
            self._adopt_orphans(self._database)
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
        """Finish what was asked, then close. Calls still open become unknown."""
        if self._thread.is_alive():
            self._queue.put(_STOP)
            self._thread.join()

    def reserve(self, call: NewCall) -> "Future[Reserved | Refused | Known]":
        """Hold `call.reserved_nano` in every scope of `call`, first come first served.

        Waits while money that is held may come back. Gives back `Refused` once the call can
        never fit, and `Known` when the same request was answered meanwhile; a request that
        another living process has in flight is waited for.
        """
        future: Future[Reserved | Refused | Known] = Future()
        self._queue.put(_Waiting(call, future))
        return future

    def settle(self, settlement: Settlement) -> "Future[None]":
        """Book what a call cost together with its answer; done once both are on disk."""
        future: Future[None] = Future()
        self._queue.put(_Settling(settlement, future))
        return future

    def do(self, action: Callable[[Database], T]) -> "Future[T]":
        """Run `action` on the database, in a transaction of its own."""
        future: Future[T] = Future()
        self._queue.put(_Doing(action, future))
        return future

    def give_up(self, run_id: str) -> None:
        """Refuse every reservation that `run_id` waits for, now and later."""

        def forget(_: Database) -> None:
            self._give_up.add(run_id)

        self.do(forget)

    def open_scopes(self, limits: Mapping[str, int | None]) -> None:
        """Create scopes or change their limits, in nano-dollars; `None` counts without a limit."""
        self.do(lambda database: _open_scopes(database, limits)).result()

    def open_run(
        self, run_id: str, limit: int, *, carried_nano: int = 0, lost: Sequence[Lost] = ()
    ) -> None:
        """Create the scope of a run.

        Args:
            run_id: names the run; processes that share it share its limit.
            limit: nano-dollars.
            carried_nano: what earlier runs paid for answers that this run takes over.
            lost: calls of earlier runs that this run asks again; until it is known what became
                of them they count here too.
        """
        name = f"run:{run_id}"

        def open_it(database: Database) -> None:
            _open_scopes(database, {name: max(0, limit - carried_nano)}, carried_nano)
            for each in lost:
                if each.run_id == run_id:
                    continue
                changed = database.query(
                    "update calls set scopes = scopes || ? where id = ? and state = 'unknown' "
                    "and scopes not like ? returning reserved",
                    (_SEPARATOR + name, each.call_id, f"%{name}%"),
                )
                for (reserved,) in changed:
                    database.query(
                        "update scopes set unknown = unknown + ?, ceiling_nano = "
                        "ceiling_nano + ? where name = ?",
                        (reserved, reserved, name),
                    )

        self.do(open_it).result()

    def lookup(self, request_shas: Iterable[str]) -> tuple[dict[str, Known], dict[str, list[Lost]]]:
        """What is known of these requests: decided calls, and lost ones by request."""
        shas = list(dict.fromkeys(request_shas))
        return self.do(lambda database: find_calls(database, shas)).result()

    # --- the writer thread -------------------------------------------------------------------

    def _register(self) -> int:
        with self._database.transaction():
            [(owner,)] = self._database.query(
                "insert into owners(opened_at, host) values(?, ?) returning id",
                (_now(), socket.gethostname()),
            )
        self._database.claim(owner)
        return owner

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
        """Settle and reserve in one transaction; tell nobody before it is committed."""
        if not settling and not self._waiting:
            return
        told: list[tuple[Future[Any], Any]] = []
        still_waiting = deque(self._waiting)
        try:
            with self._database.transaction():
                calls = self._calls_of(settling)
                scopes = _Scopes(self._database)
                # All scopes are locked at once and in order: no two processes wait in a circle.
                scopes.load(
                    name
                    for each in [*calls.values(), *(waiting.call for waiting in self._waiting)]
                    for name in each.scopes
                )
                self._settle_all(scopes, calls, settling)
                self._reserve_all(scopes, still_waiting, told)
                scopes.save()
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            for each in [*settling, *self._waiting]:
                each.future.set_exception(error)
            self._waiting.clear()
            return
        self._waiting = still_waiting
        for each in settling:
            each.future.set_result(None)
        for future, result in told:
            future.set_result(result)

    def _calls_of(self, settling: list[_Settling]) -> "dict[int, _Call]":
        settlements = [each.settlement for each in settling]
        ids = [s.call_id for s in settlements] + [s.recovers for s in settlements if s.recovers]
        return _load_calls(self._database, ids)

    def _settle_all(
        self, scopes: "_Scopes", calls: "dict[int, _Call]", settling: list[_Settling]
    ) -> None:
        now = _now()
        rows: list[tuple[Any, ...]] = []
        for each in (each.settlement for each in settling):
            call = calls.get(each.call_id)
            if call is None or call.state not in ("open", "unknown"):
                raise LedgerError(f"{self.url}: call {each.call_id} is not open")
            scopes.settle(call, each)
            rows.append(
                (each.state, each.cost_nano, each.n_attempts, int(each.is_lasting),
                 int(each.cost_nano > call.reserved), now, each.error_code, each.row,
                 each.response, each.call_id)
            )  # fmt: skip
            lost = calls.get(each.recovers) if each.recovers else None
            if lost is not None and lost.state == "unknown":
                scopes.release(lost)
                rows.append(("recovered", 0, 1, 0, 0, now, None, None, None, lost.id))
        withdrawn = [(row[-1],) for row in rows if row[0] == "withdrawn"]
        rows = [row for row in rows if row[0] != "withdrawn"]
        if withdrawn:
            self._database.run_many("delete from calls where id = ?", withdrawn)
        if rows:
            self._database.run_many(
                "update calls set state = ?, cost = ?, n_attempts = ?, is_lasting = ?, "
                "is_overrun = ?, settled_at = ?, error_code = ?, row = ?, response = ? "
                "where id = ?",
                rows,
            )

    def _reserve_all(
        self, scopes: "_Scopes", waiting: deque[_Waiting], told: list[tuple[Future[Any], Any]]
    ) -> None:
        if not waiting:
            return
        decided, busy = _elsewhere(self._database, [each.call.request_sha for each in waiting])
        blocked: set[str] = set()
        rows = []
        now = _now()
        for _ in range(len(waiting)):
            each = waiting.popleft()
            call = each.call
            if known := decided.get(call.request_sha):
                told.append((each.future, known))
            elif call.run_id in self._give_up:
                told.append((each.future, Refused(scope="stopped")))
            elif call.request_sha in busy:
                waiting.append(each)
            elif scope := scopes.never(call):
                told.append((each.future, Refused(scope=scope)))
            elif (full := scopes.full(call)) or not blocked.isdisjoint(call.scopes):
                if not call.is_patient:
                    told.append((each.future, Refused(scope=full[0] if full else call.scopes[0])))
                    continue
                # First come, first served: whoever waits for a scope keeps later ones waiting.
                blocked.update(full if blocked.isdisjoint(call.scopes) else ())
                waiting.append(each)
            else:
                call_id = self._issue()
                scopes.hold(call)
                busy.add(call.request_sha)
                rows.append(
                    (call_id, call.request_sha, call.state_id, call.teacher, call.model,
                     call.run_id, call.partition, _SEPARATOR.join(call.scopes), self.owner,
                     call.reserved_nano, now)
                )  # fmt: skip
                reserved = Reserved(call_id=call_id, reserved_nano=call.reserved_nano)
                told.append((each.future, reserved))
        if rows:
            self._database.run_many(
                "insert into calls(id, request_sha, state_id, teacher, model, run_id, "
                "trace_batch, scopes, owner, reserved, intent_at, state) "
                "values(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'open')",
                rows,
            )

    def _issue(self) -> int:
        self._n_issued += 1
        return (self.owner << 32) + self._n_issued

    def _adopt_orphans(self, database: Database) -> int:
        """Mark the calls of dead owners as unknown; their reservations stay."""
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
            for name in names.split(_SEPARATOR):
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


@dataclass(frozen=True, slots=True)
class _Call:
    id: int
    state: str
    reserved: int
    scopes: tuple[str, ...]


@dataclass(slots=True)
class _Scopes:
    """The scopes that one transaction touches, changed in memory and saved once."""

    database: Database
    known: dict[str, _Scope] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def load(self, names: Iterable[str]) -> None:
        missing = sorted(set(names) - self.known.keys())
        if missing:
            self.known |= _load_scopes(self.database, missing)

    def settle(self, call: _Call, settlement: Settlement) -> None:
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

    def release(self, call: _Call) -> None:
        for name in call.scopes:
            self.known[name].unknown -= call.reserved
        self.changed.update(call.scopes)

    def never(self, call: NewCall) -> str | None:
        for name in call.scopes:
            if not self.known[name].can_ever_fit(call.reserved_nano):
                return name
        return None

    def full(self, call: NewCall) -> list[str]:
        return [name for name in call.scopes if not self.known[name].fits(call.reserved_nano)]

    def hold(self, call: NewCall) -> None:
        for name in call.scopes:
            self.known[name].held += call.reserved_nano
        self.changed.update(call.scopes)

    def save(self) -> None:
        if self.changed:
            self.database.run_many(
                "update scopes set spent = ?, held = ?, unknown = ?, overrun = ? where name = ?",
                [
                    (scope.spent, scope.held, scope.unknown, scope.overrun, name)
                    for name in sorted(self.changed)
                    for scope in (self.known[name],)
                ],
            )


def _open_scopes(
    database: Database, limits: Mapping[str, int | None], carried_nano: int = 0
) -> None:
    for name, limit in sorted(limits.items()):
        database.query(
            "insert into scopes(name, limit_nano, ceiling_nano) values(?, ?, ?) "
            "on conflict(name) do nothing",
            (name, limit, limit),
        )
        [scope] = _load_scopes(database, [name]).values()
        if limit is None and name.startswith("day:"):
            limit = scope.limit  # a run without a limit of its own does not lift that of the day
        in_use = scope.spent + scope.held + scope.unknown - scope.overrun
        database.query(
            "update scopes set limit_nano = ?, ceiling_nano = ?, carried_nano = ? where name = ?",
            (limit, None if limit is None else max(limit, in_use), carried_nano, name),
        )


def find_calls(
    database: Database, request_shas: Sequence[str]
) -> tuple[dict[str, Known], dict[str, list[Lost]]]:
    """Decided calls, and lost ones, by request."""
    decided: dict[str, Known] = {}
    lost: dict[str, list[Lost]] = defaultdict(list)
    for chunk in _chunks(request_shas):
        rows = database.query(
            "select id, request_sha, run_id, state, reserved, cost, row, intent_at from calls "
            "where (state in ('answered', 'unknown') or (state = 'failed' and is_lasting = 1)) "
            f"and request_sha in ({_marks(chunk)}) order by id",
            chunk,
        )
        for call_id, sha, run_id, state, reserved, cost, row, intent_at in rows:
            if state == "unknown":
                lost[sha].append(
                    Lost(
                        call_id=call_id,
                        reserved_nano=reserved,
                        run_id=run_id,
                        sent_at=datetime.fromisoformat(intent_at),
                    )
                )
            else:
                decided[sha] = Known(
                    request_sha=sha, run_id=run_id, cost_nano=cost, row=bytes(row or b"null")
                )
    return decided, dict(lost)


BATCH_KEY = "batch:"
"""Under this key and its name the ledger notes a batch that was handed in."""


def batched_requests(database: Database) -> set[str]:
    """Requests that wait in a batch for their answer."""
    rows = database.query("select value from ledger where key like ?", (f"{BATCH_KEY}%",))
    return {sha for (value,) in rows for sha in msgspec.json.decode(value)["calls"]}


def _elsewhere(database: Database, shas: list[str]) -> tuple[dict[str, Known], set[str]]:
    """Requests answered meanwhile, and requests that are in flight."""
    decided: dict[str, Known] = {}
    busy: set[str] = set()
    for chunk in _chunks(shas):
        rows = database.query(
            "select request_sha, run_id, state, cost, row from calls "
            f"where state in ('answered', 'open') and request_sha in ({_marks(chunk)})",
            chunk,
        )
        for sha, run_id, state, cost, row in rows:
            if state == "open":
                busy.add(sha)
            else:
                decided[sha] = Known(request_sha=sha, run_id=run_id, cost_nano=cost, row=bytes(row))
    return decided, busy


def _load_scopes(database: Database, names: Sequence[str]) -> dict[str, _Scope]:
    rows: list[Any] = []
    lock = " for update" if database.name.startswith("postgres") else ""
    for chunk in _chunks(names):
        rows += database.query(
            "select name, limit_nano, spent, held, unknown, overrun from scopes "
            f"where name in ({_marks(chunk)}) order by name{lock}",
            chunk,
        )
    if len(rows) != len(names):
        missing = set(names) - {row[0] for row in rows}
        raise LedgerError(f"{database.name}: no scope {', '.join(sorted(missing))}")
    return {name: _Scope(*numbers) for name, *numbers in rows}


def _load_calls(database: Database, ids: Sequence[int]) -> dict[int, _Call]:
    calls = {}
    for chunk in _chunks(ids):
        rows = database.query(
            f"select id, state, reserved, scopes from calls where id in ({_marks(chunk)})", chunk
        )
        for call_id, state, reserved, scopes in rows:
            calls[call_id] = _Call(call_id, state, reserved, tuple(scopes.split(_SEPARATOR)))
    return calls


def _chunks(items: Iterable[Any], size: int = 500) -> Iterable[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _marks(chunk: Sequence[Any]) -> str:
    return ",".join("?" * len(chunk))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def encode_row(row: Any) -> bytes:
    """A `TeacherAction` as the ledger keeps it."""
    return msgspec.json.encode(row)
