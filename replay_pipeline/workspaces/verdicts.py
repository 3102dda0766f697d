"""What an action does where it would have been taken: whether it works, and with which effect.

A verdict is about one candidate at one state: the agent's own action, a teacher's, a sample of the
trainee. File tools are emulated on a copy; commands run in a sandbox, if they may run at all.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from replay_pipeline.workspaces.sandbox import Ran, Sandbox
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolResult, ToolRun
from replay_pipeline.workspaces.tree import Tree

Execute = Literal["off", "files", "commands"]
"""What may be executed: nothing, file tools by emulation, or commands in a sandbox as well."""
Status = Literal["works", "fails", "not_known"]
_WRITERS = frozenset(("Edit", "MultiEdit", "Write", "NotebookEdit"))
_GIT = re.compile(r"\bgit\b")
_ANSWER_CHARS = 4_000


class TriedCall(msgspec.Struct, frozen=True):
    """One call of a candidate."""

    name: str
    arguments: Mapping[str, Any]


class CandidateResult(msgspec.Struct, frozen=True):
    """The result of executing a candidate."""

    status: Status
    """`fails`: a call is refused by its tool. A command that ends with another status than 0 has
    worked: often that is the news."""
    error_kind: str | None = None
    answer: str = ""
    """What the first call that fails answers, else the last one; shortened."""
    effect: str | None = None
    """Names what it changed, and of commands also output and status: equal for candidates with one
    and the same effect. None where nothing was changed or printed: what was done does not show. None too
    where a command did something else the second time."""
    changed: tuple[str, ...] = ()
    """Paths of the files that it changes."""
    was_run: bool = False
    """Whether a command was run."""


class TriedState(Protocol):
    """A state at which candidates are judged."""

    tree: Tree
    cwd: str
    read: Mapping[str, str | None] | None
    """What the client has read, see `ToolRun`."""

    def root(self) -> str | None:
        """Return the working tree that a command would run in, or None."""
        ...

    def files(self) -> Mapping[str, bytes]:
        """Return everything in the working tree, by path relative to its root."""
        ...

    def objects(self) -> Path | None:
        """Return the folder of git's objects, for a `.git` folder among the files."""
        ...

    def key(self) -> str:
        """Return a name for the working tree that depends on its content."""
        ...


class Judge:
    """Judges candidates; the same candidate on the same files is judged once."""

    def __init__(
        self, execute: Execute, *, sandbox: Sandbox | None = None, kept: Path | None = None
    ) -> None:
        """Set what may be executed.

        Args:
            execute: nothing, file tools, or commands too.
            sandbox: for commands.
            kept: an SQLite file in which verdicts of commands are kept.

        Raises:
            ValueError: commands may run, but there is no sandbox.
        """
        if execute == "commands" and sandbox is None:
            raise ValueError("running commands needs a sandbox")
        self.execute = execute
        self.sandbox = sandbox
        self._kept = kept
        self.n_run = 0
        """Commands that were run."""

    def judge(self, place: TriedState, calls: Sequence[TriedCall]) -> CandidateResult:
        """Execute a candidate's calls in order, and return the result."""
        if self.execute == "off" or not calls:
            return CandidateResult("not_known")
        run = ToolRun(place.tree, cwd=place.cwd, read=place.read)
        answer = ToolResult("")
        commands: list[Ran] = []
        for call in calls:
            if call.name == "Bash" and self.execute == "commands":
                ran = self._command(place, run, call)
                if ran is None:
                    return CandidateResult("not_known", was_run=True)
                commands.append(ran)
                answer = ToolResult(ran.output)
                continue
            if call.name not in FILE_TOOLS:
                return CandidateResult("not_known")
            answer = run.call(call.name, call.arguments)
            if answer.error_kind is not None:
                status: Status = "fails" if answer.is_known else "not_known"
                kind = answer.error_kind if answer.is_known else None
                return CandidateResult(
                    status, kind, answer.text[:_ANSWER_CHARS], was_run=bool(commands)
                )
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
            was_run=bool(commands),
        )

    def _command(self, place: TriedState, run: ToolRun, call: TriedCall) -> Ran | None:
        """Run a command on the files as the calls before it have left them."""
        command, root = call.arguments.get("command"), place.root()
        if not isinstance(command, str) or root is None or self.sandbox is None:
            return None
        before = dict(run.view.effect())
        limits = msgspec.to_builtins(self.sandbox.limits)
        key = _hash([self.sandbox.name, limits, place.key(), place.cwd, before, command])
        ran = self._known(key)
        if ran is None:
            objects = place.objects()
            files = dict(place.files())
            if objects is not None and not self.sandbox.can_read(objects):
                if _GIT.search(command):
                    return None
                objects = None
                files = {name: data for name, data in files.items() if name[:5] != ".git/"}
            for path, text in before.items():
                name = path.removeprefix(root + "/")
                files.pop(name, None)
                if text is not None:
                    files[name] = text.encode()
            place_of_it: Any = {"root": root, "files": files, "cwd": place.cwd, "objects": objects}
            ran = self.sandbox.run(command, **place_of_it)
            if ran.status is not None:  # what was stopped for its time is not worth as much again
                again = self.sandbox.run(command, **place_of_it)
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


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
