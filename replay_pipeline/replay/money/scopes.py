"""Money limits, and the money spent, held, and unknown under each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replay_pipeline.errors import LedgerError
from replay_pipeline.replay.dialects.prices import usd
from replay_pipeline.replay.money.calls import (
    DisputedCall,
    LostCall,
    NewCall,
    Settlement,
    decode_row,
    encode_row,
)
from replay_pipeline.replay.money.lookups import (
    SEPARATOR,
    CallRow,
    chunks,
    iso,
    load_calls,
    marks,
    now,
)
from replay_pipeline.replay.money.schema import Database


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
    by: str | None = None,
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
        if by is not None and limit != scope.limit:
            database.query(
                "insert into limits(set_at, scope, limit_nano, set_by) values(?, ?, ?, ?)",
                (iso(now()), name, limit, by),
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


def unknown_calls(database: Database, ids: Sequence[int]) -> list[CallRow]:
    """Return the lost calls among these."""
    return [call for call in load_calls(database, ids).values() if call.state == "unknown"]


def count_under(database: Database, call: CallRow, scope: str) -> int:
    """Count a lost call under one more scope, and return its reservation."""
    scopes = SEPARATOR.join((*call.scopes, scope))
    database.query("update calls set scopes = ? where id = ?", (scopes, call.id))
    return call.reserved


def end_dispute(database: Database, call: DisputedCall, cost_nano: int) -> None:
    """Book a disputed call at `cost_nano` for good, in its row and all its scopes."""
    [(scopes, reserved, cost, row)] = database.query(
        "select scopes, reserved, cost, row from calls where id = ?", (call.call_id,)
    )
    names = sorted(scopes.split(SEPARATOR))
    load_scopes(database, names)  # locked in order, as everywhere
    over = max(0, cost_nano - reserved) - max(0, cost - reserved)
    for name in names:
        database.query(
            "update scopes set spent = spent + ?, overrun = overrun + ? where name = ?",
            (cost_nano - cost, over, name),
        )
    answer = replace(decode_row(bytes(row)), cost_usd=usd(cost_nano))
    database.query(
        "update calls set disputed = null, cost = ?, is_overrun = ?, row = ? where id = ?",
        (cost_nano, int(cost_nano > reserved), encode_row(answer), call.call_id),
    )
