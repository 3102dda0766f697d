"""Keep SQLite connections open, because opening one costs more than a write."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as db
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import QueuePool

from replay_pipeline.storage.wal import use_wal

BUSY_S = 60.0
"""Seconds that a writer waits for another process's transaction."""
_MAX_IDLE = 16


@dataclass(slots=True)
class _Open:
    engine: Engine
    n_users: int = 0


class Connections:
    """Open connections to the databases of one storage, for a few files at a time.

    A file in use is never closed. After a fork, the child doesn't touch its parent's connections,
    as SQLite requires.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[int, str], _Open] = OrderedDict()

    @contextmanager
    def engine(self, url: str) -> Iterator[Engine]:
        """Yield the engine for `url`. It stays open while in use, and for a while after."""
        key = (os.getpid(), url)
        with self._lock:
            kept = self._open.get(key)
            if kept is None:
                kept = self._open[key] = _Open(_engine(url))
            self._open.move_to_end(key)
            kept.n_users += 1
        try:
            yield kept.engine
        finally:
            with self._lock:
                kept.n_users -= 1
                self._close_idle(above=_MAX_IDLE)

    @contextmanager
    def transaction(self, url: str) -> Iterator[Connection]:
        """Yield a connection to `url` in its own transaction."""
        with self.engine(url) as engine, engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Close every file that isn't in use."""
        with self._lock:
            self._close_idle(above=0)

    def _close_idle(self, *, above: int) -> None:
        here = os.getpid()
        mine = [key for key in self._open if key[0] == here]
        for key in mine[: max(0, len(mine) - above)]:
            if self._open[key].n_users == 0:
                self._open.pop(key).engine.dispose()


def _engine(url: str) -> Engine:
    engine = db.create_engine(
        url,
        poolclass=QueuePool,
        pool_size=2,
        max_overflow=-1,
        connect_args={"timeout": BUSY_S, "check_same_thread": False},
    )
    event.listen(engine, "connect", _prepare)
    return engine


def _prepare(connection: Any, _: object) -> None:
    """WAL with `NORMAL`: a crash of the machine may lose the last commits, never the database."""
    use_wal(connection, timeout_s=BUSY_S)
    connection.execute("PRAGMA synchronous=NORMAL")
