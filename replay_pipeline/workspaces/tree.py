"""Files at one time, and changes on top that don't modify them."""

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import msgspec

Source = Literal["log", "backup", "git", "mixed", "run"]
"""Where a file's content comes from: the log, the client's own copy, a commit, a commit with lines
from the log, or an action that was run."""


class TreeFile(msgspec.Struct, frozen=True):
    """One file, or the knowledge that there is none."""

    text: str | None
    """Its content, ends of lines as `\\n`; None where there is no file."""
    source: Source
    is_sure: bool = True
    """Whether no evidence contradicts this content."""
    origin: str = ""
    """The commit or the call that it comes from."""


class Tree(Protocol):
    """Files by absolute path."""

    def file(self, path: str) -> TreeFile | None:
        """Return the file at `path`, or None if nothing is known about the path."""
        ...

    def below(self, folder: str) -> list[str] | None:
        """Return the paths of all files below a folder, or None if nothing is known about it."""
        ...


class FileTree:
    """A tree with exactly the given files below one root."""

    def __init__(self, root: str, files: Mapping[str, str]) -> None:
        """Take files by path relative to `root`."""
        self.root = root.rstrip("/")
        self._files = {f"{self.root}/{path}": text for path, text in files.items()}

    def file(self, path: str) -> TreeFile | None:
        """Return the file at `path`, or None outside the root."""
        return TreeFile(self._files.get(path), "log") if is_below(path, self.root) else None

    def below(self, folder: str) -> list[str] | None:
        """Return the files below a folder, or None outside the root."""
        if not is_below(folder, self.root):
            return None
        return sorted(path for path in self._files if is_below(path, folder))


class View:
    """A tree with changes on top. The tree itself does not change."""

    def __init__(self, tree: Tree) -> None:
        """Begin without changes."""
        self.tree = tree
        self.changes: dict[str, str | None] = {}

    def file(self, path: str) -> TreeFile | None:
        """Return the file at `path` after the changes."""
        if path in self.changes:
            return TreeFile(self.changes[path], "run")
        return self.tree.file(path)

    def below(self, folder: str) -> list[str] | None:
        """Return the files below a folder after the changes."""
        paths = self.tree.below(folder)
        if paths is None:
            return None
        mine = {path: text for path, text in self.changes.items() if is_below(path, folder)}
        if not mine:
            return paths
        here = {*paths, *mine} - {path for path, text in mine.items() if text is None}
        return sorted(here)

    def write(self, path: str, text: str | None) -> None:
        """Write a file; None deletes it."""
        self.changes[path] = text

    def effect(self) -> dict[str, str | None]:
        """Return the changes that have an effect, sorted by path."""
        return dict(self._effect())

    def _effect(self) -> Iterator[tuple[str, str | None]]:
        for path, text in sorted(self.changes.items()):
            before = self.tree.file(path)
            if before is None or before.text != text:
                yield path, text


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder or is below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
