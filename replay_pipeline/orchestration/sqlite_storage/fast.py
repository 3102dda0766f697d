"""Dagster's SQLite storage with open connections and batched asset events.

The stock storage opens, syncs, and closes a database twice for every event. Here connections stay
open, and the events of a batch share one transaction. Commits don't wait for the disk, because only
the data root must survive a power failure.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from dagster._core.events import DagsterEventType
from dagster._core.events.log import EventLogEntry
from dagster._core.storage.event_log.polling_event_watcher import SqlPollingEventWatcher
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.runs.sqlite.sqlite_run_storage import SqliteRunStorage
from dagster._core.storage.schedules.sqlite.sqlite_schedule_storage import SqliteScheduleStorage
from dagster._core.storage.sqlite_storage import (
    DagsterSqliteStorage,
    SqliteStorageConfig,
    _event_logs_directory,
    _runs_directory,
    _schedule_directory,
)
from dagster._serdes import ConfigurableClassData
from sqlalchemy.engine import Connection, CursorResult

from replay_pipeline.orchestration.sqlite_storage.connections import Connections

HOOKS: dict[Callable[..., Any], tuple[str, ...]] = {
    SqliteEventLogStorage._connect: ("self", "shard"),
    SqliteEventLogStorage._initdb: ("self", "engine", "for_index_shard"),
    SqliteEventLogStorage.conn_string_for_shard: ("self", "shard_name"),
    SqliteEventLogStorage.has_table: ("self", "table_name"),
    SqliteEventLogStorage._has_asset_key_col_on_connection: ("self", "conn", "column_name"),
    SqliteEventLogStorage.store_event_batch: ("self", "events"),
    SqliteEventLogStorage._event_to_row: ("self", "event"),
    SqliteEventLogStorage._store_asset_event: ("self", "conn", "event", "event_id"),
    SqliteEventLogStorage._store_asset_event_tags: ("self", "conn", "events", "event_ids"),
    SqliteEventLogStorage.watch: ("self", "run_id", "cursor", "callback"),
    SqliteEventLogStorage.end_watch: ("self", "run_id", "handler"),
    SqliteEventLogStorage.wipe: ("self",),
    SqliteEventLogStorage.dispose: ("self",),
    SqliteRunStorage.connect: ("self",),
    SqliteScheduleStorage.connect: ("self",),
    DagsterSqliteStorage.__init__: ("self", "base_dir", "inst_data"),
}
"""The methods of Dagster's classes that this module calls or replaces, with their parameters."""

_BATCHED = frozenset(
    {
        DagsterEventType.ASSET_MATERIALIZATION,
        DagsterEventType.ASSET_OBSERVATION,
        DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
    }
)


def check_hooks() -> None:
    """Check that Dagster's classes still have the methods that these subclasses need.

    Raises:
        ImportError: a method has other parameters than expected.
    """
    for hook, expected in HOOKS.items():
        found = tuple(inspect.signature(hook).parameters)
        if found != expected:
            raise ImportError(f"{hook.__qualname__}{found} is no longer {expected}")


check_hooks()


