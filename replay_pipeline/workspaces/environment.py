"""States with a check as episodes: an agent starts at the files, acts with the client's tools, and should pass the check."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from replay_pipeline.workspaces.sandbox import Ran
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolRun
from replay_pipeline.workspaces.tree import FileTree

Run = Callable[[str, Mapping[str, bytes]], Ran]
"""Runs a command on files of the task's root."""
_ARGUMENTS: dict[str, dict[str, str]] = {
    "Read": {"file_path": "string", "offset": "integer", "limit": "integer"},
    "Edit": {
        "file_path": "string",
        "old_string": "string",
        "new_string": "string",
        "replace_all": "boolean",
    },
    "Write": {"file_path": "string", "content": "string"},
    "Grep": {"pattern": "string", "path": "string", "glob": "string", "output_mode": "string"},
    "Glob": {"pattern": "string", "path": "string"},
    "Bash": {"command": "string"},
}
_REQUIRED = {
    "Read": ["file_path"],
    "Edit": ["file_path", "old_string", "new_string"],
    "Write": ["file_path", "content"],
    "Grep": ["pattern"],
    "Glob": ["pattern"],
    "Bash": ["command"],
}
_ABOUT = {
    "Read": "Read a file.",
    "Edit": "Replace a text in a file.",
    "Write": "Write a file.",
    "Grep": "Search the files for a pattern.",
    "Glob": "Find files by name.",
    "Bash": "Run a command in the shell.",
}
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": _ABOUT[name],
        "input_schema": {
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in arguments.items()},
            "required": _REQUIRED[name],
        },
    }
    for name, arguments in _ARGUMENTS.items()
]
"""The tools of an episode, in MCP's form."""


class CheckedTask(msgspec.Struct, frozen=True):
    """A state at which the project can be checked."""

    state_id: str
    root: str
    cwd: str
    check: str
    """The command that the agent should make end with status 0."""
    messages: list[dict[str, Any]]
    """The messages that the agent gets."""
    files: Callable[[], Mapping[str, bytes]]
    """Everything in the working tree, by path relative to the root."""


class EpisodeTurn(msgspec.Struct, frozen=True):
    """The results of one call of an episode."""

    text: str
    error: str | None
    reward: float
    is_done: bool


class TaskEpisode:
    """One attempt at a task. The rewards of its calls add up to 1 if the check passes at the end.

    A check that passed at the start gives no reward.
    """

    def __init__(self, task: CheckedTask, run: Run, *, max_calls: int = 32) -> None:
        """Stand at the files of a task.

        Args:
            task: which.
            run: runs the check and commands, in a sandbox.
            max_calls: after so many the episode is over.
        """
        self.task = task
        self._run = run
        self._files = dict(task.files())
        texts = {name: data.decode("utf-8", "replace") for name, data in self._files.items()}
        self._tools = ToolRun(FileTree(task.root, texts), cwd=task.cwd)
        self._n_left = max_calls
        self._passed = self._is_passing()
        self.is_done = False

    def call(self, name: str, arguments: Mapping[str, Any]) -> EpisodeTurn:
        """Make a call. If it changes files, run the check."""
        if self.is_done:
            return EpisodeTurn("The episode is over.", None, 0.0, True)
        self._n_left -= 1
        text, error, is_changed = self._called(name, arguments)
        reward = 0.0
        if is_changed:
            is_passing = self._is_passing()
            reward, self._passed = float(is_passing) - float(self._passed), is_passing
        self.is_done = self._n_left <= 0 or (is_changed and self._passed)
        return EpisodeTurn(text, error, reward, self.is_done)

    def _called(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str | None, bool]:
        if name == "Bash":
            ran = self._run(str(arguments.get("command")), self._now())
            for path, text in ran.changes.items():
                self._tools.view.write(path, text)
            status = "stopped for its time" if ran.status is None else f"Exit code {ran.status}"
            error = None if ran.status == 0 else f"{status}\n{ran.output}"
            return ran.output, error, bool(ran.changes)
        if name not in FILE_TOOLS:
            return "", f"there is no tool {name}", False
        before = dict(self._tools.view.changes)
        answer = self._tools.call(name, arguments)
        is_changed = self._tools.view.changes != before
        return answer.text, answer.text if answer.error_kind else None, is_changed

    def _now(self) -> dict[str, bytes]:
        files = dict(self._files)
        for path, text in self._tools.view.effect().items():
            name = path.removeprefix(self.task.root + "/")
            files.pop(name, None)
            if text is not None and not name.startswith("/"):
                files[name] = text.encode()
        return files

    def _is_passing(self) -> bool:
        return self._run(self.task.check, self._now()).status == 0


def row_of(task: CheckedTask) -> dict[str, Any]:
    """Return a task as a dataset row with its question and id."""
    return {"state_id": task.state_id, "prompt": task.messages, "check": task.check}
