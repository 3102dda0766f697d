"""OpenCode's own snapshots: the tree of a project before each step of its sessions.

OpenCode keeps them in a git folder of its data: `snapshot/PROJECT/…`. It has trees without commits.
The session names a tree where a step begins and where it ends.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.processes import environment
from replay_pipeline.workspaces.git import GitCommit, Repository
from replay_pipeline.workspaces.logs import UNREADABLE, Log, LoggedCall
from replay_pipeline.workspaces.tree import is_below

_HEAD = b'{"opencode": 1,'
_TREE = re.compile(r"[0-9a-f]{40,64}")
_LINE = re.compile(r"^(\d+): ?(.*)$", re.MULTILINE)
_NAMES = {
    "read": ("Read", {"filePath": "file_path", "offset": "offset", "limit": "limit"}),
    "edit": (
        "Edit",
        {
            "filePath": "file_path", "oldString": "old_string", "newString": "new_string",
            "replaceAll": "replace_all",
        },
    ),
    "write": ("Write", {"filePath": "file_path", "content": "content"}),
    "bash": ("Bash", {"command": "command", "description": "description"}),
}  # fmt: skip
"""OpenCode's tools that do what a tool of Claude Code does."""


class SnapshotLog(Log):
    """The steps of one session, and the trees that it names."""

    project: str = ""
    directory: str = ""
    trees: list[tuple[float, str]] = msgspec.field(default_factory=list)
    """When each tree was there, and its id, in order."""


class SnapshotRepository(Repository):
    """The trees of OpenCode's snapshots, each as a commit that was checked out at its time."""

    has_commits = False

    def __init__(self, path: Path, root: str, trees: Iterable[tuple[float, str]]) -> None:
        """Open the git folder of a working tree's snapshots.

        Args:
            path: the git folder.
            root: the working tree.
            trees: when each tree was there, and its id.
        """
        super().__init__(path)
        self.root = root
        # OpenCode deletes trees after some days.
        self._seen = sorted(each for each in trees if self._object(each[1]) is not None)

    @cached_property
    def commits(self) -> dict[str, GitCommit]:
        """Return a commit for each tree, at the first time that it was there."""
        found: dict[str, GitCommit] = {}
        for moment, tree in self._seen:
            when = int(moment)
            found.setdefault(tree, GitCommit(tree, when, when, (), "", tree))
        return found

    @cached_property
    def tips(self) -> dict[str, str]:
        """Return no branch."""
        return {}

    @cached_property
    def default_branch(self) -> str | None:
        """Return None."""
        return None

    def _command(self, *arguments: str) -> list[str]:
        # Its setting names a working tree that may be gone.
        return [*super()._command(), "--git-dir", str(self.path), "--work-tree", str(self.path), *arguments]  # fmt: skip

    def worktrees(self) -> list[str]:
        """Return the working tree."""
        return [self.root]

    def checkouts(self, folder: str) -> list[tuple[float, str]]:
        """Return the trees of a working tree, with their times."""
        return self._seen if folder == self.root else []


