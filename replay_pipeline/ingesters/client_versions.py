"""Which versions of Claude Code wrote the sessions on this machine, and which versions were tested."""

import os
import re
from collections.abc import Iterable
from heapq import nlargest
from pathlib import Path

from replay_pipeline.ingesters.corpus import session_files

NEWEST_TESTED = "2.1.332"
"""The newest version whose logs were compared with its requests (`make test-client`)."""
_N_FILES = 20
_TAIL_BYTES = 1 << 16
_VERSION = re.compile(rb'"version":\s?"(\d+\.\d+\.\d+)"')


def numbers_of(version: str) -> tuple[int, ...]:
    """Return a version as numbers, which can be compared."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def newest_client(sources: Iterable[Path]) -> str | None:
    """Return the newest client version in the most recent sessions, or None."""
    files = [
        file
        for source in sources
        for file in (session_files(source) if source.is_dir() else [source])
        if file.is_file()
    ]
    found = {
        match.decode()
        for file in nlargest(_N_FILES, files, key=lambda file: file.stat().st_mtime_ns)
        for match in _VERSION.findall(_tail(file))
    }
    return max(found, key=numbers_of, default=None)


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read()
    except OSError:
        return b""
