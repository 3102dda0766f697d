"""Find the folders in a log that were clones or worktrees of a repository, on any machine."""

import posixpath
from collections import Counter
from collections.abc import Iterable

from replay_pipeline.workspaces.git import Repository
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.tree import is_below

_PATH_ARGUMENTS = ("file_path", "notebook_path", "path")
_N_TREES = 40


class Roots:
    """The working trees of one repository, found from the paths in a log.

    A folder is a root if the paths below it are the names of the repository's files. So deleted
    worktrees and clones on other machines are found as well.
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
        """Return whether any commit has this path, relative to a root."""
        return path in self._paths

    def root_of(self, path: str) -> str | None:
        """Return the innermost working tree that contains a path."""
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
