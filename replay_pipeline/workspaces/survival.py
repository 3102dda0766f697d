"""Find out which lines of recorded edits were taken back later in the session.

A line is followed by its place among the lines around it, as in `git blame`. The same text
elsewhere in the file doesn't count. Indentation doesn't matter.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher

import msgspec

from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sightings import path_of, text_after

_CHANGES = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))
_STANDS = 0.5
"""The share of its lines with which an edit still stands."""


class FollowedEdit(msgspec.Struct):
    """A file after an edit, and which of its lines are the edit's.

    Lines without a letter or digit don't count.
    """

    step: LoggedCall
    path: str
    lines: list[str]
    own: set[int]

    def became(self, last: str | None) -> str:
        """Return `undone` if more than half of its lines are gone in the last version, else `kept`."""
        return "undone" if self._n_in(last) < _STANDS * len(self.own) else "kept"

    def _n_in(self, text: str | None) -> int:
        if not text:
            return 0
        other = _stripped(text)
        if other == self.lines:
            return len(self.own)
        if not {self.lines[at] for at in self.own} & {*other}:
            return 0
        matcher = SequenceMatcher(None, self.lines, other)
        return sum(
            at in self.own
            for block in matcher.get_matching_blocks()
            for at in range(block.a, block.a + block.size)
        )


class FateBook:
    """Collects the edits of a log while its history advances."""

    def __init__(self, history: History) -> None:
        """Begin before the first step."""
        self._history = history
        self._edits: list[FollowedEdit] = []
        self._at_end: dict[tuple[str, str], str | None] = {}

    def take(self, step: LoggedCall) -> None:
        """Apply a step to the history, and record it if it is an edit."""
        history, path = self._history, path_of(step)
        is_change = step.name in _CHANGES and not step.is_error and path is not None
        before = history.file(path) if is_change and path is not None else None
        history.take(step)
        known = history.known.get(path) if path is not None else None
        if path is None or known is None:
            return
        self._at_end[step.session, path] = known.text
        if is_change and (after := text_after(step) or known.text) is not None:
            original = (step.details or {}).get("originalFile")
            rebuilt = (before.text if before else None) or ""
            lines = _stripped(after)
            own = _added(_stripped(original if isinstance(original, str) else rebuilt), lines)
            if own:
                self._edits.append(FollowedEdit(step, path, lines, own))

    def settled(self) -> Iterator[tuple[LoggedCall, str]]:
        """Return what became of each edit that added lines, in the order of the log."""
        for edit in self._edits:
            yield edit.step, edit.became(self._at_end.get((edit.step.session, edit.path)))


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _added(before: list[str], after: list[str]) -> set[int]:
    """Return which lines of a file an edit added; those that only moved or lost blanks are not."""
    codes = SequenceMatcher(None, before, after).get_opcodes()
    places = [at for tag, _, _, i, j in codes if tag != "equal" for at in range(i, j)]
    gone = [line for tag, i, j, _, _ in codes if tag != "equal" for line in before[i:j]]
    found: set[int] = set()
    for at in places:
        if after[at] in gone:
            gone.remove(after[at])
        elif any(map(str.isalnum, after[at])):
            found.add(at)
    return found
