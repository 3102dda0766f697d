"""Which folders of a log were working trees of a repository: clones, worktrees, on any machine."""

import posixpath
from collections import Counter
from collections.abc import Iterable

from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.tree import is_below

_PATH_ARGUMENTS = ("file_path", "notebook_path", "path")
_N_TREES = 40


class Roots:
    """Working trees of one repository, found by the paths that a log names.

    A folder is a root where what is called below it is what the repository calls its files. So
    worktrees that are gone, and clones on other machines, are found as well.
    """

    def __init__(self, repository: Repository, steps: Iterable[LoggedCall]) -> None:
        """Look through the paths of all calls."""
        known = self._paths = _paths_of(repository)
        votes: Counter[str] = Counter()
        n_deep: Counter[str] = Counter()
        paths: set[str] = set()
        cwds: set[str] = set()
        for step in steps:
            cwds.add(step.cwd or "")
            paths.update(_paths_in(step))
        for path in paths:
            parts = path.split("/")
            for i in range(2, len(parts)):
                if "/".join(parts[i:]) in known:
                    root = "/".join(parts[:i])
                    votes[root] += 1
                    n_deep[root] += len(parts) - i > 1
                    break
        # A file in the top folder, such as README.md, is in every project.
        found = [root for root in votes if n_deep[root] >= 2 or (n_deep[root] and root in cwds)]
        self._roots = sorted({*found, *repository.worktrees()}, key=len, reverse=True)

    def was_committed(self, path: str) -> bool:
        """Return whether commits have a path, relative to a root."""
        return path in self._paths

    def root_of(self, path: str) -> str | None:
        """Return the working tree that a path lies in, the innermost one."""
        return next((root for root in self._roots if is_below(path, root)), None)


def _paths_in(step: LoggedCall) -> Iterable[str]:
    for name in _PATH_ARGUMENTS:
        value = step.arguments.get(name)
        if isinstance(value, str) and value:
            yield posixpath.normpath(posixpath.join(step.cwd or "/", value))


def _paths_of(repository: Repository) -> set[str]:
    """Return paths of files in the newest commits and at the tips of branches."""
    commits = [*repository.before(float("inf"), branch=None, n=_N_TREES)]
    commits += [repository.commits[tip] for tip in set(repository.tips.values()) if tip in repository.commits]  # fmt: skip
    return {path for tree in {commit.tree for commit in commits} for path in repository.files(tree)}
