"""Read a git repository without a checkout. One process reads its commits, trees, and blobs.

Nothing is fetched, so objects that a partial clone lacks are missing.
"""

import re
import subprocess
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.errors import IngestError
from replay_pipeline.storage.processes import start_environment

_BLOB_CACHE_BYTES = 64_000_000
_MAX_TREES = 20_000
_MERGED = ("Merge pull request #", "Merge branch '", "Merge remote-tracking branch '")
# A repository's own settings can name programs; none of them is run.
_NO_PROGRAMS = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "log.showSignature=false")


class GitCommit(msgspec.Struct, frozen=True, gc=False):
    """One commit of any branch."""

    id: str
    committed: int
    """When it was committed, in seconds since 1970. A rebase changes it."""
    authored: int
    """When its change was first committed, in seconds since 1970. A rebase keeps it."""
    parents: tuple[str, ...]
    subject: str
    tree: str


class Repository:
    """The objects of one repository, read by one process `git cat-file --batch`."""

    def __init__(self, path: Path) -> None:
        """Open the repository that `path` is, or lies in.

        Raises:
            IngestError: there is no repository, or no program called git.
        """
        self.path = path
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._blobs: OrderedDict[str, bytes | None] = OrderedDict()
        self._n_cached = 0
        self._trees: dict[str, dict[str, tuple[str, str]]] = {}
        self._flat: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._branches: dict[str | None, list[GitCommit]] = {}
        self._lines: dict[str, list[GitCommit]] = {}
        self._line_ids: dict[str, set[str]] = {}
        self._own: dict[str, list[GitCommit]] = {}
        self.objects = Path(self._git("rev-parse", "--git-path", "objects").strip())
        if not self.objects.is_absolute():
            self.objects = path / self.objects

    def close(self) -> None:
        """End the process that reads objects."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            process.wait(timeout=30)
            process.stdout.close()

    def _command(self, *arguments: str) -> list[str]:
        settings = [word for each in _NO_PROGRAMS for word in ("-c", each)]
        return ["git", *settings, "-C", str(self.path), *arguments]

    def _git(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                self._command(*arguments), capture_output=True, check=False, env=_environment()
            )
        except FileNotFoundError as error:
            raise IngestError(
                "git is not installed: install it, because the files of a state come from git"
            ) from error
        if done.returncode:
            why = done.stderr.decode("utf-8", "replace").strip()
            raise IngestError(f"{self.path}: git {arguments[0]} failed: {why}")
        return done.stdout.decode("utf-8", "replace")

    @cached_property
    def commits(self) -> dict[str, GitCommit]:
        """Return by id every commit that a ref reaches or has reached."""
        lines = self._git(
            "log",
            "--all",
            "--reflog",
            "--date-order",
            "--format=%H%x09%ct%x09%at%x09%P%x09%T%x09%s",
        )
        found: dict[str, GitCommit] = {}
        for line in lines.splitlines():
            commit_id, committed, authored, parents, tree, subject = line.split("\t", 5)
            found[commit_id] = GitCommit(
                commit_id, int(committed), int(authored), tuple(parents.split()), subject, tree
            )
        return found

    def has(self, revision: str) -> bool:
        """Return whether the beginning of a commit's id names one, with a file in it behind a `:`."""
        commit, _, path = revision.partition(":")
        begin, *back = re.split(r"(?=[~^])", commit, maxsplit=1)
        found = [commit for name, commit in self.commits.items() if name.startswith(begin)]
        if back and path:
            return False
        return len(found) == 1 and (not path or self.blob_id(found[0].tree, path) is not None)

    @cached_property
    def tips(self) -> dict[str, str]:
        """Return the commits of branches, here or on a remote, and of branches that were merged."""
        found: dict[str, str] = {}
        for commit in self.commits.values():
            if len(commit.parents) > 1 and commit.subject.startswith(_MERGED):
                for name in _merged_names(commit.subject):
                    found.setdefault(name, commit.parents[1])
        for line in self._git(
            "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/remotes"
        ).splitlines():
            commit_id, _, name = line.partition(" ")
            parts = name.split("/")
            if parts[-1] == "HEAD":
                continue  # of a remote: which branch a clone checks out, and no branch itself
            found["/".join(parts[2:] if parts[1] == "heads" else parts[3:])] = commit_id
        return found

    @cached_property
    def remote_branches(self) -> set[str]:
        """Return the names of its remotes' branches. A mirror has no other branches."""
        if self._git("rev-parse", "--is-bare-repository").strip() == "true":
            return {*self.tips}
        names = self._git("for-each-ref", "--format=%(refname:lstrip=3)", "refs/remotes")
        return {*names.splitlines()}

    def worktrees(self) -> list[str]:
        """Return the folders on this machine in which it is checked out."""
        lines = self._git("worktree", "list", "--porcelain").splitlines()
        return [line.removeprefix("worktree ") for line in lines if line.startswith("worktree ")]

    def checkouts(self, folder: str) -> list[tuple[float, str]]:
        """Return the commits that were checked out in a working tree, with their times, from git's own log."""
        if folder not in self.worktrees() or not Path(folder).is_dir():
            return []
        form = ("--format=%H%x09%gd", "--date=unix")
        try:
            lines = self._git("-C", folder, "log", "--walk-reflogs", *form, "HEAD", "--")
        except IngestError:  # nothing was ever committed there
            return []
        kept = (line.split("\t") for line in lines.splitlines())
        found = [(float(name.partition("{")[2].rstrip("}")), commit) for commit, name in kept]
        found.reverse()  # of one second, the newest stays last
        found.sort(key=lambda each: each[0])
        return found

    def on_branch(self, branch: str | None) -> list[GitCommit]:
        """Return the commits that a branch reaches, the oldest first. For an unknown branch, all commits."""
        if branch is not None and branch not in self.tips:
            branch = None
        known = self._branches.get(branch)
        if known is None:
            # Of one second, parents stand before their children.
            commits: Iterable[GitCommit] = [*self.commits.values()][::-1]
            if branch is not None:
                ids = _ancestors(self.commits, self.tips[branch])
                commits = [commit for commit in commits if commit.id in ids]
            known = sorted(commits, key=lambda each: each.committed)
            self._branches[branch] = known
        return known

    @cached_property
    def default_branch(self) -> str | None:
        """Return the branch that a clone checks out, mostly `main`."""
        name = self._git("rev-parse", "--abbrev-ref", "HEAD").strip()
        return name if name in self.tips else None

    @cached_property
    def trunks(self) -> set[str]:
        """Return the branches of `main`, `master`, and what is checked out that there are."""
        return {*filter(None, ("main", "master", self.default_branch))} & self.tips.keys()

    def line(self, branch: str) -> set[str]:
        """Return the commits that were once the newest of a branch: its tip and its first parents."""
        if branch not in self._line_ids:
            self._line_ids[branch] = {commit.id for commit in self._line(branch)}
        return self._line_ids[branch]

    def _line(self, branch: str) -> list[GitCommit]:
        """Return the tip of a branch and its first parents, the newest last."""
        if branch not in self._lines:
            found: list[GitCommit] = []
            commit = self.commits.get(self.tips[branch])
            while commit is not None:
                found.append(commit)
                commit = self.commits.get(commit.parents[0]) if commit.parents else None
            self._lines[branch] = found[::-1]
        return self._lines[branch]

    def own_at(self, branch: str, moment: float) -> GitCommit | None:
        """Return a branch's newest own commit whose change was made by a moment, even if it was rebased later.

        Before the first one it is the commit on which the branch began.
        """
        if branch not in self._own:
            self._own[branch] = self._own_commits(branch) if branch in self.tips else []
        *_, first = (None, *self._own[branch])
        if first is not None and first.authored > moment and first.parents:
            # It began there, or was rebased onto it later.
            begin = self.commits.get(first.parents[0])
            return begin if begin is not None and begin.committed <= moment else None
        return next((each for each in self._own[branch] if each.authored <= moment), None)

    def _own_commits(self, branch: str) -> list[GitCommit]:
        """Return a branch's first parents down to another trunk; the newest first."""
        main = {commit_id for trunk in self.trunks - {branch} for commit_id in self.line(trunk)}
        return [*takewhile(lambda each: each.id not in main, reversed(self._line(branch)))]

    def tip_at(self, branch: str, moment: float) -> GitCommit | None:
        """Return the newest commit of a branch at a time, judged by its first parents."""
        line = self._line(branch)
        end = bisect_right(line, moment, key=lambda each: each.committed)
        return line[end - 1] if end else None

    def before(self, moment: float, *, branch: str | None, n: int) -> list[GitCommit]:
        """Return the newest `n` commits of a branch made up to `moment`, the newest first."""
        commits = self.on_branch(branch)
        end = bisect_right(commits, moment, key=lambda each: each.committed)
        return commits[max(0, end - n) : end][::-1]

    def after(self, moment: float, *, branch: str | None, n: int) -> list[GitCommit]:
        """Return the first `n` commits of a branch made after `moment`, the oldest first."""
        commits = self.on_branch(branch)
        start = bisect_right(commits, moment, key=lambda each: each.committed)
        return commits[start : start + n]

    def blob_id(self, tree: str, path: str) -> str | None:
        """Return the id of the file at `path` (relative, `/`) in a tree, or None."""
        parts = path.split("/")
        for part in parts[:-1]:
            kind, tree = self._tree(tree).get(part, ("", ""))
            if kind != "tree":
                return None
        kind, blob = self._tree(tree).get(parts[-1], ("", ""))
        return blob if kind == "blob" else None

    def files(self, tree: str) -> Mapping[str, str]:
        """Return the ids of all files below a tree, by path. Links and submodules are left out."""
        known = self._flat.get(tree)
        if known is None:
            known = self._flat[tree] = dict(self._walk(tree, ""))
            while len(self._flat) > 8:
                self._flat.popitem(last=False)
        return known

    def _walk(self, tree: str, above: str) -> Iterable[tuple[str, str]]:
        for name, (kind, object_id) in self._tree(tree).items():
            if kind == "tree":
                yield from self._walk(object_id, f"{above}{name}/")
            elif kind == "blob":
                yield f"{above}{name}", object_id

    def _tree(self, tree: str) -> dict[str, tuple[str, str]]:
        known = self._trees.get(tree)
        if known is None:
            if len(self._trees) >= _MAX_TREES:
                self._trees.clear()
            known = self._trees[tree] = _entries(self._object(tree) or b"", len(tree) // 2)
        return known

    def blob(self, blob_id: str) -> bytes | None:
        """Return the bytes of a file, or None if the repository doesn't have them."""
        with self._lock:
            return self._cached(blob_id)

    def _cached(self, blob_id: str) -> bytes | None:
        if blob_id in self._blobs:
            self._blobs.move_to_end(blob_id)
            return self._blobs[blob_id]
        data = self._object(blob_id)
        self._blobs[blob_id] = data
        self._n_cached += len(data or b"")
        while self._n_cached > _BLOB_CACHE_BYTES and len(self._blobs) > 1:
            self._n_cached -= len(self._blobs.popitem(last=False)[1] or b"")
        return data

    def _object(self, object_id: str) -> bytes | None:
        with self._lock:
            process = self._process
            if process is None:
                process = self._process = subprocess.Popen(
                    self._command("cat-file", "--batch"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_environment(),
                )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(object_id.encode() + b"\n")
            process.stdin.flush()
            head = process.stdout.readline().split()
            if len(head) != 3:
                return None
            data = process.stdout.read(int(head[2]))
            process.stdout.read(1)
            return data


def find_repositories(folders: Iterable[str]) -> list[Path]:
    """Return the repositories that contain these folders. A repository with several worktrees counts once."""
    found: dict[Path, None] = {}
    for folder in map(Path, sorted({*folders})):
        if not folder.is_absolute() or not folder.is_dir():
            continue
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), "rev-parse", "--git-common-dir"],
                capture_output=True, text=True, check=False, env=_environment(),
            )  # fmt: skip
        except FileNotFoundError:
            return []
        if done.returncode == 0:
            found[(folder / done.stdout.strip()).resolve()] = None
    return list(found)


