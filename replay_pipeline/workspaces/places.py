"""A state at which candidates are judged, while the history of its log advances."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sandbox import git_files
from replay_pipeline.workspaces.tree import Tree


class StatePlace:
    """The files right before a decision. Valid only until the history moves to the next step."""

    def __init__(self, history: History, step: LoggedCall) -> None:
        """Stand where a history has been entered.

        Args:
            history: entered at `step`.
            step: the decision's first call.
        """
        self.tree: Tree = history
        self.cwd = step.cwd or "/"
        self.read: Mapping[str, str | None] | None = history.read.get(
            (step.session, step.agent), {}
        )
        self._history = history
        self._step = step
        self._tree = history.tree_of(self.cwd)

    def root(self) -> str | None:
        """Return the state's working tree, or None if it isn't in one."""
        return self._tree.root if self._tree is not None else None

    @cached_property
    def _changed(self) -> dict[str, str | None]:
        """Return files of the tree that are not as its commit has them."""
        tree = self._tree
        if tree is None:
            return {}
        told = {*self._history.known, *self._history.sightings.paths(), *self._history.parts}
        found: dict[str, str | None] = {}
        for path in sorted(each for each in told if self._history.tree_of(each) is tree):
            file = self._history.file(path)
            if file is not None and (file.source != "git" or file.origin != self._commit_id):
                found[tree.relative(path)] = file.text
        return found

    @property
    def _commit_id(self) -> str:
        commits = self._history.commits(self._tree) if self._tree is not None else []
        return commits[0].id if commits else ""

    def files(self) -> dict[str, bytes]:
        """Return all files of the working tree, with a `.git` folder."""
        return self._files

    @cached_property
    def _files(self) -> dict[str, bytes]:
        tree = self._tree
        if tree is None or not (commits := self._history.commits(tree)):
            return {}
        repository, commit = tree.repository, commits[0]
        found = {
            path: data
            for path, blob in repository.files(commit.tree).items()
            if (data := repository.blob(blob)) is not None
        }
        for path, text in self._changed.items():
            if text is None:
                found.pop(path, None)
            elif found.get(path, b"").replace(b"\r\n", b"\n") != text.encode():
                found[path] = text.encode()
        return found | git_files(repository, commit, self._step.branch, self._step.answered)

    def objects(self) -> Path | None:
        """Return the folder with the repository's objects."""
        tree = self._tree
        return tree.repository.objects if tree is not None else None

    def key(self) -> str:
        """Return a hash of the working tree's content."""
        text = json.dumps([self.root(), self._commit_id, self._step.branch, self._changed])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
