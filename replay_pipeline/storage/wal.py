"""Switch a SQLite database to its write-ahead log, even while others open it."""

import sqlite3
import time

_POLL_S = 0.01


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
