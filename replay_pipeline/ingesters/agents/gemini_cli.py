"""Gemini CLI: one JSON document per chat, or in later versions one row per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, usage_of
from replay_pipeline.ingesters.base import ReadCounts
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    read_document,
    read_objects,
    text_in,
    text_or_none,
)


class GeminiCli(LinearReader):
    """Reads `chats/session-*.json`. A call and its result are both in the model's message."""

    name = "gemini_cli"

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a chat."""
        return (
            head.lstrip().startswith(b"{")
            and b'"sessionId"' in head
            and b'"projectHash"' in head
            and b'"parentUuid"' not in head
        )

    def rows(
        self, talk: Conversation, path: Path, counts: ReadCounts, end: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a file, or the messages of a document."""
        document = as_dict(read_document(path))
        if not isinstance(document.get("messages"), list):
            return read_objects(path, counts, end)
        talk.session_id = text_or_none(document.get("sessionId")) or talk.session_id
        counts.rows += len(document["messages"])
        return ((0, as_dict(message)) for message in document["messages"])

    def take(self, talk: Conversation, row: dict[str, Any], offset: int) -> str | None:
        """Take one message in; returns the reason if it makes no turn."""
        return _take(talk, row, offset)


def _take(talk: Conversation, message: dict[str, Any], offset: int) -> str | None:
    if "projectHash" in message:
        talk.session_id = text_or_none(message.get("sessionId")) or talk.session_id
        return "bookkeeping"
    kind = message.get("type")
    timestamp = text_or_none(message.get("timestamp"))
    text = text_in(message.get("content"))
    if kind == "user":
        if not text:
            return "empty"
        talk.user(text, offset=offset, timestamp=timestamp)
        return None
    if kind != "gemini":
        return "bookkeeping"
    talk.model = text_or_none(message.get("model")) or talk.model
    own_id = text_or_none(message.get("id"))
    turn = talk.assistant(
        offset=offset, timestamp=timestamp, message_id=f"gemini:{own_id}" if own_id else None
    )
    if text and text not in turn.texts:
        turn.texts.append(text)
    for thought in as_list(message.get("thoughts")):
        words = as_dict(thought)
        turn.thinking.append(f"{words.get('subject', '')}\n{words.get('description', '')}".strip())
    for call in map(as_dict, as_list(message.get("toolCalls"))):
        call_id = talk.call(
            turn,
            text_or_none(call.get("id")),
            text_or_none(call.get("name")) or "",
            arguments_text(call.get("args")),
        )
        result, is_error = _result(call)
        if result is not None:
            talk.result(call_id, result, is_error=is_error)
    tokens = as_dict(message.get("tokens"))
    n_cached = tokens.get("cached")
    talk.usage(usage_of(tokens.get("input"), tokens.get("output"), n_cached=n_cached))
    talk.close()
    return None


def _result(call: dict[str, Any]) -> tuple[str | None, bool]:
    is_error = text_or_none(call.get("status")) in {"error", "cancelled"}
    texts = []
    for part in map(as_dict, as_list(call.get("result"))):
        response = as_dict(as_dict(part.get("functionResponse")).get("response"))
        text = text_or_none(response.get("output")) or text_or_none(response.get("error"))
        texts.append(text if text is not None else text_in(part))
        is_error = is_error or "error" in response
    if not texts:
        display = text_or_none(call.get("resultDisplay"))
        return display, is_error
    return "\n".join(texts), is_error
