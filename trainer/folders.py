"""Allow one trainer at a time in an output folder, and name its files there."""

import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import FolderInUseError, TrainerConfigError

try:
    import fcntl
except ModuleNotFoundError as error:
    raise TrainerConfigError("training needs Linux or macOS: on Windows, use WSL") from error


logger = logging.getLogger(__name__)

LOCK_FILE = "trainer.lock"
"""File in an output folder. While its lock is held, it says who writes there."""

STATE_FILE = "composer_state.json"
"""File in a complete checkpoint, with the state that the trainer keeps besides TRL's."""

_POLL_S = 0.05
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


_held: set[int] = set()


def _let_go() -> None:
    """Forget the locks in a forked child: a data loader may outlive a trainer that is killed."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def sole_writer(folder: Path, *, patience_s: float = 0.0) -> Iterator[None]:
    """Create `folder`, and keep every other trainer out of it until the end.

    The operating system holds the lock, and releases it when the process ends for any reason.

    Args:
        folder: folder for the files of a run.
        patience_s: seconds to wait for another trainer, such as one that was just killed.

    Raises:
        FolderInUseError: another trainer writes there. Nothing was changed.
        TrainerConfigError: the folder can't be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise TrainerConfigError(
            f"{folder}: cannot be written to ({error.strerror}); name another output folder"
        ) from error
    _held.add(descriptor)
    try:
        _lock(descriptor, folder, patience_s)
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)  # frees the lock, too


def _lock(descriptor: int, folder: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _WITHOUT_LOCKS:
                logger.warning(
                    "%s: its file system has no locks, so nothing prevents a second trainer", folder
                )
                return
            if error.errno not in _BUSY:
                raise
            if time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            raise FolderInUseError(
                f"{folder}: another trainer is at work here ({owner or 'it has just begun'}); wait until it ends, stop it, or name another output folder"
            ) from error
        else:
            return
