"""File permissions: the umask decides for tables, and private files are for their owner only."""

import logging
import os
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700


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
