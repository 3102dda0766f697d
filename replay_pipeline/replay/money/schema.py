"""The tables of a ledger, their version, and the interface that it needs from a database."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

SCHEMA = """
create table if not exists ledger(key text primary key, value text not null);
create table if not exists owners(id {serial}, opened_at text not null, host text not null);
create table if not exists scopes(
  name text primary key,
  limit_nano bigint,
  ceiling_nano bigint,
  carried_nano bigint not null default 0,
  spent bigint not null default 0,
  held bigint not null default 0,
  unknown bigint not null default 0,
  overrun bigint not null default 0,
  constraint never_passed check (ceiling_nano is null or spent + held + unknown - overrun <= ceiling_nano),
  constraint never_negative check (spent >= 0 and held >= 0 and unknown >= 0 and overrun >= 0)
);
create table if not exists calls(
  id bigint primary key,
  request_sha text not null,
  state_id text not null,
  teacher text not null,
  model text not null,
  run_id text not null,
  trace_batch text,
  scopes text not null,
  owner bigint not null,
  state text not null check (state in ('open', 'answered', 'failed', 'unknown', 'recovered')),
  reserved bigint not null,
  cost bigint not null default 0,
  n_attempts integer not null default 0,
  is_lasting integer not null default 0,
  is_overrun integer not null default 0,
  intent_at text not null,
  sent_at text,
  due_at text,
  body_sha text,
  settled_at text,
  error_code text,
  disputed text,
  generation_id text,
  row {bytes},
  response {bytes}
);
create table if not exists limits(
  set_at text not null, scope text not null, limit_nano bigint, set_by text not null
);
create index if not exists calls_by_request on calls(request_sha);
create index if not exists calls_by_owner on calls(owner) where state = 'open';
create index if not exists calls_by_state on calls(state_id, teacher);
"""
"""The sums `spent`, `held` (open calls), `unknown` (lost calls at their reservation), and `overrun`
(cost above a reservation, part of `spent`) are in nano-dollars. By the check, the database itself
refuses a reservation above a limit, from any process. `limit_nano` is the limit that was set.
`ceiling_nano` is the one that the check uses; it is higher if a limit was lowered below what was in
use. `limits` records every change of a limit, and who made it.

The last byte of a call left no later than `sent_at`, and after `due_at` the call can't be running
any more. `body_sha` is the hash of the request body. `disputed` says why the reported cost wasn't
believed; the call is then booked at its bound."""

SCHEMA_VERSION = "3"

Row = tuple[Any, ...]


class Database(Protocol):
    """One connection. SQL statements use `?` for parameters."""

    name: str

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run one statement and return its rows."""
        ...

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run one statement once per row of parameters."""
        ...

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a write transaction, which commits at the end and rolls back on an error."""
        yield

    def claim(self, owner: int) -> bool:
        """Take the lock that marks `owner` as alive. Return false if another process holds it."""
        ...

    def is_alive(self, owner: int) -> bool:
        """Return whether another process holds the lock of `owner`."""
        ...

    def close(self) -> None:
        """Close the connection and release the lock."""
        ...