class FastEventLogStorage(SqliteEventLogStorage):
    """The event storage: one database per run and one index over all runs, as in the stock storage."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        self._connections = Connections()
        self._tables: set[str] = set()
        self._asset_key_columns: set[str] = set()
        self._watcher: SqlPollingEventWatcher | None = None
        super().__init__(base_dir, inst_data)

    @contextmanager
    def _connect(self, shard: str) -> Iterator[Connection]:
        url = self.conn_string_for_shard(shard)
        with self._connections.engine(url) as engine:
            if shard not in self._initialized_dbs:
                with self._db_lock:
                    if shard not in self._initialized_dbs:
                        self._initdb(engine)
                        self._initialized_dbs.add(shard)
            with engine.connect() as connection, connection.begin():
                yield connection

    def has_table(self, table_name: str) -> bool:
        """Return whether the index has a table. Tables are never removed."""
        if table_name not in self._tables and super().has_table(table_name):
            self._tables.add(table_name)
        return table_name in self._tables

    def _has_asset_key_col_on_connection(self, conn: Connection, column_name: str) -> bool:
        known = self._asset_key_columns
        if column_name not in known and super()._has_asset_key_col_on_connection(conn, column_name):
            known.add(column_name)
        return column_name in known

    def store_event_batch(self, events: Sequence[EventLogEntry]) -> None:
        """Store consecutive asset events of a run in one transaction per database."""
        for (run_id, is_batched), group in groupby(
            events, key=lambda event: (event.run_id, event.dagster_event_type in _BATCHED)
        ):
            some = list(group)
            if is_batched and len(some) > 1:
                self._store_together(run_id, some)
            else:
                super().store_event_batch(some)

    def _store_together(self, run_id: str, events: Sequence[EventLogEntry]) -> None:
        rows = [self._event_to_row(event) for event in events]
        insert = SqlEventLogStorageTable.insert()
        with self.run_connection(run_id) as connection:
            connection.execute(insert, rows)
        last: dict[Any, tuple[EventLogEntry, int]] = {}
        with self.index_connection() as connection:
            ids = [_inserted(connection.execute(insert, row)) for row in rows]
            self._store_asset_event_tags(connection, events, ids)
            for event, event_id in zip(events, ids, strict=True):
                last[event.get_dagster_event().asset_key] = (event, event_id)
            for event, event_id in last.values():
                self._store_asset_event(connection, event, event_id)

    def watch(self, run_id: str, cursor: str | None, callback: Callable[..., Any]) -> None:
        """Follow a run by polling. The stock storage waits for a file change, but here only the WAL file changes."""
        if self._watcher is None:
            self._watcher = SqlPollingEventWatcher(self)
        self._watcher.watch_run(run_id, cursor, callback)

    def end_watch(self, run_id: str, handler: Callable[..., Any]) -> None:
        """Stop following a run."""
        if self._watcher is not None:
            self._watcher.unwatch_run(run_id, handler)

    def wipe(self) -> None:
        """Delete every event."""
        self._connections.close()
        super().wipe()

    def dispose(self) -> None:
        """Close all open connections."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        super().dispose()
        self._connections.close()


def _inserted(result: CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return key[0]


class _KeptConnection:
    """Mixed into a storage of one file: `connect` is a transaction on a kept connection."""

    _conn_string: str

    def __init__(self, conn_string: str, inst_data: ConfigurableClassData | None = None) -> None:
        self._connections = Connections()
        super().__init__(conn_string, inst_data)  # pyrefly: ignore[bad-argument-count]

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with self._connections.transaction(self._conn_string) as connection:
            yield connection

    def dispose(self) -> None:
        super().dispose()  # pyrefly: ignore[missing-attribute]
        self._connections.close()


class _FastRunStorage(_KeptConnection, SqliteRunStorage):
    pass


class _FastScheduleStorage(_KeptConnection, SqliteScheduleStorage):
    pass


class FastSqliteStorage(DagsterSqliteStorage):
    """The storage of runs, events, and schedules in one folder, in the same files as the stock storage."""

    def __init__(self, base_dir: str, inst_data: ConfigurableClassData | None = None) -> None:
        self.base_dir = base_dir
        self._inst_data = inst_data
        self._run_storage = _FastRunStorage.from_local(_runs_directory(base_dir))
        self._event_log_storage = FastEventLogStorage(_event_logs_directory(base_dir))
        self._schedule_storage = _FastScheduleStorage.from_local(_schedule_directory(base_dir))
        super(DagsterSqliteStorage, self).__init__()

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData, config_value: SqliteStorageConfig
    ) -> "FastSqliteStorage":
        """Return the storage that `dagster.yaml` names."""
        return cls.from_local(inst_data=inst_data, **config_value)

    @property
    def event_storage_data(self) -> None:
        """Not given: that would name the stock class."""

    @property
    def run_storage_data(self) -> None:
        """Not given: that would name the stock class."""

    @property
    def schedule_storage_data(self) -> None:
        """Not given: that would name the stock class."""
