"""The ledger: no limit is ever passed, no paid answer is lost, nothing is paid twice.

Before a request leaves, the ledger reserves the most that it can cost and writes the intent to
disk. Afterwards one transaction stores the answer and replaces the reservation by the real cost.
Every limit is a scope (`run:…`, `day:…`, `night:…`, `teacher:…`, `partition:…`, `tag:…`), and for
each of them

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
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from replay_pipeline.errors import LedgerError
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
from replay_pipeline.replay.money.database import connect
from replay_pipeline.replay.money.lookups import find_calls, find_lost, iso, now
from replay_pipeline.replay.money.schema import Database
from replay_pipeline.replay.money.scopes import count_under, load_scopes, open_scopes, unknown_calls
from replay_pipeline.replay.money.writer import Leaving, Settling, Waiting, Writer

T = TypeVar("T")


@dataclass(slots=True)
class _Doing:
    action: Callable[[Database], Any]
    future: "Future[Any]"


_STOP = object()
_POLL_S = 0.05
_ORPHAN_CHECKS_EVERY = 20


class Ledger:
    """One open ledger. You can call every method from any thread, and each returns a future."""

    def __init__(self, url: str | Path, *, is_durable: bool = True) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._n_polls = 0
        self._database = connect(url, is_durable=is_durable)
        self.url = self._database.name
        try:
            self.owner = self._register()
            self._writer = Writer(self._database, self.owner)
            with self._database.transaction():
                self._writer.adopt_orphans(self._database)
            self._writer.book_unbooked()
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
        self._queue.put(Waiting(call, future))
        return future

    def settle(self, settlement: Settlement) -> "Future[None]":
        """Book the cost of a call together with its answer. Returns once both are on disk."""
        future: Future[None] = Future()
        self._queue.put(Settling(settlement, future))
        return future

    def sending(self, call_id: int, sent_by: datetime) -> "Future[None]":
        """Record that a call may leave later than its reservation said, up to `sent_by`."""
        future: Future[None] = Future()
        self._queue.put(Leaving(call_id, sent_by, future))
        return future

    def do(self, action: Callable[[Database], T]) -> "Future[T]":
        """Run `action` on the database, in a transaction of its own."""
        future: Future[T] = Future()
        self._queue.put(_Doing(action, future))
        return future

    def give_up(self, run_id: str) -> None:
        """Refuse every reservation that `run_id` waits for, now and later."""

        def forget(_: Database) -> None:
            self._writer.give_up(run_id)

        self.do(forget)

    def open_scopes(
        self, names: Iterable[str], limits: Mapping[str, int | None], *, by: str
    ) -> None:
        """Create scopes, and set or remove the named limits.

        The ledger keeps limits: a scope that `limits` doesn't name keeps its limit.

        Args:
            names: scopes to count under. New ones start without a limit.
            limits: nano-dollars by scope. `None` removes a limit.
            by: the run or command that sets them. The table `limits` keeps every change.
        """
        self.do(lambda database: open_scopes(database, names, limits, by=by)).result()

    def open_run(
        self, run_id: str, limit: int, *, carried_nano: int = 0, lost: Iterable[LostCall] = ()
    ) -> None:
        """Create the scope of a run.

        Args:
            run_id: name of the run. Processes with the same name share its limit.
            limit: limit in nano-dollars.
            carried_nano: cost of the earlier answers that this run reuses.
            lost: lost calls of earlier runs for the same requests. They count here too, until their
                outcome is known.
        """
        name = f"run:{run_id}"

        def open_it(database: Database) -> None:
            limits = {name: max(0, limit - carried_nano)}
            open_scopes(database, (), limits, carried_nano=carried_nano)
            adopted = [each.call_id for each in lost if each.run_id != run_id]
            reserved = sum(
                count_under(database, row, name)
                for row in unknown_calls(database, adopted)
                if name not in row.scopes
            )
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

    def lookup(self, request_shas: Iterable[str], until: str | None = None) -> LedgerEntries:
        """Find the answers and lost calls of these requests, as they were at a time (ISO 8601, UTC)."""
        shas = list(dict.fromkeys(request_shas))
        return self.do(lambda database: find_calls(database, shas, until)).result()

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

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = self._next_batch()
            if _STOP in batch:
                is_open = False
                batch = [each for each in batch if each is not _STOP]
            self._writer.waiting.extend(each for each in batch if isinstance(each, Waiting))
            for each in batch:
                if isinstance(each, _Doing):
                    self._do(each)
            self._writer.note_leaving([each for each in batch if isinstance(each, Leaving)])
            self._writer.book([each for each in batch if isinstance(each, Settling)])
        for waiting in self._writer.waiting:
            waiting.future.set_exception(LedgerError(f"{self.url}: the ledger was closed"))
        with contextlib.suppress(LedgerError), self._database.transaction():
            self._writer.lose(self._database, self.owner)
        self._database.close()

    def _next_batch(self) -> list[Any]:
        batch: list[Any] = []
        with contextlib.suppress(queue.Empty):
            batch.append(self._queue.get(timeout=_POLL_S if self._writer.waiting else None))
            while True:
                batch.append(self._queue.get_nowait())
        if not batch:
            self._n_polls += 1
            if self._n_polls % _ORPHAN_CHECKS_EVERY == 0:
                batch.append(_Doing(self._writer.adopt_orphans, Future()))
        return batch

    def _do(self, doing: _Doing) -> None:
        try:
            with self._database.transaction():
                result = doing.action(self._database)
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            doing.future.set_exception(error)
        else:
            doing.future.set_result(result)
