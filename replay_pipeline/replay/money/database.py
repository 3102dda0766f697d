"""The ledger's database: its tables, SQLite for a path, PostgreSQL for a URL, and upgrades of older ledgers.

An owner is one open ledger. It counts as alive while it holds a lock. When the process dies for any
reason, the operating system (SQLite) or the database server (PostgreSQL) releases the lock.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.errors import ConfigError, LedgerError, MissingDependencyError
from replay_pipeline.replay.money.calls import decode_row
from replay_pipeline.storage.locks import FileLock, take_lock
from replay_pipeline.storage.permissions import make_private_file

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
create index if not exists calls_by_request on calls(request_sha);
create index if not exists calls_by_owner on calls(owner) where state = 'open';
create index if not exists calls_by_state on calls(state_id, teacher);
"""
"""The sums `spent`, `held` (open calls), `unknown` (lost calls at their reservation), and `overrun`
(cost above a reservation, part of `spent`) are in nano-dollars. By the check, the database itself
refuses a reservation above a limit, from any process. `limit_nano` is the limit that was set.
`ceiling_nano` is the one that the check uses; it is higher if a limit was lowered below what was in
use.

The last byte of a call left no later than `sent_at`, and after `due_at` the call can't be running
any more. `body_sha` is the hash of the request body. `disputed` says why the reported cost wasn't
believed; the call is then booked at its bound."""

SCHEMA_VERSION = "3"

Row = tuple[Any, ...]


_BUSY_S = 60.0
_POLL_S = 0.01


def connect(url: str | Path, *, is_durable: bool = True, is_read_only: bool = False) -> "Database":
    """Open the database at a path, `sqlite:///path` or `postgresql://...`, creating its tables.

    Args:
        url: a path or a database URL.
        is_durable: wait for the disk at each commit, so that commits survive a power failure.
        is_read_only: only read, which works on a read-only file system too.

    Raises:
        ConfigError: the URL has an unknown scheme.
        LedgerError: the database can't be opened, or isn't a ledger of this version.
        MissingDependencyError: the driver for PostgreSQL isn't installed.
    """
    text = str(url)
    if text.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        return _Postgres(text.replace("+psycopg://", "://"))
    if text.startswith("sqlite:///"):
        text = text.removeprefix("sqlite:///")
    elif "://" in text:
        raise ConfigError(
            f"ledger {_without_password(text)} must be a path, sqlite:///path, or postgresql://..."
        )
    return _Sqlite(Path(text), is_durable=is_durable, is_read_only=is_read_only)


def exists(url: str | Path) -> bool:
    """Return whether there is a ledger at `url`. A database server counts as one."""
    text = str(url).removeprefix("sqlite:///")
    return "://" in text or Path(text).exists()


def _connect_to_look(path: Path) -> sqlite3.Connection:
    """Open a database without writing to it or beside it.

    Raises:
        OperationalError: the database cannot be opened.
    """
    url = f"{path.absolute().as_uri()}?mode=ro"
    try:
        return _looked_at(url)
    except sqlite3.OperationalError:
        # On a read-only disk there can be no writer, unless its log has been left behind.
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise
        return _looked_at(f"{url}&immutable=1")


def _looked_at(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url, uri=True, timeout=_BUSY_S, check_same_thread=False)
    with _closed_on_error(connection):
        connection.execute("select count(*) from sqlite_master")
    return connection


