"""States as episodes. The reward is that the project's check passes, or that the consensus is met.

At a checked state an agent has the files, acts with the client's tools, and should make the check
pass. At a recorded state of a published dataset it makes the calls of one decision. They have no
results, because the recording ends there.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from replay_pipeline.actions.reward import consensus_reward
from replay_pipeline.types import Tool
from replay_pipeline.workspaces.sandbox import Ran
from replay_pipeline.workspaces.tools import FILE_TOOLS, ToolRun
from replay_pipeline.workspaces.tree import FileTree

Run = Callable[["CheckedTask", str, Mapping[str, bytes]], Ran]
"""Runs a command on files of a task's root."""
_CLIENT_TOOLS = {
    "Read": ("Read a file.", "file_path", "offset:integer limit:integer"),
    "Edit": (
        "Replace a text in a file.",
        "file_path old_string new_string",
        "replace_all:boolean",
    ),
    "Write": ("Write a file.", "file_path content", ""),
    "Grep": ("Search the files for a pattern.", "pattern", "path glob output_mode"),
    "Glob": ("Find files by name.", "pattern", "path"),
    "Bash": ("Run a command in the shell.", "command", ""),
}
"""By name: what a tool does, the arguments that it needs, and the others. An argument is a string by default."""
NO_RESULT = "The recording ends here."


def _tool(name: str, about: str, needed: str, others: str) -> Tool:
    named = (word.partition(":") for word in f"{needed} {others}".split())
    kinds = {argument: {"type": kind or "string"} for argument, _, kind in named}
    parameters = {"type": "object", "properties": kinds, "required": needed.split()}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


class EpisodeTurn(msgspec.Struct, frozen=True):
    """The results of one call of an episode."""

    text: str
    error: str | None
    reward: float
    is_done: bool


class RecordedTask(msgspec.Struct, frozen=True):
    """A state at which the teachers agreed on tool calls."""

    row: dict[str, Any]
    """The row of the dataset's `prompts`, with its split."""
    tools: list[Tool]

    def begin(self) -> "RecordedEpisode":
        """Begin an episode, which is over after as many calls as the consensus has."""
        return RecordedEpisode(self)


class RecordedEpisode:
    """One decision at a recorded state. Its reward is how well it agrees with the consensus."""

    def __init__(self, task: RecordedTask) -> None:
        self._row = task.row
        self._names = {tool["function"]["name"] for tool in task.tools}
        self._n_calls = len(task.row["consensus"]["tool_calls"])
        self._calls: list[dict[str, Any]] = []
        self._score = 0.0

    def call(self, name: str, arguments: Mapping[str, Any]) -> EpisodeTurn:
        """Add a call to the decision; its reward is by how much the agreement grew."""
        is_done = len(self._calls) >= self._n_calls
        if is_done or name not in self._names:
            error = "the episode is over" if is_done else f"there is no tool {name}"
            return EpisodeTurn("", error, 0.0, is_done)
        function = {"name": name, "arguments": json.dumps(dict(arguments), sort_keys=True)}
        number = len(self._calls)
        self._calls.append({"id": f"call_{number}", "type": "function", "function": function})
        action = {"role": "assistant", "content": "", "tool_calls": list(self._calls)}
        before, self._score = self._score, consensus_reward(action, self._row)
        is_done = len(self._calls) >= self._n_calls
        return EpisodeTurn(NO_RESULT, None, self._score - before, is_done)


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
    run: Run
    """Runs the check and the agent's commands in a sandbox."""
    max_calls: int = 32
    """After so many calls an episode is over."""

    @property
    def row(self) -> dict[str, Any]:
        """Return what an agent is told."""
        return {"state_id": self.state_id, "prompt": self.messages, "check": self.check}

    @property
    def tools(self) -> list[Tool]:
        """Return the tools of its episodes."""
        return [_tool(name, *facts) for name, facts in _CLIENT_TOOLS.items()]

    def begin(self) -> "CheckedEpisode":
        """Begin an episode at the files of the task."""
        return CheckedEpisode(self)


class CheckedEpisode:
    """One attempt at a checked task. The rewards of its calls add up to 1 if the check passes at the end.

    A check that passed at the start gives no reward.
    """

    def __init__(self, task: CheckedTask) -> None:
        self.task = task
        self._files = dict(task.files())
        texts = {name: data.decode("utf-8", "replace") for name, data in self._files.items()}
        self._tools = ToolRun(FileTree(task.root, texts), cwd=task.cwd)
        self._n_left = task.max_calls
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
            ran = self.task.run(self.task, str(arguments.get("command")), self._now())
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
        return self.task.run(self.task, self.task.check, self._now()).status == 0


OfferedTask = RecordedTask | CheckedTask
"""A state that is on offer: what an agent is told as `row`, with its messages as `prompt`, and `tools`."""
Attempt = RecordedEpisode | CheckedEpisode
"""One attempt at a task. The rewards of its calls add up."""
