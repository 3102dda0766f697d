"""The work of the ledger's one writing thread: many reservations and settlements per transaction."""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.money.calls import (
    InDoubt,
    Known,
    LostCall,
    NewCall,
    Refused,
    Reserved,
    Settlement,
)
from replay_pipeline.replay.money.lookups import (
    SEPARATOR,
    CallRow,
    elsewhere,
    find_lost,
    iso,
    load_calls,
    now,
)
from replay_pipeline.replay.money.schema import Database
from replay_pipeline.replay.money.scopes import Scopes, open_scopes
from replay_pipeline.replay.money.unbooked import Pair, Unbooked, name_of

logger = logging.getLogger(__name__)

_BOOKED_KEY = "unbooked:"
"""Under this key and its name the ledger notes an answer of a side file that it has booked."""
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


@dataclass(slots=True)
class Waiting:
    """A call that waits for its reservation."""

    call: NewCall
    future: "Future[Reserved | Refused | Known | InDoubt]"


@dataclass(slots=True)
class Settling:
    """A call that is to be settled."""

    settlement: Settlement
    future: "Future[None]"


@dataclass(slots=True)
class Leaving:
    """A call that leaves later than its reservation said."""

    call_id: int
    sent_by: datetime
    future: "Future[None]"


class Writer:
    """The writer that settles and reserves. All of it runs in the thread that writes the ledger.

    Args:
        database: the ledger.
        owner: this process's name in the ledger.
    """

    def __init__(self, database: Database, owner: int) -> None:
        self._database = database
        self._owner = owner
        self.waiting: deque[Waiting] = deque()
        """Calls that wait for money, or for another process."""
        self._given_up: set[str] = set()
        self._n_issued = 0
        self._in_flight: dict[int, NewCall] = {}
        self._unbooked = Unbooked(database.name, owner)

    def give_up(self, run_id: str) -> None:
        """Refuse every reservation that a run waits for, now and later."""
        self._given_up.add(run_id)

    def note_leaving(self, leaving: list[Leaving]) -> None:
        """Record the time until which calls may leave."""
        if not leaving:
            return
        rows = [
            (
                iso(each.sent_by),
                iso(each.sent_by + timedelta(seconds=call.timeout_s)),
                each.call_id,
            )
            for each in leaving
            if (call := self._in_flight.get(each.call_id))
        ]
        try:
            with self._database.transaction():
                self._database.run_many(_SENDING, rows)
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            for each in leaving:
                each.future.set_exception(error)
        else:
            for each in leaving:
                each.future.set_result(None)

    def book(self, settling: list[Settling]) -> None:
        """Settle and reserve in one transaction. Callers get their results after the commit."""
        if not settling and not self.waiting:
            return
        try:
            self._transact(settling)
        except Exception as error:  # noqa: BLE001 (raised again where the result is awaited)
            for waiting in self.waiting:
                waiting.future.set_exception(error)
            was_alone, self.waiting = not self.waiting, deque()
            if settling and was_alone:
                self._keep(settling, error)
            else:
                # What is paid for must not fail because a reservation did.
                self.book(settling)

    def _transact(self, settling: list[Settling]) -> None:
        told: list[tuple[Future[Any], Any]] = []
        still_waiting = deque(self.waiting)
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
        self.waiting = still_waiting
        for each in settling:
            self._in_flight.pop(each.settlement.call_id, None)
            each.future.set_result(None)
        for future, result in told:
            future.set_result(result)

    def _keep(self, settling: list[Settling], error: Exception) -> None:
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

    def book_unbooked(self) -> None:
        """Book the answers that an earlier process could not book, each only once."""
        with self._database.transaction():
            for path, pairs in self._unbooked.left_behind(self._database.is_alive):
                self._book_kept(self._not_yet_booked(pairs))
                path.unlink(missing_ok=True)
                logger.warning("%s: booked %d answers of %s", self._database.name, len(pairs), path)

    def _not_yet_booked(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Leave out what a process booked that died before its file was gone."""
        return [
            pair
            for pair in pairs
            if self._database.query(
                "insert into ledger(key, value) values(?, ?) on conflict(key) do nothing returning key",
                (f"{_BOOKED_KEY}{name_of(pair)}", iso(now())),
            )
        ]

    def _book_kept(self, pairs: Sequence[Pair]) -> None:
        known = load_calls(self._database, [settlement.call_id for _, settlement in pairs])
        here = [
            Settling(settlement, Future())
            for call, settlement in pairs
            if (found := known.get(settlement.call_id))
            and found.request_sha == call.request_sha
            and found.state in ("open", "unknown")
        ]
        scopes = Scopes(self._database)
        calls = self._calls_of(here)
        scopes.load(name for call in calls.values() for name in call.scopes)
        self._settle_all(scopes, calls, here)
        scopes.save()
        for call, settlement in pairs:
            found = known.get(settlement.call_id)
            if found is None or found.request_sha != call.request_sha:
                self._book_of_another_ledger(call, settlement)

    def _book_of_another_ledger(self, call: NewCall, settlement: Settlement) -> None:
        """Book an answer whose ledger was lost: its money is spent, whatever the limits say."""
        if settlement.state not in ("answered", "failed"):
            return
        cost = settlement.cost_nano
        open_scopes(self._database, call.scopes, {})
        for name in sorted(call.scopes):
            self._database.query(
                "update scopes set spent = spent + ?, overrun = overrun + ? where name = ?",
                (cost, cost, name),
            )
        row = (*self._new_row(call, self._issue(), now()), "answered")
        self._database.run_many(_INSERT, [row])
        self._database.run_many(_SETTLE, [(*_settled(settlement, call), row[0])])

    def _calls_of(self, settling: list[Settling]) -> dict[int, CallRow]:
        settlements = [each.settlement for each in settling]
        ids = [s.call_id for s in settlements] + [i for s in settlements for i in s.recovers]
        return load_calls(self._database, ids)

    def _settle_all(
        self, scopes: Scopes, calls: dict[int, CallRow], settling: list[Settling]
    ) -> None:
        rows: list[tuple[Any, ...]] = []
        withdrawn: list[tuple[Any, ...]] = []
        settled: set[int] = set()
        for each in (each.settlement for each in settling):
            call = calls.get(each.call_id)
            if call is None or call.state not in ("open", "unknown"):
                if each.call_id not in self._in_flight or each.call_id in settled:
                    continue  # what became of it has been found out, perhaps by another process
                raise LedgerError(f"{self._database.name}: call {each.call_id} is not open")
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
        waiting: deque[Waiting],
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
                if not call.is_patient:
                    told.append((each.future, Refused(scope=full[0] if full else call.scopes[0])))
                    continue
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
            call.partition, SEPARATOR.join(call.scopes), self._owner, call.reserved_nano,
            iso(moment), iso(moment + call.slack),
            iso(moment + call.slack + timedelta(seconds=call.timeout_s)), call.body_sha,
        )  # fmt: skip

    def _issue(self) -> int:
        self._n_issued += 1
        return (self._owner << 32) + self._n_issued

    def adopt_orphans(self, database: Database) -> int:
        """Mark the calls of dead owners as unknown. Their reservations stay."""
        owners = database.query("select distinct owner from calls where state = 'open'")
        dead = [
            owner for (owner,) in owners if owner != self._owner and not database.is_alive(owner)
        ]
        return sum(self.lose(database, owner) for owner in dead)

    def lose(self, database: Database, owner: int) -> int:
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
                self._database.name, len(rows),
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
