"""File permissions: the umask decides for tables, and private files are for their owner only."""

import functools
import logging
import os
from contextlib import suppress
from pathlib import Path

from replay_pipeline.storage.store import Place

logger = logging.getLogger(__name__)

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_MARK = "receipts"
"""The folder that every data root has, and other folders have not."""


def make_private_file(path: Path) -> None:
    """Make `path` a file that only its owner may read. An existing file keeps its contents.

    Call it before a database is opened there, so that others can never read it. SQLite gives its
    side files the same mode.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, _PRIVATE_FILE))
    _tighten(path, _PRIVATE_FILE)


def make_private_folder(path: Path) -> None:
    """Make `path` a folder that only its owner may enter."""
    path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
    _tighten(path, _PRIVATE_FOLDER)


def tighten_root(root: Place) -> None:
    """Remove the permissions that this user's umask denies from the tables of a data root, once.

    Earlier versions made tables readable by all, regardless of the umask. A folder is corrected
    after its contents, so a correct folder needn't be checked again.
    """
    if not isinstance(root, Path) or not (root / _MARK).is_dir() or not os.access(root, os.W_OK):
        return
    granted = 0o777 & ~_umask()
    n_changed = 0
    for top in root.iterdir():
        if top.lstat().st_mode & 0o777 & ~granted and not top.is_symlink():
            inside = sorted(top.rglob("*"), reverse=True) if top.is_dir() else []
            n_changed += sum(_chmod(path, granted) for path in [*inside, top])
    if n_changed:
        logger.warning(
            "%s: made %d files and folders private, which were open to more people than your umask (%04o) allows", root, n_changed, _umask()
        )  # fmt: skip


def _tighten(path: Path, allowed: int) -> None:
    before = path.stat().st_mode & 0o777
    if _chmod(path, allowed):
        logger.warning("%s: made private; it was open to others (mode %04o)", path, before)


def _chmod(path: Path, allowed: int) -> bool:
    """Return whether bits had to be taken; what is somebody else's, or on a read-only disk, stays."""
    with suppress(OSError):
        mode = path.lstat().st_mode & 0o7777
        if not path.is_symlink() and mode & 0o777 & ~allowed:
            path.chmod(mode & ~0o777 | mode & allowed)
            return True
    return False


@functools.cache
def _umask() -> int:
    """Read the umask, which takes setting it: to the strictest one, for other threads' sake."""
    before = os.umask(0o777 & ~_PRIVATE_FOLDER)
    os.umask(before)
    return before