@contextmanager
def _closed_on_error(connection: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def use_wal(connection: sqlite3.Connection, *, timeout_s: float) -> None:
    """Turn on the write-ahead log, so that readers and the writer don't wait for each other.

    If two connections open a new file at once, SQLite refuses one immediately, regardless of its
    timeout, because waiting with a read lock could be a deadlock. So this function retries.

    Raises:
        sqlite3.OperationalError: SQLite still refuses after `timeout_s`, or fails in another way.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("pragma journal_mode=wal")
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > until:
                raise
            time.sleep(_POLL_S)
        else:
            return


class _Sqlite:
    def __init__(self, path: Path, *, is_durable: bool, is_read_only: bool = False) -> None:
        self.name = str(path)
        self._path = path
        self._lock: FileLock | None = None
        self._file: tuple[int, int] | None = None
        try:
            if is_read_only:
                self._connection = _connect_to_look(path)
                with _closed_on_error(self._connection):
                    _check_version(self, is_read_only=True)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            make_private_file(path)
            self._connection = sqlite3.connect(
                path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False
            )
            with _closed_on_error(self._connection):
                use_wal(self._connection, timeout_s=_BUSY_S)
                self._connection.execute(f"pragma synchronous={'full' if is_durable else 'normal'}")
                with self.transaction():
                    _create(self, serial="integer primary key autoincrement", bytes_type="blob")
            file = path.stat()
            self._file = (file.st_dev, file.st_ino)
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"{path}: not a ledger that can be opened ({error}); check the path, its "
                "permissions and the free space"
            ) from error

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with self._translated():
            return self._connection.execute(sql, parameters).fetchall()

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        with self._translated():
            self._connection.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._check_file()
        with self._translated():
            self._connection.execute("begin immediate")
        try:
            self._check_file()  # it may be gone since, while another process held the lock
            yield
            with self._translated():
                self._connection.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("rollback")
            raise

    def _check_file(self) -> None:
        """Refuse to book into a file that nobody will find again: SQLite itself does not notice.

        Raises:
            LedgerError: the file was deleted or replaced.
        """
        try:
            file = self._path.stat()
        except OSError:
            file = None
        if self._file and (file is None or (file.st_dev, file.st_ino) != self._file):
            raise LedgerError(f"{self.name}: the ledger was deleted or replaced while it was open")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise LedgerError(f"{self.name}: the ledger refused a booking ({error})") from error
        except sqlite3.Error as error:
            raise LedgerError(
                f"{self.name}: cannot be read or written ({error}); check free space and permissions"
            ) from error

    def claim(self, owner: int) -> bool:
        try:
            self._lock = take_lock(self._lock_path(owner), mode=0o600)
        except OSError:  # a file system without locks
            return False
        return self._lock is not None

    def is_alive(self, owner: int) -> bool:
        path = self._lock_path(owner)
        if not path.exists():
            return False
        try:
            lock = take_lock(path, mode=0o600)
        except OSError:
            return True
        if lock is None:
            return True
        lock.release()
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        self._connection.close()
        if self._lock:
            self._lock.release()
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock = None

    def _lock_path(self, owner: int) -> Path:
        return self._path.with_name(f"{self._path.name}-owner-{owner}")


class _Postgres:
    _LOCK_CLASS = 0x5E91A4

    def __init__(self, url: str) -> None:
        self.name = _without_password(url)
        try:
            import psycopg  # noqa: PLC0415 (an optional dependency)
        except ImportError as error:
            raise MissingDependencyError(
                "a PostgreSQL ledger needs psycopg: pip install 'replay-pipeline[postgres]'"
            ) from error
        self._errors = psycopg.Error
        try:
            self._connection = psycopg.connect(url, autocommit=True)
            with _closed_on_error(self._connection), self.transaction():
                self._connection.execute("set lock_timeout = '60s'")
                self._connection.execute("select pg_advisory_xact_lock(%s)", [self._LOCK_CLASS])
                _create(
                    self,
                    serial="bigint generated always as identity primary key",
                    bytes_type="bytea",
                )
        except psycopg.Error as error:
            raise LedgerError(f"{self.name}: cannot be opened ({error})") from error

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        with self._translated():
            cursor = self._connection.execute(_percent(sql), parameters)
            return cursor.fetchall() if cursor.description else []

    def run_many(self, sql: str, rows: Sequence[Row]) -> None:
        with self._translated(), self._connection.cursor() as cursor:
            cursor.executemany(_percent(sql), rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._translated(), self._connection.transaction():
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LedgerError(f"{self.name}: cannot be read or written ({error})") from error

    def claim(self, owner: int) -> bool:
        [(is_mine,)] = self.query("select pg_try_advisory_lock(?, ?)", (self._LOCK_CLASS, owner))
        return is_mine

    def is_alive(self, owner: int) -> bool:
        [(is_free,)] = self.query("select pg_try_advisory_lock(?, ?)", (self._LOCK_CLASS, owner))
        if is_free:
            self.query("select pg_advisory_unlock(?, ?)", (self._LOCK_CLASS, owner))
        return not is_free

    def close(self) -> None:
        self._connection.close()


Database = _Sqlite | _Postgres
"""One connection. Statements use `?` for parameters. A transaction rolls back on an error. Whoever claims an
owner holds the lock that marks it as alive."""


def _create(database: Database, *, serial: str, bytes_type: str) -> None:
    for statement in SCHEMA.format(serial=serial, bytes=bytes_type).split(";"):
        if statement.strip():
            database.query(statement)
    database.query(
        "insert into ledger(key, value) values('schema_version', ?) on conflict(key) do nothing",
        (SCHEMA_VERSION,),
    )
    _check_version(database)


def _check_version(database: Database, *, is_read_only: bool = False) -> None:
    version = _version(database)
    while version in UPGRADES and not is_read_only:
        UPGRADES[version](database)
        version = _version(database)
    if version != SCHEMA_VERSION:
        advice = "; the next replay brings it up to date" if version in UPGRADES else ""
        raise LedgerError(
            f"{database.name}: the ledger has version {version}, but this program uses version {SCHEMA_VERSION}{advice}"
        )


def _version(database: Database) -> str:
    [(version,)] = database.query("select value from ledger where key = 'schema_version'")
    return version


def _percent(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    secret, at, host = rest.rpartition("@")
    return f"{scheme}://{secret.partition(':')[0]}{at}{host}"


_LONGEST_CALL = timedelta(seconds=600)
"""Version 1 did not keep how long a call may take; this was the default of every teacher."""


def from_version_1(database: Database) -> None:
    """Add the columns of version 2. A row that version 1 stored unreadable is asked again; its cost stays."""
    for column in ("due_at", "generation_id"):
        database.query(f"alter table calls add column {column} text")
    for call_id, state, sent_at, row in database.query(
        "select id, state, intent_at, row from calls"
    ):
        if state in ("open", "unknown"):
            due_at = (datetime.fromisoformat(sent_at) + _LONGEST_CALL).isoformat()
            database.query("update calls set due_at = ? where id = ?", (due_at, call_id))
        elif row is not None and not is_readable(bytes(row)):
            database.query(
                "update calls set state = 'failed', is_lasting = 0, row = null where id = ?",
                (call_id,),
            )
    database.query("update ledger set value = '2' where key = 'schema_version'")


def from_version_2(database: Database) -> None:
    """Add the columns of version 3: the time and request of a call, and why its cost was disputed."""
    for column in ("sent_at", "body_sha", "disputed"):
        database.query(f"alter table calls add column {column} text")
    database.query("update ledger set value = '3' where key = 'schema_version'")


UPGRADES = {"1": from_version_1, "2": from_version_2}
"""The upgrade from each earlier version to the next."""


def is_readable(row: bytes) -> bool:
    """Return whether a row can be read as a `TeacherAction`."""
    try:
        decode_row(row)
    except msgspec.DecodeError:
        return False
    return True
