"""OpenCode: sessions from its database, or from an export."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation
from replay_pipeline.ingesters.agents.opencode_database import with_clearings
from replay_pipeline.ingesters.base import ReadCounts, RecordedUsage, Result, SessionLog, Turn
from replay_pipeline.ingesters.json_lines import (
    as_count,
    as_dict,
    as_list,
    digest_of,
    moment_of,
    read_document,
    read_objects,
    text_in,
    text_or_none,
)

_EXPORT = re.compile(rb'\{\s*"info"\s*:\s*\{')
_OF_PROJECT = (b'"projectID"', b'"directory"', b'"parts"')
_OF_DATABASE = b'{"opencode": 1,'
_OF_CLEARING = {"cleared", "time"}
_BEFORE_SUMMARY = "What did we do so far?"
"""What the client says in place of the user before a summary."""
_SUBTASK = "The following tool was executed by the user"
_INTERRUPTED = "[Tool execution was interrupted]"
_ABORTED = "MessageAbortedError"


class OpenCode:
    """Reads sessions of the database, and `opencode export` documents.

    One message can hold several model calls. Each starts with a `step-start` part.
    """

    name = "opencode"
    rank = 1

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a session or an export. Its ids may be redacted."""
        start = head.lstrip()
        is_export = _EXPORT.match(start) and any(key in start for key in _OF_PROJECT)
        return start.startswith(_OF_DATABASE) or bool(is_export)

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield the conversation of a session. A document is always read as a whole."""
        rows: Iterable[tuple[int, dict[str, Any]]]
        with path.open("rb") as file:
            is_grown = file.read(len(_OF_DATABASE)) == _OF_DATABASE
        if is_grown:
            rows = read_objects(path, counts, end)
            info = {}
            for _, row in rows:
                info = as_dict(row.get("info"))
                counts.skipped["bookkeeping"] += 1
                break
        else:
            document = as_dict(read_document(path))
            info = as_dict(document.get("info")) or document
            messages = as_list(document.get("messages"))
            counts.rows += len(messages)
            rows = ((0, row) for row in with_clearings(list(map(as_dict, messages))))
            # Ids may be redacted: what never changes names the session then.
            told = as_dict(info.get("time")).get("created"), messages[:1]
            info = info | {"id": _id(info.get("id"), "ses_") or f"export-{digest_of(told)}"}
        session = _OpenCodeSession(path, info)
        for offset, row in rows:
            session.talk.offset = offset
            what = session.take(row)
            if is_grown or row.keys() != _OF_CLEARING:
                counts.count(what)
        yield session.talk.log()


class _OpenCodeSession:
    """One session, message by message."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.talk = Conversation(text_or_none(info.get("id")) or path.stem, OpenCode.name)
        self.talk.cwd = text_or_none(info.get("directory"))
        self.talk.version = text_or_none(info.get("version"))
        if parent := _id(info.get("parentID"), "ses_"):
            self.talk.part_of = self.talk.session_id, parent
        self.talk.title = text_or_none(info.get("title"))
        self._first_turn: dict[str, int] = {}
        """Where the turns of a message begin, by its id."""
        self._compactions: dict[str, tuple[int, str | None]] = {}
        """Where the message that asks for a summary stands, and the first message that is kept beside it."""
        self._unanswered: list[tuple[Turn, str]] = []

    def take(self, row: dict[str, Any]) -> str | None:
        """Take in one row; returns why it makes no turn."""
        info = as_dict(row.get("info"))
        if "title" in row and not info:
            self.talk.title = text_or_none(row.get("title")) or self.talk.title
            return "bookkeeping"
        if "cleared" in row and not info:
            self.talk.clear([each for each in as_list(row["cleared"]) if text_or_none(each)])
            return None
        parts = list(map(as_dict, as_list(row.get("parts"))))
        self.talk.timestamp = moment_of(as_dict(info.get("time")).get("created"))
        message_id = text_or_none(info.get("id")) or ""
        if info.get("role") not in ("user", "assistant"):
            return "empty"
        for turn, call_id in self._unanswered:
            turn.results[call_id] = Result(_INTERRUPTED, is_error=True)
        self._unanswered.clear()
        self._first_turn[message_id] = len(self.talk.turns)
        if info["role"] == "user":
            return self._user(message_id, parts)
        return self._assistant(info, parts)

    def _user(self, message_id: str, parts: list[dict[str, Any]]) -> str | None:
        asked = next((part for part in parts if part.get("type") == "compaction"), None)
        if asked is not None:
            place = len(self.talk.turns)
            self._compactions[message_id] = place, text_or_none(asked.get("tail_start_id"))
        text = "\n\n".join(filter(None, map(_said, parts)))
        if text:
            self.talk.user(text)
        return None if text else "empty"

    def _assistant(self, info: dict[str, Any], parts: list[dict[str, Any]]) -> str | None:
        talk, error = self.talk, as_dict(info.get("error"))
        asked = self._compactions.get(text_or_none(info.get("parentID")) or "")
        if info.get("summary") is True and asked is not None and not error:
            summary = "\n\n".join(filter(None, (text_or_none(part.get("text")) for part in parts)))
            if not summary:
                return "empty"
            place, tail = asked
            kept = talk.turns[self._first_turn.get(tail or "", place) : place]
            talk.cleared()
            talk.keep(kept)
            talk.user(_BEFORE_SUMMARY, kind="summary")
            talk.copied(summary)
            return None
        talk.model = text_or_none(info.get("modelID")) or talk.model
        talk.cwd = text_or_none(as_dict(info.get("path")).get("cwd")) or talk.cwd
        n_turns = len(talk.turns)
        turn = self._steps(text_or_none(info.get("id")) or "", parts)
        if turn is not None and turn.usage is None:
            turn.usage = _usage(as_dict(info.get("tokens")))
        talk.close()
        if error:
            # What was broken off by its user is shown again, and what failed is asked for again.
            flag = "interrupted" if error.get("name") == _ABORTED else "retracted"
            for each in talk.turns[n_turns:]:
                each.flags |= {flag}
        return None if turn is not None else "empty"

    def _steps(self, message_id: str, parts: list[dict[str, Any]]) -> Turn | None:
        n_steps = 0
        turn: Turn | None = None
        for part in parts:
            kind = text_or_none(part.get("type"))
            if kind == "step-start":
                self.talk.close()
                n_steps += 1
                continue
            if kind not in {"text", "reasoning", "tool", "step-finish"}:
                continue
            own_id = _id(message_id, "msg_")
            own_id = f"{own_id}-{n_steps}" if own_id and n_steps > 1 else own_id
            if kind == "step-finish":
                if turn is not None and turn.usage is None:
                    turn.usage = _usage(as_dict(part.get("tokens")))
                continue
            turn = self.talk.assistant(own_id)
            self._part(turn, part)
        return turn

    def _part(self, turn: Turn, part: dict[str, Any]) -> None:
        text = text_or_none(part.get("text"))
        if part.get("type") == "tool":
            state = as_dict(part.get("state"))
            name = text_or_none(part.get("tool")) or ""
            call_id = self.talk.call(
                turn, text_or_none(part.get("callID")), name, state.get("input")
            )
            if (result := _result(state)) is not None:
                turn.results[call_id] = result
            else:
                self._unanswered.append((turn, call_id))
        elif text is not None:
            (turn.thinking if part.get("type") == "reasoning" else turn.texts).append(text)


