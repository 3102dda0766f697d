"""Pi coding agent: session files, `~/.pi/agent/sessions/<folder>/<time>_<id>.jsonl`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.base import (
    ReadCounts,
    RecordedCall,
    RecordedUsage,
    Result,
    SessionLog,
    Turn,
    path_to,
)
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_count,
    as_dict,
    as_list,
    objects_in,
    read_objects,
    text_in,
    text_or_none,
)

_SUMMARIES = {
    "compaction": "The conversation history before this point was compacted into the following "
    "summary:\n\n<summary>\n{}\n</summary>",
    "branch_summary": "The following is a summary of a branch that this conversation came back "
    "from:\n\n<summary>\n{}</summary>",
}
"""In which words the client tells the model of a summary, by the type of the entry."""


class Pi:
    """Reads the entries of one session: a tree by `id` and `parentId`, or in older versions a list."""

    name = "pi"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is the header of a session."""
        for row in objects_in(head.split(b"\n", 1)[0], ReadCounts()):
            return row.get("type") == "session" and {"id", "timestamp", "cwd"} <= row.keys()
        return False

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield the conversation of a session, with all its branches."""
        session = _PiSession(path.stem)
        for offset, entry in read_objects(path, counts, end):
            counts.count(session.take(offset, entry))
        for index, turn in enumerate(session.turns):
            turn.index = index
        yield SessionLog(session.session_id, self.name, session.turns)


class _PiSession:
    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.turns: list[Turn] = []
        self._cwd: str | None = None
        self._segment = 0
        self._by_entry: dict[str, Turn | None] = {}
        self._entries: list[str] = []
        """Ids in the order of the file, which older versions count by."""
        self._by_call: dict[str, Turn] = {}
        self._tip: Turn | None = None

    def take(self, offset: int, entry: dict[str, Any]) -> str | None:
        """Take one entry in; gives the reason if it makes no turn."""
        kind = text_or_none(entry.get("type"))
        if kind == "session":
            self.session_id = text_or_none(entry.get("id")) or self.session_id
            self._cwd = text_or_none(entry.get("cwd"))
            self._entries.append("")
            return None
        name = text_or_none(entry.get("id")) or f"{len(self._entries)}"
        self._entries.append(name)
        parent = self._tip
        if "parentId" in entry:
            parent = self._by_entry.get(str(entry["parentId"]))
        self._by_entry[name] = self._tip = parent
        message = as_dict(entry.get("message"))
        role = text_or_none(message.get("role"))
        if kind == "compaction":
            turn = self._compacted(entry, name, offset, parent)
        elif kind == "branch_summary" and text_or_none(entry.get("summary")):
            text = _SUMMARIES[kind].format(entry["summary"])
            turn = self._turn("user", entry, name, offset, parent, text)
        elif kind == "custom_message":
            text = text_in(entry.get("content"))
            turn = self._turn("meta", entry, name, offset, parent, text)
        elif kind != "message":
            return "bookkeeping"
        elif role == "assistant":
            if message.get("stopReason") == "error" and not message.get("content"):
                return "synthetic"
            turn = self._assistant(entry, message, name, offset, parent)
        elif role == "toolResult":
            return self._result(message, name)
        elif role == "bashExecution" and message.get("excludeFromContext"):
            return "transcript_only"
        else:
            text = (
                _shell_text(message) if role == "bashExecution" else text_in(message.get("content"))
            )
            user = "user" if role == "user" else "command" if role == "bashExecution" else "meta"
            turn = self._turn(user, entry, name, offset, parent, text)
        self._by_entry[name] = self._tip = turn
        return None

    def _turn(
        self,
        kind: str,
        entry: dict[str, Any],
        name: str,
        offset: int,
        parent: Turn | None,
        text: str = "",
    ) -> Turn:
        turn = Turn(
            parent=parent,
            kind=kind,
            offset=offset,
            uuid=f"{self.session_id}-{name}",
            segment=parent.segment if parent is not None else self._segment,
            timestamp=text_or_none(entry.get("timestamp")),
            cwd=self._cwd,
            texts=[text] if text else [],
        )
        self.turns.append(turn)
        return turn

    def _assistant(
        self,
        entry: dict[str, Any],
        message: dict[str, Any],
        name: str,
        offset: int,
        parent: Turn | None,
    ) -> Turn:
        turn = self._turn("assistant", entry, name, offset, parent)
        turn.message_id = f"{Pi.name}:{turn.uuid}"
        turn.model = text_or_none(message.get("model"))
        usage = as_dict(message.get("usage"))
        if usage:
            turn.usage = RecordedUsage(
                as_count(usage.get("input")),
                as_count(usage.get("cacheWrite")),
                as_count(usage.get("cacheRead")),
                as_count(usage.get("output")),
            )
        if message.get("stopReason") == "aborted":
            turn.flags |= {"interrupted"}
        for block in map(as_dict, as_list(message.get("content"))):
            if block.get("type") == "toolCall":
                call_id = text_or_none(block.get("id")) or f"{turn.uuid}-{len(turn.calls)}"
                arguments = arguments_text(block.get("arguments"))
                turn.calls.append(
                    RecordedCall(call_id, text_or_none(block.get("name")) or "", arguments)
                )
                self._by_call[call_id] = turn
            elif thinking := text_or_none(block.get("thinking")):
                turn.thinking.append(thinking)
            elif text := text_in(block):
                turn.texts.append(text)
        return turn

    def _result(self, message: dict[str, Any], name: str) -> str | None:
        call_id = str(message.get("toolCallId"))
        turn = self._by_call.get(call_id)
        if turn is None:
            return "orphan_result"
        text = text_in(message.get("content"))
        turn.results.setdefault(call_id, Result(text, bool(message.get("isError"))))
        self._by_entry[name] = self._tip = turn
        return None

    def _compacted(
        self, entry: dict[str, Any], name: str, offset: int, parent: Turn | None
    ) -> Turn:
        """Start again from the summary, and from what was kept word for word."""
        first = text_or_none(entry.get("firstKeptEntryId"))
        index = entry.get("firstKeptEntryIndex")
        if first is None and isinstance(index, int) and 0 <= index < len(self._entries):
            first = self._entries[index]
        # What was kept may begin with an entry that makes no turn: its successor then.
        known = self._entries.index(first) if first in self._entries else len(self._entries)
        kept_from = {self._by_entry.get(each) for each in self._entries[known:]} - {None}
        kept = [turn for turn in reversed(list(path_to(parent))) if turn in kept_from]
        self._segment += 1
        text = _SUMMARIES["compaction"].format(entry.get("summary") or "")
        turn = self._turn("summary", entry, name, offset, None, text)
        for old in kept:
            turn = old.copy_below(turn, self._segment)
            self.turns.append(turn)
        return turn


def _shell_text(message: dict[str, Any]) -> str:
    """Return a command of the user in the words of the client."""
    output = text_in(message.get("output"))
    text = f"Ran `{message.get('command')}`\n" + (
        f"```\n{output}\n```" if output else "(no output)"
    )
    if message.get("cancelled"):
        return f"{text}\n\n(command cancelled)"
    code = message.get("exitCode")
    return f"{text}\n\nCommand exited with code {code}" if code else text
