"""What became of recorded edits: which of their lines are still there, later in the session and in git."""

from collections import Counter
from collections.abc import Iterator

import msgspec

from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.heads import text_of
from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import Log, LoggedCall
from replay_pipeline.workspaces.sightings import path_of, text_after

_CHANGES = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))


class Fate(msgspec.Struct):
    """The fate of the lines that one edit added. Lines without a letter or digit don't count."""

    step: LoggedCall
    path: str
    n_added: int
    n_at_end_of_session: int
    """Of them in the file as the session last knew it."""
    n_committed: int | None = None
    """Of them in the first commit of the branch, after the edit, that has any of them; None where none
    has."""
    n_now: int | None = None
    """Of them in the newest commit of that branch; None where it was never committed."""

    @property
    def is_undone(self) -> bool:
        """Return whether at least half of the lines were removed later in the session."""
        return 2 * self.n_at_end_of_session < self.n_added


def fates(history: History, log: Log) -> Iterator[Fate]:
    """Return the fate of each successful edit that added lines, in the order of the log."""
    found: list[tuple[Fate, Counter[str]]] = []
    at_end: dict[tuple[str, str], str | None] = {}
    for order, step in enumerate(log.steps):
        history.enter(order, step)
        path = path_of(step)
        is_change = step.name in _CHANGES and not step.is_error and path is not None
        before = history.file(path) if is_change and path is not None else None
        history.take(step)
        known = history.known.get(path) if path is not None else None
        if path is None or known is None:
            continue
        at_end[step.session, path] = known.text
        if is_change and (after := text_after(step) or known.text) is not None:
            added = _lines(after) - _lines(_before(step, before.text if before else None))
            if added:
                found.append((Fate(step, path, added.total(), 0), added))
    for fate, added in found:
        last = at_end.get((fate.step.session, fate.path))
        fate.n_at_end_of_session = _n_in(added, last)
        _follow(history, fate, added)
        yield fate


def _before(step: LoggedCall, rebuilt: str | None) -> str:
    original = (step.details or {}).get("originalFile")
    return original if isinstance(original, str) else rebuilt or ""


def _follow(history: History, fate: Fate, added: Counter[str]) -> None:
    """Look for the lines in the commits that came after."""
    tree = history.tree_of(fate.path)
    if tree is None:
        return
    repository, path = tree.repository, tree.relative(fate.path)
    versions = _versions(repository, path, fate.step)
    for text in versions:
        if n := _n_in(added, text):
            fate.n_committed = n
            break
    if fate.n_committed is not None:
        fate.n_now = _n_in(added, versions[-1])


def _versions(repository: Repository, path: str, step: LoggedCall) -> list[str | None]:
    """Return the file in the commits of the branch after a step, each content once, the oldest first."""
    found: list[str | None] = []
    last = ""
    for commit in repository.after(step.answered - 1, branch=step.branch, n=10_000):
        blob = repository.blob_id(commit.tree, path) or ""
        if blob != last:
            last = blob
            found.append(text_of(repository.blob(blob)) if blob else None)
    return found


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.splitlines() if any(map(str.isalnum, line)))


def _n_in(added: Counter[str], text: str | None) -> int:
    return (added & _lines(text)).total() if text else 0
