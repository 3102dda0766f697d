"""One database with what thousands of small files say, so that one query reads them all.

It is made from the receipts, manifests, and tables of a data root, so you can delete it at any
time.
"""

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from replay_pipeline.errors import StorageError
from replay_pipeline.storage.store import Place, read_files, stamps_below

logger = logging.getLogger(__name__)

FILE = "index.sqlite"
_VERSION = 3
_BUSY_S = 60.0
_RACY_NS = 2_000_000_000
"""A folder that changed so lately may change again without its time telling."""

_SCHEMA = """
create table files(
  folder text not null, name text not null, stamp text not null, data blob not null,
  primary key (folder, name)
);
create table folders(folder text primary key, mtime_ns integer not null);
create table ids(id text primary key, batch text not null) without rowid;
create table batches_of_ids(batch text primary key, version text not null);
create table folds(name text primary key, last text not null, chain text not null, value blob);
"""


class RootIndex:
    """What the small files of a data root say, by folder and name.

    Args:
        root: the data root.
        path: the database. With `None`, it stays in memory while the process lives.
    """

    def __init__(self, root: Place, path: Path | None) -> None:
        self._root, self._path = root, path
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None

    def files(self, folder: str) -> list[tuple[str, bytes]]:
        """Return the name and the bytes of each JSON file in a folder, sorted by name.

        Only files that have changed are read.

        Raises:
            StorageError: the object store with the files can't be reached.
        """
        place = self._root / folder
        if isinstance(place, Path) and not place.is_dir():
            return []
        mtime_ns = _settled(place)
        with self._open() as database:
            seen = database.execute("select mtime_ns from folders where folder = ?", (folder,))
            if mtime_ns is None or seen.fetchone() != (mtime_ns,):
                self._bring(database, folder, mtime_ns)
            return database.execute(
                "select name, data from files where folder = ? order by name", (folder,)
            ).fetchall()

    def _bring(self, database: sqlite3.Connection, folder: str, mtime_ns: int | None) -> None:
        place = self._root / folder
        known = dict(database.execute("select name, stamp from files where folder = ?", (folder,)))
        stamps = _stamps(place)
        new = [name for name, stamp in stamps.items() if known.get(name) != stamp]
        found = zip(new, read_files(place, new), strict=True)
        rows = [(folder, name, stamps[name], data) for name, data in found if data is not None]
        gone = [(folder, name) for name in known.keys() - stamps.keys()]
        with database:
            database.executemany("insert or replace into files values(?, ?, ?, ?)", rows)
            database.executemany("delete from files where folder = ? and name = ?", gone)
            if mtime_ns is not None:
                database.execute("insert or replace into folders values(?, ?)", (folder, mtime_ns))

    def bring_ids(self, versions: Mapping[str, str], read: Callable[[str], Iterable[str]]) -> None:
        """Update the ids of all batches from their tables, reading only changed tables."""
        with self._open() as database:
            known = dict(database.execute("select batch, version from batches_of_ids"))
            new = {batch: v for batch, v in versions.items() if known.get(batch) != v}
            rows = [(each, batch) for batch in sorted(new) for each in read(batch)]
            with database:
                for batch in (known.keys() - versions.keys()) | (known.keys() & new.keys()):
                    database.execute("delete from ids where batch = ?", (batch,))
                    database.execute("delete from batches_of_ids where batch = ?", (batch,))
                database.executemany("insert or replace into ids values(?, ?)", rows)
                database.executemany("insert into batches_of_ids values(?, ?)", new.items())

    def batch_of(self, one: str) -> str | None:
        """Return the batch that has an id."""
        with self._open() as database:
            row = database.execute("select batch from ids where id = ?", (one,)).fetchone()
        return row[0] if row else None

    def fold(self, name: str) -> tuple[str, str, bytes] | None:
        """Return the last batch of a stored fold, the chain of versions up to it, and its value."""
        with self._open() as database:
            return database.execute(
                "select last, chain, value from folds where name = ?", (name,)
            ).fetchone()

    def keep_fold(self, name: str, last: str, chain: str, value: bytes) -> None:
        """Store a fold up to a batch, so that the next process starts there."""
        with self._open() as database, database:
            database.execute(
                "insert or replace into folds values(?, ?, ?, ?)", (name, last, chain, value)
            )

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._database is None:
                self._database = self._connected()
                weakref.finalize(self, self._database.close)
            try:
                yield self._database
            except sqlite3.Error as error:
                raise StorageError(
                    f"{self._path}: {error}; delete it, and it is made again"
                ) from error

    def _connected(self) -> sqlite3.Connection:
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # SQLite opens what it may not write, and says so at the first change only.
                places = (self._path.parent, self._path)
                if not self._path.exists() or all(os.access(p, os.W_OK) for p in places):
                    return _usable(self._path)
                logger.info("%s: not used, because it is not writable", self._path)
            except sqlite3.OperationalError as error:
                logger.info("%s: not used (%s)", self._path, error)  # such as a read-only disk
            except sqlite3.DatabaseError as error:
                logger.warning("%s: damaged (%s), so it is rebuilt", self._path, error)
                self._path.unlink()
                return _usable(self._path)
            except OSError as error:
                logger.info("%s: not used (%s)", self._path, error)
        return _usable(Path(":memory:"))


def _usable(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
    try:
        # It can be made again, so no commit needs to wait for the disk.
        database.execute("pragma synchronous = off")
        with database:
            database.execute("begin immediate")
            (version,) = database.execute("pragma user_version").fetchone()
            if version != _VERSION:
                for (name,) in database.execute(
                    "select name from sqlite_master where type = 'table'"
                ).fetchall():
                    database.execute(f"drop table {name}")
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    database.execute(statement)
                database.execute(f"pragma user_version = {_VERSION}")
    except sqlite3.Error:
        database.close()
        raise
    return database


def _settled(folder: Place) -> int | None:
    """Return when a folder of this machine last got or lost a file; `None` if that says nothing."""
    if not isinstance(folder, Path):
        return None
    mtime_ns = folder.stat().st_mtime_ns
    return mtime_ns if time.time_ns() - mtime_ns > _RACY_NS else None


def _stamps(folder: Place) -> dict[str, str]:
    """Return what differs once a file is written again, of each JSON file in a folder."""
    if not isinstance(folder, Path):
        stamps = stamps_below(folder)
    else:
        with os.scandir(folder) as entries:
            stamps = {
                entry.name: f"{stat.st_mtime_ns}:{stat.st_size}:{stat.st_ino}"
                for entry in entries
                if entry.is_file()
                for stat in [entry.stat()]
            }
    return {
        name: stamp
        for name, stamp in sorted(stamps.items())
        if name.endswith(".json") and "/" not in name and not name.startswith(".")
    }
