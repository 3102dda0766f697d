"""Qwen Code: one row per line, with Claude Code's fields around Gemini's messages."""

from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, usage_of
from replay_pipeline.ingesters.base import Result
from replay_pipeline.ingesters.json_lines import (
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

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        talk.session_id = text_or_none(row.get("sessionId")) or talk.session_id
        talk.cwd = text_or_none(row.get("cwd")) or talk.cwd
        talk.version = text_or_none(row.get("version")) or talk.version
        talk.timestamp = text_or_none(row.get("timestamp"))
        kind = text_or_none(row.get("type")) or ""
        parts = [as_dict(part) for part in as_list(as_dict(row.get("message")).get("parts"))]
        if kind == "system":
            subtype = text_or_none(row.get("subtype")) or ""
            is_known = subtype in _NEVER_SHOWN
            return "bookkeeping" if is_known else f"unknown_system_{subtype[:40]}_of_{talk.version}"
        if kind == "user":
            if text := text_in([part for part in parts if not part.get("thought")]):
                talk.user(text)
            return None if text else "empty"
        if kind == "tool_result":
            return None if _answer(talk, parts) else "orphan_result"
        if kind != "assistant":
            return f"unknown_row_{kind[:40]}_of_{talk.version}"
        talk.model = text_or_none(row.get("model")) or talk.model
        talk.close()
        turn = talk.assistant(f"qwen:{row.get('uuid')}")
        for part in parts:
            if call := as_dict(part.get("functionCall")):
                name = text_or_none(call.get("name")) or ""
                talk.call(turn, text_or_none(call.get("id")), name, call.get("args"))
            elif text := text_or_none(part.get("text")):
                (turn.thinking if part.get("thought") else turn.texts).append(text)
        told = as_dict(row.get("usageMetadata"))
        n_prompt, n_output = told.get("promptTokenCount"), told.get("candidatesTokenCount")
        talk.usage(usage_of(n_prompt, n_output, n_cached=told.get("cachedContentTokenCount")))
        talk.close()
        return None


def _answer(talk: Conversation, parts: list[dict[str, Any]]) -> bool:
    is_owned = False
    media = text_in([part for part in parts if "functionResponse" not in part])
    for answer in (
        as_dict(part["functionResponse"]) for part in parts if "functionResponse" in part
    ):
        told = as_dict(answer.get("response"))
        is_error = "error" in told
        text = text_or_none(told.get("error" if is_error else "output"))
        text = text if text is not None else text_in(told)
        result = Result(f"{text}\n{media}" if media else text, is_error)
        is_owned |= talk.answer(text_or_none(answer.get("id")), result)
    return is_owned
