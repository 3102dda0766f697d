"""Write a page as a folder that works from disk. Its policy allows no other scripts or files.

In a folder the data are scripts, because a page that is opened from disk can't read other files.
The policy allows the page's own script by its hash, and only this script can load the data.
"""

import base64
import gzip
import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.storage.store import written_whole

MARK = '<meta name="generator" content="replay-pipeline">'
"""A mark in the head of each page, which tells our pages from other files."""


def _source(text: str) -> str:
    """Return a content security policy source that allows exactly this inline text."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def inert(json_text: str) -> str:
    """Return JSON that cannot end its script element or start another one."""
    return json_text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


_WEB = Path(__file__).parent / "web"
_SCRIPTS = [
    "core",
    "charts",
    "overview",
    "sessions",
    "session",
    "teachers",
    "pairs",
    "results",
    "start",
]
_OF_OTHERS = re.compile(r"\.min\.js|LICENSE")
"""Files of libraries: Markdown, and what makes its HTML safe."""
_NOTE = "Written by replay-pipeline look. It replaces what is in this folder each time.\n"


_PACKED_FROM = 20_000


class PageFiles:
    """Writes the data of a page, each under its own name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Write data that the page loads by this name on demand. What is large is compressed.

        Args:
            name: lowercase letters, digits, and hyphens.
            value: the data, as JSON values, and no text alone.
        """
        text = msgspec.json.encode(value)
        if len(text) > _PACKED_FROM:
            # The same bytes at any time: a page that is made again is the same page.
            text = msgspec.json.encode(base64.b64encode(gzip.compress(text, 4, mtime=0)).decode())
        self.names.add(name)
        with written_whole(self.folder / "data" / f"{name}.js") as file:
            file.write(f"lookData({name!r},".encode() + inert(text.decode()).encode() + b");\n")

    def page(self) -> str:
        """Return the HTML of the page. Its security policy allows only its own style and script."""
        scripts = [(_WEB / f"{name}.js").read_text("utf-8") for name in _SCRIPTS]
        script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "\n})();\n"
        style = (_WEB / "page.css").read_text("utf-8")
        policy = (
            "default-src 'none'",
            f"style-src {_source(style)}",
            # Trust goes from this script to those that it adds: the page's own data files.
            f"script-src {_source(script)} 'strict-dynamic'",
            "base-uri 'none'",
            "form-action 'none'",
        )
        page = (_WEB / "page.html").read_text("utf-8")
        return page.format(mark=MARK, policy="; ".join(policy), style=style, script=script)


@contextmanager
def page_folder(folder: Path) -> Iterator[PageFiles]:
    """Yield a folder for a page. Old data are removed, and the page itself is written last.

    Raises:
        ConfigError: the folder holds something else.
        StorageError: it cannot be written.
    """
    _check(folder)
    files = PageFiles(folder)
    data = folder / "data"
    # First of all, so that a page whose making was cut short is made again.
    with written_whole(folder / "README.txt") as file:
        file.write(_NOTE.encode())
    with suppress(FileNotFoundError):
        (folder / "index.html").unlink()
    if data.is_dir():
        shutil.rmtree(data)
    yield files
    for path in filter(lambda path: _OF_OTHERS.search(path.name), _WEB.iterdir()):
        with written_whole(folder / path.name) as file:
            file.write(path.read_bytes())
    with written_whole(folder / "index.html") as file:
        file.write(files.page().encode())


def _check(folder: Path) -> None:
    """Refuse to write into a folder with other people's files.

    Raises:
        ConfigError: the folder is a file, or has other files.
        StorageError: the folder cannot be read.
    """
    try:
        if not folder.exists() or not any(folder.iterdir()):
            return
        note = folder / "README.txt"
        is_ours = note.is_file() and note.read_text("utf-8", "replace") == _NOTE
        index = folder / "index.html"
        is_ours = is_ours or (index.is_file() and MARK in index.read_text("utf-8", "replace")[:500])
    except NotADirectoryError as error:
        raise ConfigError(f"{folder}: this is a file; name another folder with --to") from error
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read ({error.strerror or error})") from error
    if not is_ours:
        raise ConfigError(f"{folder}: this folder has other files; name a new folder with --to")
