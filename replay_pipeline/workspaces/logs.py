"""The calls in a log with their answers, in the order of the answers.

This reads Claude Code's raw logs on the user's own machine, because redacted text isn't a file's
content.
"""

import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.actions.paths import absolute
from replay_pipeline.ingesters.base import ReadCounts
from replay_pipeline.ingesters.json_lines import as_dict, read_objects

_COPY = re.compile(r"[0-9a-f]+@v\d+")
_SESSION = re.compile(r"[\w-]+")
_REMINDERS = re.compile(
    r"(?:\n\s*<system-reminder>\n(?:(?!<system-reminder>).)*</system-reminder>\s*)+\Z", re.DOTALL
)
"""What the client puts behind an answer: in lines of its own, unlike the same words in a file."""


class LoggedCall(msgspec.Struct):
    """One recorded call and its answer."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    decision: str
    """The id of the message with the call, else the `uuid` of its row."""
    session: str
    cwd: str
    branch: str | None
    called: float
    """When the call was made, in seconds since 1970."""
    answered: float = 0.0
    text: str = ""
    """The answer as the model saw it, without the client's reminders."""
    is_error: bool = False
    details: dict[str, Any] | None = None
    """`toolUseResult`: the client's details of the answer, for example the file before an edit."""
    agent: str = ""
    """Empty for the main conversation, else the subagent's id."""
    request: str = ""
    """The user's last request before the call."""


class Backup(msgspec.Struct):
    """A copy of a file that the client made before it changed the file."""

    path: str
    """Absolute."""
    session: str
    moment: float
    """When the copy was made, in seconds since 1970."""
    origin: str
    """The copy's name in the client's folder."""
    text: str | None
    """None if there was no file."""


class Log(msgspec.Struct):
    """The steps read from some session files."""

    steps: list[LoggedCall] = []
    """In the order of their answers."""
    backups: list[Backup] = []


class _PendingCalls:
    """Calls that wait for their answer, while the rows of a file come in."""

    def __init__(self, log: Log, taken: set[str], copies: Path | None) -> None:
        self.log = log
        self.taken = taken
        self.copies = copies
        self.waiting: dict[str, LoggedCall] = {}
        self.last: tuple[str, str | None, str] = ("", None, "")
        self.request = ""

    def add(self, row: dict[str, Any]) -> None:
        kind = row.get("type")
        if kind == "progress":
            data = as_dict(row.get("data"))
            if inner := as_dict(data.get("message")):
                self._message({**row, **inner, "isSidechain": True}, data)
        elif kind == "file-history-snapshot":
            self._backups(as_dict(row.get("snapshot")).get("trackedFileBackups"))
        elif kind == "file-history-delta":  # of newer clients: one file between two snapshots
            self._backups({_text(row.get("trackingPath")): row.get("backup")})
        else:
            self._message(row, None)

    def _message(self, row: dict[str, Any], agent: Any) -> None:
        message = as_dict(row.get("message"))
        content = message.get("content")
        if row.get("type") == "user" and not agent and not row.get("isMeta"):
            self.request = _request_in(content) or self.request
        if not isinstance(content, list):
            return
        session = _text(row.get("sessionId"))
        if cwd := _text(row.get("cwd")):
            self.last = absolute(cwd, None), row.get("gitBranch") or None, session
        for block in map(as_dict, content):
            if block.get("type") == "tool_use" and isinstance(block.get("input"), dict):
                call_id = _text(block.get("id"))
                if call_id in self.taken or call_id in self.waiting:
                    continue
                self.waiting[call_id] = LoggedCall(
                    call_id=call_id,
                    name=_text(block.get("name")),
                    arguments=block["input"],
                    decision=_text(message.get("id")) or _text(row.get("uuid")),
                    session=session,
                    cwd=self.last[0],
                    branch=self.last[1],
                    called=_moment(row.get("timestamp")),
                    agent=_agent_of(row, agent),
                    request=self.request,
                )
            elif block.get("type") == "tool_result":
                self._answer(row, block)

    def _answer(self, row: dict[str, Any], block: dict[str, Any]) -> None:
        step = self.waiting.pop(_text(block.get("tool_use_id")), None)
        if step is None:
            return
        self.taken.add(step.call_id)
        step.answered = _moment(row.get("timestamp")) or step.called
        step.text = _REMINDERS.sub("", _text_of(block.get("content")))
        step.is_error = bool(block.get("is_error"))
        step.details = as_dict(row.get("toolUseResult")) or None
        self.log.steps.append(step)

    def _backups(self, files: Any) -> None:
        cwd, _, session = self.last
        for path, copy in ((path, as_dict(copy)) for path, copy in as_dict(files).items()):
            moment = _moment(copy.get("backupTime"))
            if not moment or not cwd:
                continue
            name = copy.get("backupFileName")
            path = absolute(path, cwd)
            if name is None:
                self.log.backups.append(Backup(path, session, moment, "", None))
            elif isinstance(name, str) and (text := self._copied(session, name)) is not None:
                self.log.backups.append(Backup(path, session, moment, name, text))

    def _copied(self, session: str, name: str) -> str | None:
        """Return a copy from the client's own folder, if it is still there."""
        if self.copies is None or not _COPY.fullmatch(name) or not _SESSION.fullmatch(session):
            return None
        try:
            return (self.copies / session / name).read_bytes().decode("utf-8", "replace")
        except OSError:
            return None


def read_log(paths: Iterable[Path], *, copies: Path | None = None) -> Log:
    """Return the calls and backups in session files of Claude Code. Each call occurs once.

    Args:
        paths: the files.
        copies: the folder with the client's copies of files: `file-history`.
    """
    log, taken = Log(), set[str]()
    for path in sorted(paths):
        rows = _PendingCalls(log, taken, copies)
        for _, row in read_objects(path, ReadCounts()):
            rows.add(row)
    log.steps.sort(key=lambda step: step.answered)
    return log


def _request_in(content: Any) -> str:
    """Return what a user typed; the client's own tags are no request."""
    text = _text_of(content)
    return "" if text.startswith(("<", "[Request interrupted", "Caveat:")) else text.strip()


def _agent_of(row: dict[str, Any], agent: Any) -> str:
    if isinstance(agent, dict):
        return _text(agent.get("agentId")) or "agent"
    return _text(row.get("agentId")) or "agent" if row.get("isSidechain") else ""


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        texts = [each.get("text") for each in content if isinstance(each, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return _text(content)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _moment(value: Any) -> float:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return 0.0
