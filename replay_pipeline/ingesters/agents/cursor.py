"""Cursor: the output of its command line agent with `--output-format stream-json`, one event per line."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    moment_of,
    text_in,
    text_or_none,
)


class Cursor(LinearReader):
    """Reads the events of one run, or of several runs of one session.

    Source: cursor.com/docs/cli/reference/output-format. The format of the editor's own file
    (`state.vscdb`) isn't documented, so it isn't read.
    """

    name = "cursor"

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether an event starts a run. Claude Code's event of the same name lists tools."""
        is_start = (row.get("type"), row.get("subtype")) == ("system", "init")
        return is_start and {"session_id", "apiKeySource"} <= row.keys() and "tools" not in row

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one event in; returns the reason if it makes no turn."""
        kind, talk.timestamp = row.get("type"), moment_of(row.get("timestamp_ms"))
        text = text_in(as_dict(row.get("message")).get("content"))
        if kind == "system":
            talk.session_id = text_or_none(row.get("session_id")) or talk.session_id
            talk.cwd = text_or_none(row.get("cwd")) or talk.cwd
            talk.model = text_or_none(row.get("model")) or talk.model
            return None
        if kind == "tool_call":
            return _tool(talk, row)
        if kind not in ("user", "assistant"):
            return "bookkeeping"
        if not text:
            return "empty"
        if kind == "user":
            talk.user(text)
        else:
            talk.assistant().texts.append(text)
        return None


def _tool(talk: Conversation, row: dict[str, Any]) -> str | None:
    """Take in that a call began, or with what it ended: both name the call and its arguments."""
    call_id, named = text_or_none(row.get("call_id")), as_dict(row.get("tool_call"))
    key = next((key for key in named if key == "function" or key.endswith("ToolCall")), None)
    if call_id is None or key is None:
        return "no_message"
    call = as_dict(named[key])
    result = as_dict(call.get("result"))
    outcome = next(iter(result), None)
    answer = None
    if row.get("subtype") == "completed":
        value = result.get(outcome or "")
        text = text_or_none(as_dict(value).get("content"))
        answer = Result(
            text
            if text is not None
            else value
            if isinstance(value, str)
            else arguments_text(value),
            outcome not in {"success", None},
            "user-rejected" if outcome == "rejected" else None,
        )
        if talk.answer(call_id, answer):
            return None
    name = text_or_none(call.get("name")) or key.removesuffix("ToolCall")
    turn = talk.assistant()
    talk.call(turn, call_id, name, call.get("args") or call.get("arguments"))
    if answer is not None:
        talk.answer(call_id, answer)
    return None
