"""Find out whether an action works at a state, and which effect it has.

A candidate is an action at a state: the agent's own, a teacher's, or a sample of the model being
trained. File tools are emulated on a copy. Commands run in a sandbox, if the settings allow
commands.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from difflib import unified_diff
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from replay_pipeline.workspaces.history import History
from replay_pipeline.workspaces.logs import LoggedCall
from replay_pipeline.workspaces.sandbox import Ran, Sandbox, git_files
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolResult, ToolRun
from replay_pipeline.workspaces.tree import Tree

Execute = Literal["off", "files", "commands"]
"""What may be executed: nothing, emulated file tools, or also commands in a sandbox."""
Status = Literal["works", "fails", "not_known"]
_WRITERS = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))
_GIT = re.compile(r"\bgit\b")
_ANSWER_CHARS = 4_000
_DIFF_LINES = 400
_DIFF_CHARS = 20_000


class TriedCall(msgspec.Struct, frozen=True):
    """One call of a candidate, and its result."""

    name: str
    arguments: Mapping[str, Any]


class CheckedFiles(msgspec.Struct, frozen=True):
    """Results of the project's check before and after a candidate."""

    was_passing: bool
    is_passing: bool


class CandidateResult(msgspec.Struct, frozen=True):
    """The result of executing a candidate."""

    status: Status
    """`fails` if a tool refuses a call. A command with a status other than 0 counts as working,
    because a failing test is often the information that is wanted."""
    error_kind: str | None = None
    answer: str = ""
    """The answer of the first failing call, else of the last call; shortened."""
    effect: str | None = None
    """A hash of its changes and of the output and status of commands. It is equal for candidates
    with the same effect. None if nothing was changed or printed, or if a command's second run had
    another result."""
    changed: tuple[str, ...] = ()
    """Paths of the files that it changes."""
    diff: str = ""
    """How the files differ afterwards, as a unified diff; shortened."""
    checked: CheckedFiles | None = None
    """The check's results, if the candidate changes files and the check gives the same result each time."""


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
        """Return all files of the working tree by path relative to its root, with a `.git` folder."""
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
        return _hash([self.root(), self._commit_id, self._step.branch, self._changed])


class Judge:
    """Judges candidates. The same candidate on the same files is judged only once."""

    def __init__(
        self,
        execute: Execute,
        *,
        sandbox: Sandbox | None = None,
        kept: Path | None = None,
        checks: Mapping[str, str] | None = None,
    ) -> None:
        """Set what may be executed.

        Args:
            execute: nothing, file tools, or commands too.
            sandbox: for commands.
            kept: an SQLite file in which verdicts of commands are kept.
            checks: by working tree, the command that checks its project. It runs where commands do.

        Raises:
            ValueError: commands may run, but there is no sandbox.
        """
        if execute == "commands" and sandbox is None:
            raise ValueError("running commands needs a sandbox")
        self.execute = execute
        self.sandbox = sandbox
        self.checks = checks or {}
        self._kept = kept
        self.n_run = 0
        """Commands that were run."""

    def judge(self, place: StatePlace, calls: Sequence[TriedCall]) -> CandidateResult:
        """Run a candidate's calls in order, and return the result."""
        if self.execute == "off" or not calls:
            return CandidateResult("not_known")
        run = ToolRun(place.tree, cwd=place.cwd, read=place.read)
        answer = ToolResult("")
        commands: list[Ran] = []
        for call in calls:
            if call.name == "Bash" and self.execute == "commands":
                ran = self._command(place, run, call)
                if ran is None:
                    return CandidateResult("not_known")
                commands.append(ran)
                answer = ToolResult(ran.output)
                continue
            if call.name not in FILE_TOOLS:
                return CandidateResult("not_known")
            answer = run.call(call.name, call.arguments)
            if answer.error_kind is not None:
                status: Status = "fails" if answer.is_known else "not_known"
                kind = answer.error_kind if answer.is_known else None
                return CandidateResult(status, kind, answer.text[:_ANSWER_CHARS])
        changes = run.view.effect()
        shows = any(ran.output.strip() for ran in commands)
        shows |= bool(changes) or any(call.name in _WRITERS for call in calls)
        has_effect = shows and all(ran.is_repeatable for ran in commands)
        printed = [f"{ran.status}\n{ran.output}" for ran in commands]
        return CandidateResult(
            "works",
            answer=answer.text[:_ANSWER_CHARS],
            effect=_hash([changes, printed]) if has_effect else None,
            changed=tuple(changes),
            diff=_diff(place, changes),
            checked=self._checked(place, changes),
        )

    def answers(self, place: StatePlace, calls: Sequence[TriedCall]) -> list[str] | None:
        """Run calls in order, and return what a client would show of each; None where one can't be carried out."""
        run = ToolRun(place.tree, cwd=place.cwd)
        found: list[str] = []
        for call in calls:
            if call.name == "Bash" and self.execute == "commands":
                ran = self._command(place, run, call)
                if ran is None or ran.status is None:
                    return None
                text = ran.output.strip("\n").rstrip() or "(Bash completed with no output)"
                found.append(f"Exit code {ran.status}\n{text}" if ran.status else text)
                continue
            if self.execute == "off" or call.name not in FILE_TOOLS:
                return None
            answer = run.call(call.name, call.arguments)
            if not answer.is_known:
                return None
            refused = f"<tool_use_error>{answer.text}</tool_use_error>"
            found.append(answer.text if answer.error_kind is None else refused)
        return found

    def _checked(self, place: StatePlace, changes: Mapping[str, str | None]) -> CheckedFiles | None:
        """Run the project's check before and after a candidate's changes."""
        check = self.checks.get(place.root() or "")
        if not changes or check is None or self.execute != "commands":
            return None
        seen = [self._passes(place, check, files, nth=1) for files in ({}, changes)]
        if seen[0] != seen[1]:  # a test that fails now and then would be praised or blamed
            again = [self._passes(place, check, files, nth=2) for files in ({}, changes)]
            seen = seen if seen == again else [None]
        return None if None in seen else CheckedFiles(bool(seen[0]), bool(seen[1]))

    def _passes(
        self, place: StatePlace, check: str, changes: Mapping[str, str | None], *, nth: int
    ) -> bool | None:
        """Return whether the check passes on changed files, or None where it takes too long."""
        root = place.root()
        if self.sandbox is None or root is None:
            return None
        key = self._key(place, root, changes, check, nth)
        ran = self._known(key)
        if ran is None:
            files = _changed(_without_git(place.files()), root, changes)
            ran = self.sandbox.run(check, root=root, files=files, cwd=root)
            self.n_run += 1
            self._keep(key, ran)
        return None if ran.status is None else ran.status == 0

    def _key(self, place: StatePlace, *more: Any) -> str:
        assert self.sandbox is not None
        limits = msgspec.to_builtins(self.sandbox.limits)
        return _hash([limits, place.key(), *more])

    def _command(self, place: StatePlace, run: ToolRun, call: TriedCall) -> Ran | None:
        """Run a command on the files as the calls before it have left them."""
        command, root = call.arguments.get("command"), place.root()
        if not isinstance(command, str) or root is None or self.sandbox is None:
            return None
        before = run.view.effect()
        key = self._key(place, place.cwd, before, command)
        ran = self._known(key)
        if ran is None:
            ran = run_command(self.sandbox, place, command, before)
            if ran is None:
                return None
            if ran.status is not None:  # what was stopped for its time is not worth as much again
                again = run_command(self.sandbox, place, command, before)
                ran = msgspec.structs.replace(ran, is_repeatable=again == ran)
            self.n_run += 1
            self._keep(key, ran)
        for path, text in ran.changes.items():
            run.view.write(path, text)
        return ran

    def _known(self, key: str) -> Ran | None:
        if self._kept is None:
            return None
        with closing(self._database()) as database:
            row = database.execute("SELECT ran FROM runs WHERE key = ?", (key,)).fetchone()
        return msgspec.json.decode(row[0], type=Ran) if row else None

    def _keep(self, key: str, ran: Ran) -> None:
        if self._kept is not None:
            with closing(self._database()) as database, database:
                database.execute(
                    "INSERT OR REPLACE INTO runs VALUES (?, ?)", (key, msgspec.json.encode(ran))
                )

    def _database(self) -> sqlite3.Connection:
        assert self._kept is not None
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._kept, timeout=60)
        database.execute("CREATE TABLE IF NOT EXISTS runs (key TEXT PRIMARY KEY, ran BLOB)")
        return database


