"""A log of a process and of all that it starts, which tells when the last of them has ended."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PATIENCE_S = 120.0


@contextmanager
def shared_log(path: Path) -> Iterator[BinaryIO]:
    """Give a log for a process to write to: whoever inherits it from there holds its lock."""
    with path.open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_SH)
        yield log


def wait_for_writers(path: Path) -> None:
    """Wait until no process has the log any more.

    Dagster ends before the code servers and runs that it has started, which write to the data root
    until they end.

    Raises:
        TimeoutError: one still has it after two minutes.
    """
    end = time.monotonic() + PATIENCE_S
    with path.open("ab") as log:
        while True:
            try:
                return fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{path}: a process still writes to it") from None
                time.sleep(0.05)
