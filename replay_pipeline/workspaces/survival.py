"""Find out which lines of recorded edits still exist later in the session and in git.

A line is followed by its place among the lines around it, as in `git blame`. The same text
elsewhere in the file doesn't count. Indentation doesn't matter.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher

import msgspec

from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.heads import text_of
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import Log, LoggedCall
from replay_pipeline.workspaces.sightings import path_of, text_after

_CHANGES = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))
_STANDS = 0.5
"""The share of its lines with which an edit still stands."""


class Fate(msgspec.Struct):
    """The fate of the lines that one edit added. Lines without a letter or digit don't count."""

    step: LoggedCall
    path: str
    n_added: int
    n_at_end_of_session: int
    """How many of them are in the file as last seen in the session."""
    n_committed: int | None = None
    """How many of them are in the first later commit of the branch that has any; None if no commit has any."""
    n_now: int | None = None
    """How many of them are in the newest commit of that branch; None if none was ever committed."""

    @property
    def is_undone(self) -> bool:
        """Return whether more than half of the lines were removed later in the session."""
        return self.n_at_end_of_session < _STANDS * self.n_added

    @property
    def became(self) -> str:
        """Return `standing`, `replaced`, `undone`, or `kept`, for the column `became` of `outcomes`."""
        if self.n_now is not None and self.n_now >= _STANDS * self.n_added:
            return "standing"
        if self.is_undone:
            return "undone"
        return "kept" if self.n_committed is None else "replaced"


class _FollowedEdit(msgspec.Struct):
    """A file after an edit, and which of its lines are the edit's."""

    fate: Fate
    lines: list[str]
    own: set[int]

    def n_in(self, text: str | None) -> int:
        """Return how many of the edit's lines are in another version of the file."""
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
        self._edits: list[_FollowedEdit] = []
        self._at_end: dict[tuple[str, str], str | None] = {}
        self._versions: dict[tuple[str, str, str | None], list[tuple[int, str]]] = {}

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
            lines = _stripped(after)
            own = _added(_stripped(_before(step, before.text if before else None)), lines)
            if own:
                self._edits.append(_FollowedEdit(Fate(step, path, len(own), 0), lines, own))

    def settled(self) -> Iterator[Fate]:
        """Return the fate of each edit that added lines, in the order of the log."""
        for edit in self._edits:
            last = self._at_end.get((edit.fate.step.session, edit.fate.path))
            edit.fate.n_at_end_of_session = edit.n_in(last)
            self._follow(edit)
            yield edit.fate

    def _follow(self, edit: _FollowedEdit) -> None:
        """Look for the lines in the commits that came after."""
        fate = edit.fate
        tree = self._history.tree_of(fate.path)
        if tree is None:
            return
        blobs = self._blobs_after(tree.repository, tree.relative(fate.path), fate.step)
        for blob in blobs:
            if n := edit.n_in(text_of(tree.repository.blob(blob)) if blob else None):
                fate.n_committed = n
                break
        if fate.n_committed is not None:
            fate.n_now = edit.n_in(text_of(tree.repository.blob(blobs[-1])) if blobs[-1] else None)

    def _blobs_after(self, repository: Repository, path: str, step: LoggedCall) -> list[str]:
        """Return the blobs of a file in the commits of the branch after a step, the oldest first."""
        key = str(repository.path), path, step.branch
        runs = self._versions.get(key)
        if runs is None:
            runs = self._versions[key] = _runs(repository, path, step.branch)
        return [blob for last, blob in runs if last > step.answered - 1]


def fates(history: History, log: Log) -> Iterator[Fate]:
    """Return the fate of each successful edit that added lines, in the order of the log."""
    book = FateBook(history)
    for order, step in enumerate(log.steps):
        history.enter(order, step)
        book.take(step)
    yield from book.settled()


def _runs(repository: Repository, path: str, branch: str | None) -> list[tuple[int, str]]:
    """Return the blobs of a file along a branch, each with the moment of the last commit that has it."""
    runs: list[tuple[int, str]] = []
    for commit in repository.on_branch(branch):
        blob = repository.blob_id(commit.tree, path) or ""
        if runs and runs[-1][1] == blob:
            runs[-1] = commit.committed, blob
        else:
            runs.append((commit.committed, blob))
    return runs


def _before(step: LoggedCall, rebuilt: str | None) -> str:
    original = (step.details or {}).get("originalFile")
    return original if isinstance(original, str) else rebuilt or ""


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
