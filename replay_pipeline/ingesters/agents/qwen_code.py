"""Qwen Code: one row per line, with Claude Code's fields around Gemini's messages."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, usage_of
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    text_in,
    text_or_none,
)

_NEVER_SHOWN = frozenset({
    "at_command", "attribution_snapshot", "custom_title", "file_history_snapshot", "slash_command",
    "ui_telemetry",
})  # fmt: skip
"""Kinds of `system` rows that are for the client or its user."""


class QwenCode(LinearReader):
    """Reads `projects/<folder>/chats/<id>.jsonl`. Each result is a row of its own."""

    name = "qwen_code"
    rank = 1

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` has the first row of a chat."""
        line = head.split(b"\n", 1)[0]
        if b'"parts"' not in line or b'"parentUuid"' not in line:
            return False
        return super().sniff(line)

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether a row has a message in Gemini's form."""
        message = as_dict(row.get("message"))
        return isinstance(message.get("parts"), list) and "content" not in message

    def take(self, talk: Conversation, row: dict[str, Any], offset: int) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        talk.session_id = text_or_none(row.get("sessionId")) or talk.session_id
        talk.cwd = text_or_none(row.get("cwd")) or talk.cwd
        talk.version = text_or_none(row.get("version")) or talk.version
        return _take(talk, row, offset)


def _take(talk: Conversation, row: dict[str, Any], offset: int) -> str | None:
    kind, timestamp = text_or_none(row.get("type")) or "", text_or_none(row.get("timestamp"))
    parts = [as_dict(part) for part in as_list(as_dict(row.get("message")).get("parts"))]
    if kind == "system":
        subtype = text_or_none(row.get("subtype")) or ""
        is_known = subtype in _NEVER_SHOWN
        return "bookkeeping" if is_known else f"unknown_system_{subtype[:40]}_of_{talk.version}"
    if kind == "user":
        if not (text := text_in([part for part in parts if not part.get("thought")])):
            return "empty"
        talk.user(text, offset=offset, timestamp=timestamp)
        return None
    if kind == "tool_result":
        return None if _answer(talk, parts) else "orphan_result"
    if kind != "assistant":
        return f"unknown_row_{kind[:40]}_of_{talk.version}"
    talk.model = text_or_none(row.get("model")) or talk.model
    talk.close()
    turn = talk.assistant(offset=offset, timestamp=timestamp, message_id=f"qwen:{row.get('uuid')}")
    for part in parts:
        call = as_dict(part.get("functionCall"))
        if call:
            name, arguments = text_or_none(call.get("name")) or "", arguments_text(call.get("args"))
            talk.call(turn, text_or_none(call.get("id")), name, arguments)
        elif text := text_or_none(part.get("text")):
            (turn.thinking if part.get("thought") else turn.texts).append(text)
    told = as_dict(row.get("usageMetadata"))
    n_prompt, n_output = told.get("promptTokenCount"), told.get("candidatesTokenCount")
    talk.usage(usage_of(n_prompt, n_output, n_cached=told.get("cachedContentTokenCount")))
    talk.close()
    return None


def _answer(talk: Conversation, parts: list[dict[str, Any]]) -> bool:
    is_owned = False
    for part in parts:
        answer = as_dict(part.get("functionResponse"))
        told = as_dict(answer.get("response"))
        is_error = "error" in told
        text = text_or_none(told.get("error" if is_error else "output"))
        result = Result(text if text is not None else text_in(told), is_error)
        is_owned |= talk.answer(text_or_none(answer.get("id")) or "", result)
    return is_owned