def _environment() -> dict[str, str]:
    return start_environment(
        GIT_NO_LAZY_FETCH="1", GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C"
    )


def _entries(data: bytes, n_id_bytes: int) -> dict[str, tuple[str, str]]:
    """Return entries of a tree object by name: what each is, and its id."""
    found: dict[str, tuple[str, str]] = {}
    at = 0
    while at < len(data):
        end = data.index(b"\0", at)
        mode, _, name = data[at:end].partition(b" ")
        at = end + 1 + n_id_bytes
        kind = "tree" if mode == b"40000" else "blob" if mode.startswith(b"100") else "other"
        found[name.decode("utf-8", "surrogateescape")] = kind, data[end + 1 : at].hex()
    return found


def _merged_names(subject: str) -> list[str]:
    if subject.startswith(_MERGED[0]):
        source = subject.rpartition(" from ")[2].strip()
        return [source.partition("/")[2]] if "/" in source else []
    name = subject.split("'")[1]
    return [name, name.partition("/")[2]] if "remote" in subject else [name]


def _ancestors(commits: Mapping[str, Any], tip: str) -> set[str]:
    found: set[str] = set()
    waiting = [tip]
    while waiting:
        each = waiting.pop()
        if each not in found and each in commits:
            found.add(each)
            waiting += commits[each].parents
    return found
