"""The file contents that a log shows before and after each call."""

import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from replay_pipeline.actions.paths import absolute
from replay_pipeline.workspaces.logs import Log, LoggedCall
from replay_pipeline.workspaces.tools import ToolResult, replaced

_NUMBERED = re.compile(r"^\s*(\d+)(?:→|\t)(.*)$", re.MULTILINE)
_FOUND = re.compile(r"^(?:([^:\n]+):)?(\d+):(?!\[Omitted)(.*)$", re.MULTILINE)
_MOST_FOUND = 4
"""Files of one search that tell of the commit: no search may outweigh what was read."""
_WRITERS = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))
LONGEST_GAP_S = 6 * 3600.0


class Part(msgspec.Struct, frozen=True):
    """Lines of a file that the log has shown, or the whole file."""

    first: int
    lines: tuple[str, ...]
    is_whole: bool

    @classmethod
    def whole(cls, text: str) -> "Part":
        """Return all lines of a file."""
        return cls(1, tuple(text.replace("\r\n", "\n").split("\n")), is_whole=True)

    @property
    def text(self) -> str:
        """Return the lines joined as in the file."""
        return "\n".join(self.lines)

    def fits(self, text: str) -> bool:
        """Return whether a text has these lines at the same place."""
        if self.is_whole:
            return text == self.text
        here = tuple(text.split("\n")[self.first - 1 : self.first - 1 + len(self.lines)])
        # Of lines behind the end of a file the client returns an empty text.
        return (here or ("",)) == self.lines


class Sighting(msgspec.Struct, frozen=True):
    """The content that one step shows of one file, right before that step."""

    order: int
    """Position of the step in the log."""
    moment: float
    call_id: str
    part: Part | None
    """None if there was no file, or if nothing is known about it."""
    is_absent: bool = False
    is_written: bool = False
    """Whether the step changes the file."""


class Sightings:
    """The file contents in a log, by path and order."""

    def __init__(self, log: Log) -> None:
        """Look at every step and every copy that the client kept."""
        self._of: dict[str, list[Sighting]] = defaultdict(list)
        for order, step in enumerate(log.steps):
            path = path_of(step)
            if path is not None and (sighting := _sighting(order, step)) is not None:
                self._of[path].append(sighting)
        for backup in log.backups:
            order = bisect_left(log.steps, backup.moment, key=lambda step: step.answered)
            part = None if backup.text is None else Part.whole(backup.text)
            sighting = Sighting(order, backup.moment, backup.origin, part, is_absent=part is None)
            insort(self._of[backup.path], sighting, key=lambda each: each.order)

        self._in_order = sorted((each.moment, path) for path in self._of for each in self._of[path])

    def paths(self) -> list[str]:
        """Return every path with known content."""
        return list(self._of)

    def near(self, moment: float, within_s: float) -> list[str]:
        """Return the paths whose content is known from a time about a moment."""
        start = bisect_left(self._in_order, (moment - within_s,))
        end = bisect_right(self._in_order, (moment + within_s, "\uffff"))
        return [path for _, path in self._in_order[start:end]]

    def next(self, path: str, order: int) -> Sighting | None:
        """Return the first sighting of a file after step `order`."""
        found = self._of.get(path, ())
        at = bisect_right(found, order, key=lambda each: each.order)
        return found[at] if at < len(found) else None


def _sighting(order: int, step: LoggedCall) -> Sighting | None:
    def seen(part: Part | None, **more: bool) -> Sighting:
        return Sighting(order, step.answered, step.call_id, part, **more)

    if step.name == "Read":
        if step.is_error:
            return seen(None, is_absent=True) if "does not exist" in step.text[:80] else None
        part = part_of(step)
        return None if part is None else seen(part)
    if step.name in _WRITERS and not step.is_error:
        details = step.details or {}
        original = details.get("originalFile")
        if isinstance(original, str):
            return seen(Part.whole(original), is_written=True)
        return seen(None, is_absent=details.get("type") == "create", is_written=True)
    return None


def path_of(step: LoggedCall) -> str | None:
    """Return the first absolute path in a call."""
    return next(iter(paths_of(step)), None)


def paths_of(step: LoggedCall) -> Iterator[str]:
    """Yield the absolute paths in a call."""
    for name in ("file_path", "notebook_path", "path"):
        value = step.arguments.get(name)
        if isinstance(value, str) and value:
            yield absolute(value, step.cwd or "/")


def part_of(step: LoggedCall) -> Part | None:
    """Return the lines that a Read returned; None if they aren't text."""
    file = step.details.get("file") if step.details else None
    if isinstance(file, dict) and isinstance(file.get("content"), str):
        lines = tuple(file["content"].replace("\r\n", "\n").split("\n"))
        first = int(file.get("startLine") or 1)
        is_whole = first == 1 and file.get("numLines") == file.get("totalLines") == len(lines)
        return Part(first, lines, is_whole)
    found = _NUMBERED.findall(step.text)
    if not found:
        return None
    # Without the client's record, a text that was cut at the longest answer looks like a whole one.
    is_whole = not {"offset", "limit"} & step.arguments.keys() and len(found) < 1_990
    return Part(int(found[0][0]), tuple(text for _, text in found), is_whole)


def parts_in(step: LoggedCall) -> Iterator[tuple[str, Part]]:
    """Yield lines that a call showed of files, with their paths: of a search, the last line that it found in each."""
    if step.name == "Read" and (path := path_of(step)) and (part := part_of(step)):
        yield path, part
    if step.name == "Grep" and step.arguments.get("output_mode") == "content":
        place = absolute(str(step.arguments.get("path") or ""), step.cwd or "/")
        found = {name: (int(n), text) for name, n, text in _FOUND.findall(step.text)}
        for name, (number, text) in list(found.items())[:_MOST_FOUND]:
            path = absolute(name, step.cwd or "/") if name else place
            yield path, Part(number, (text,), is_whole=False)


def text_after(step: LoggedCall) -> str | None:
    """Return the file after a successful change, from the client's own record."""
    details: dict[str, Any] = step.details or {}
    if step.name == "Write":
        content = details.get("content", step.arguments.get("content"))
        return content if isinstance(content, str) else None
    original = details.get("originalFile")
    if not isinstance(original, str):
        return None
    edits = details.get("edits") or [
        {
            "old_string": details.get("oldString"),
            "new_string": details.get("newString"),
            "replace_all": details.get("replaceAll"),
        }
    ]
    text = original.replace("\r\n", "\n")
    for edit in edits:
        old, new = edit.get("old_string"), edit.get("new_string")
        if not isinstance(old, str) or not isinstance(new, str):
            return None
        result = replaced(text, old, new, edit.get("replace_all"))
        if isinstance(result, ToolResult):
            return None
        text = result
    return text
