"""Allow one trainer at a time in an output folder, and name its files there."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.errors import FolderInUseError, TrainerConfigError

if find_spec("fcntl") is None:
    raise TrainerConfigError("training needs Linux or macOS: on Windows, use WSL")

LOCK_FILE = "trainer.lock"
"""File in an output folder. While its lock is held, it says who writes there."""

STATE_FILE = "composer_state.json"
"""File in a complete checkpoint, with the state that the trainer keeps besides TRL's."""


@contextmanager
def sole_writer(folder: Path, *, patience_s: float = 0.0) -> Iterator[None]:
    """Create `folder`, and keep every other trainer out of it until the end.

    The operating system holds the lock, and releases it when the process ends for any reason.

    Raises:
        FolderInUseError: another trainer writes there. Nothing was changed.
        TrainerConfigError: the folder can't be created or written to.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=patience_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", "utf-8")
    except Timeout as error:
        owner = path.read_text("utf-8").strip() or "it has just begun"
        raise FolderInUseError(
            f"{folder}: another trainer is at work here ({owner}); wait until it ends, stop it, or name another output folder"
        ) from error
    except OSError as error:
        lock.release()
        raise TrainerConfigError(
            f"{folder}: cannot be written to ({error.strerror}); name another output folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