def run_command(
    sandbox: Sandbox,
    place: StatePlace,
    command: str,
    changes: Mapping[str, str | None] | None = None,
) -> Ran | None:
    """Run a command on a state's files after changes, or return None where it can't run.

    It can't outside of every working tree, and git can't without a repository that it may read.
    """
    root, objects, files = place.root(), place.objects(), place.files()
    if root is None or not root.startswith("/"):
        return None  # outside of every tree, or on a drive
    if objects is not None and not sandbox.can_read(objects):
        objects, files = None, _without_git(files)
    if ".git/HEAD" not in files and _GIT.search(command):
        return None
    files = _changed(files, root, changes or {})
    return sandbox.run(command, root=root, files=files, cwd=place.cwd, objects=objects)


def _without_git(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name[:5] != ".git/"}


def _changed(
    files: Mapping[str, bytes], root: str, changes: Mapping[str, str | None]
) -> dict[str, bytes]:
    """Return files of a root after changes; what lies outside of it stays outside."""
    found = dict(files)
    for path, text in changes.items():
        if path.startswith(root + "/"):
            name = path.removeprefix(root + "/")
            found.pop(name, None)
            if text is not None:
                found[name] = text.encode()
    return found


def _diff(place: StatePlace, changes: Mapping[str, str | None]) -> str:
    """Return how changed files differ from those of a state, by path relative to the root."""
    root = (place.root() or "").rstrip("/") + "/"
    lines = (line for path in changes for line in _diff_of(place.tree, path, root, changes[path]))
    shown = "\n".join(islice(lines, _DIFF_LINES + 1))
    if shown.count("\n") < _DIFF_LINES and len(shown) <= _DIFF_CHARS:
        return shown
    return "\n".join(shown[:_DIFF_CHARS].split("\n")[:_DIFF_LINES]) + "\n…"


def _diff_of(tree: Tree, path: str, root: str, text: str | None) -> Iterator[str]:
    before = tree.file(path)
    old = before.text if before is not None else None
    one, other = ("/dev/null" if each is None else path.removeprefix(root) for each in (old, text))
    lines = [(each or "").splitlines() for each in (old, text)]
    yield from unified_diff(*lines, fromfile=one, tofile=other, lineterm="")


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
