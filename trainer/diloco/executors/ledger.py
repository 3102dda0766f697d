"""The ledger of a launch, which reserves money before each start and settles it after the end.

It has the form of the ledger of replayed calls: nano-dollars, `spent` and `held` under a ceiling
that the database itself enforces, and one row per start with its reservation and cost.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import BudgetReachedError

NANO = 1_000_000_000

SCHEMA = """
create table if not exists ledger(key text primary key, value text not null);
create table if not exists scopes(
  name text primary key,
  ceiling_nano bigint,
  spent bigint not null default 0,
  held bigint not null default 0,
  overrun bigint not null default 0,
  constraint never_passed check (ceiling_nano is null or spent + held - overrun <= ceiling_nano)
);
create table if not exists jobs(
  rank integer not null,
  attempt integer not null,
  handle text not null,
  state text not null check (state in ('open', 'settled')),
  reserved bigint not null,
  cost bigint not null default 0,
  outcome text not null default '',
  intent_at real not null,
  sent_at real,
  settled_at real,
  primary key(rank, attempt)
);
insert or ignore into scopes(name) values('launch');
"""


@dataclass(frozen=True)
class LedgerRow:
    """One start of a replica: its launcher, its reservation and cost in dollars, and its end."""

    rank: int
    attempt: int
    handle: str
    is_open: bool
    reserved_usd: float
    cost_usd: float
    outcome: str
    intent_at: float
    """Time of the reservation, in seconds since the epoch."""
    sent_at: float | None
    """Time of the platform's answer. Without it, there may or may not be a job."""


class JobLedger:
    """The starts of one launch in a file, which any watching process can read."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.executescript(f"pragma synchronous=full;{SCHEMA}")

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def remember(self, key: str, value: str) -> str:
        """Store a value under a key unless the key has one, and return the stored value."""
        self._database.execute("insert or ignore into ledger values(?, ?)", (key, value))
        return self.recall(key) or value

    def put(self, key: str, value: str) -> None:
        """Store a value under a key, and replace any earlier one."""
        self._database.execute("insert or replace into ledger values(?, ?)", (key, value))

    def recall(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        found = self._database.execute("select value from ledger where key=?", (key,)).fetchone()
        return found[0] if found else None

    def set_ceiling(self, usd: float | None) -> None:
        """Set the ceiling, in dollars. If it is already exceeded, no start is allowed."""
        # SQL's max is null if one of its arguments is.
        nano = None if usd is None else round(usd * NANO)
        self._database.execute(
            "update scopes set ceiling_nano = max(?, spent + held - overrun)", (nano,)
        )

    def totals_usd(self) -> tuple[float, float, float | None]:
        """Return the money spent, the money reserved for open starts, and the ceiling, in dollars."""
        spent, held, ceiling = self._database.execute(
            "select spent, held, ceiling_nano from scopes"
        ).fetchone()
        return spent / NANO, held / NANO, None if ceiling is None else ceiling / NANO

    def reserve(self, rank: int, attempt: int, handle: str, usd: float, now: float) -> None:
        """Reserve the most that a start can cost, before it is made.

        Raises:
            BudgetReachedError: The ceiling has no room for it.
        """
        nano = int(usd * NANO)
        try:
            with self._database:
                self._database.execute("begin immediate")
                self._database.execute(
                    "insert into jobs(rank, attempt, handle, state, reserved, intent_at) "
                    "values(?, ?, ?, 'open', ?, ?)",
                    (rank, attempt, handle, nano, now),
                )
                self._database.execute("update scopes set held = held + ?", (nano,))
        except sqlite3.IntegrityError as error:
            spent, held, ceiling = self.totals_usd()
            raise BudgetReachedError(
                f"replica {rank} (attempt {attempt}) may cost ${usd:.2f}, and of max_usd="
                f"{ceiling} ${spent:.2f} are spent and ${held:.2f} held for running replicas: raise --max-usd, and run the same command to continue"
            ) from error

    def note_started(self, rank: int, attempt: int, handle: str, now: float) -> None:
        """Record the platform's name of a start."""
        self._database.execute(
            "update jobs set handle=?, sent_at=? where rank=? and attempt=?",
            (handle, now, rank, attempt),
        )

    def settle(self, rank: int, attempt: int, usd: float, outcome: str, now: float) -> None:
        """Replace a start's reservation by its cost. A settled start stays as it is."""
        with self._database:
            self._database.execute("begin immediate")
            row = self._database.execute(
                "select reserved from jobs where rank=? and attempt=? and state='open'",
                (rank, attempt),
            ).fetchone()
            if row is None:
                return
            cost = round(usd * NANO)
            self._database.execute(
                "update jobs set state='settled', cost=?, outcome=?, settled_at=? "
                "where rank=? and attempt=?",
                (cost, outcome, now, rank, attempt),
            )
            self._database.execute(
                "update scopes set held=held-?, spent=spent+?, overrun=overrun+? "
                "where name='launch'",
                (row[0], cost, max(0, cost - row[0])),
            )

    def charge(self, name: str, handle: str, usd: float) -> None:
        """Count once what a job has cost for which nothing was reserved."""
        with self._database:
            self._database.execute("begin immediate")
            new = self._database.execute(
                "insert or ignore into ledger values(?, ?)", (name, handle)
            )
            if new.rowcount:
                nano = round(usd * NANO)
                self._database.execute(
                    "update scopes set spent=spent+?, overrun=overrun+?", (nano, nano)
                )

    def row(self, rank: int, attempt: int) -> LedgerRow | None:
        """Return one start, if there is one."""
        return next(
            (row for row in self.rows() if (row.rank, row.attempt) == (rank, attempt)), None
        )

    def rows(self) -> list[LedgerRow]:
        """Return all starts, by rank and attempt."""
        found = self._database.execute(
            "select rank, attempt, handle, state = 'open', reserved, cost, outcome, intent_at, sent_at "
            "from jobs order by rank, attempt"
        ).fetchall()
        return [
            LedgerRow(rank, attempt, handle, bool(is_open), held / NANO, cost / NANO, *times)
            for rank, attempt, handle, is_open, held, cost, *times in found
        ]
