"""Switching a SQLite database to its write-ahead log, while others open it too."""

import sqlite3
import time

_POLL_S = 0.01


def use_wal(connection: sqlite3.Connection, *, timeout_s: float) -> None:
    """Let writers of a database not wait for its readers, nor readers for its writer.

    Of two connections that open a new file at once, SQLite refuses one without waiting, whatever
    its timeout: waiting with a read lock in hand could be a deadlock. So it is asked again.

    Raises:
        sqlite3.OperationalError: it is still refused after `timeout_s`, or fails otherwise.
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