def renamed_call(name: str, arguments: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a call of OpenCode as the same call of Claude Code, or any other call as it is."""
    other, names = _NAMES.get(name, (name, {}))
    if not names:
        return name, dict(arguments)
    return other, {names[key]: value for key, value in arguments.items() if key in names}


def is_of_opencode(path: Path) -> bool:
    """Return whether a file is a session that was copied from OpenCode's database."""
    with path.open("rb") as file:
        return file.read(len(_HEAD)) == _HEAD


def read_session(path: Path) -> SnapshotLog:
    """Return the steps and trees of a session that was copied from OpenCode's database."""
    log = SnapshotLog(steps=[], backups=[], trees=[])
    session = request = ""
    with path.open("rb") as file:
        for line in file:
            log.n_rows += 1
            try:
                row = json.loads(line)
            except (*UNREADABLE, ValueError):
                log.n_unreadable += 1
                continue
            info = _dict(_dict(row).get("info"))
            if "role" not in info:
                if "id" in info:
                    session = str(info["id"])
                    log.project, log.directory = (
                        str(info.get(name) or "") for name in ("projectID", "directory")
                    )
                continue
            parts = [_dict(part) for part in row.get("parts") or ()]
            if info["role"] == "user":
                said = [part.get("text") for part in parts if part.get("type") == "text"]
                request = "\n\n".join(text for text in said if isinstance(text, str)) or request
                continue
            cwd = _dict(info.get("path")).get("cwd") or log.directory
            for step in _steps(log, info, parts):
                step.session, step.cwd, step.request = session, str(cwd), request
                log.steps.append(step)
    log.steps.sort(key=lambda step: step.answered)
    return log


def _steps(
    log: SnapshotLog, info: dict[str, Any], parts: list[dict[str, Any]]
) -> Iterator[LoggedCall]:
    """Yield the calls of one message, and note the trees."""
    n_steps = 0
    moment = _seconds(_dict(info.get("time")).get("created"))
    pending: list[str] = []
    for part in parts:
        kind, tree = part.get("type"), part.get("snapshot")
        n_steps += kind == "step-start"
        if isinstance(tree, str) and _TREE.fullmatch(tree):
            # Parts have no time, but a tree is from before the calls behind it.
            pending.append(tree)
        if kind != "tool":
            continue
        state = _dict(part.get("state"))
        times = _dict(state.get("time"))
        started = _seconds(times.get("start")) or moment
        log.trees += [(started - 0.001, each) for each in pending]
        pending.clear()
        moment = _seconds(times.get("end")) or started
        if state.get("status") not in {"completed", "error"}:
            continue
        name, arguments = renamed_call(str(part.get("tool")), _dict(state.get("input")))
        is_error = state["status"] == "error"
        text = str(state.get("error" if is_error else "output") or "")
        yield LoggedCall(
            call_id=str(part.get("callID")),
            name=name,
            arguments=arguments,
            decision=f"{info.get('id')}-{n_steps}" if n_steps > 1 else str(info.get("id")),
            session="",
            cwd="",
            branch=None,
            called=started,
            answered=moment,
            text=text,
            is_error=is_error,
            details=_shown(text) if name == "Read" and not is_error else None,
        )
    log.trees += [(moment + 0.001, each) for each in pending]


def _shown(text: str) -> dict[str, Any] | None:
    """Return the lines that OpenCode's read returned, as Claude Code records them."""
    inside = text.partition("<content>\n")[2].rpartition("\n</content>")[0]
    found = _LINE.findall(inside)
    if not found:
        return None
    content = "\n".join(line for _, line in found)
    return {"file": {"content": content, "startLine": int(found[0][0]), "numLines": len(found)}}


def data_folder() -> Path | None:
    """Return the folder in which OpenCode keeps its data."""
    data = environment("XDG_DATA_HOME")
    home = environment("HOME") or environment("USERPROFILE")
    folder = Path(data) if data else Path(home) / ".local" / "share" if home else None
    return folder / "opencode" if folder is not None else None


def snapshots_of(log: SnapshotLog, folder: Path | None) -> tuple[Path, str] | None:
    """Return the git folder of a session's snapshots and its working tree, or None.

    Args:
        log: the session.
        folder: OpenCode's data.
    """
    if folder is None or not log.project or "/" in log.project:
        return None
    for place in sorted((folder / "snapshot" / log.project).glob("*")):
        root = _worktree_of(place / "config")
        if root and is_below(log.directory, root):
            return place, root
    return None


def _worktree_of(config: Path) -> str:
    command = ["git", "config", "--file", str(config), "--get", "core.worktree"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/"
        ).stdout.strip()
    except FileNotFoundError:
        return ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _seconds(value: Any) -> float:
    return value / 1000 if isinstance(value, int | float) else 0.0