def _id(value: Any, prefix: str) -> str | None:
    """Return an id if it is one of OpenCode's own."""
    text = text_or_none(value)
    return text if text and text.startswith(prefix) else None


def _said(part: dict[str, Any]) -> str | None:
    """Return what the model was shown of a part of the user's message."""
    kind = part.get("type")
    if kind == "compaction":
        return _BEFORE_SUMMARY
    if kind == "subtask":
        return _SUBTASK
    if kind == "file":
        # A file of text or a folder was read, and its content is a text beside this.
        mime = text_or_none(part.get("mime")) or ""
        is_read = mime in ("text/plain", "application/x-directory")
        return None if is_read else f"[{'image' if mime.startswith('image/') else 'file'}]"
    return None if part.get("ignored") else text_or_none(part.get("text"))


def _result(state: dict[str, Any]) -> Result | None:
    """Return what the model was given for a call; `None` for one that has no answer yet."""
    status, told = text_or_none(state.get("status")), as_dict(state.get("metadata"))
    if status == "completed":
        return Result(text_in(state.get("output")))
    if status != "error":
        return None
    # A command that its user stopped is shown with what it had printed.
    if told.get("interrupted") is True and isinstance(told.get("output"), str):
        return Result(told["output"], is_error=True)
    return Result(text_in(state.get("error")), is_error=True)


def _usage(tokens: dict[str, Any]) -> RecordedUsage | None:
    if not tokens:
        return None
    cache = as_dict(tokens.get("cache"))
    return RecordedUsage(
        n_input=as_count(tokens.get("input")),
        n_cache_creation=as_count(cache.get("write")),
        n_cache_read=as_count(cache.get("read")),
        n_output=as_count(tokens.get("output")),
    )
