"""Locks between processes of a machine. A lock ends with the process that holds it, however it ends."""

from pathlib import Path

from filelock import FileLock, Timeout


def take_lock(path: Path, *, waits: bool = False, mode: int = -1) -> FileLock | None:
    """Lock the file at `path`, which stays as it is, and return the lock; None if another holder has it.

    If it `waits`, it waits for the other holder instead.
    """
    lock = FileLock(path, thread_local=False, mode=mode)
    try:
        lock.acquire(timeout=-1 if waits else 0)
    except Timeout:
        return None
    return lock
