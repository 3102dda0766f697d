"""Gemini CLI: one JSON document per chat, or in later versions one row per line."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.base import ReadCounts, RecordedUsage, SessionLog
from replay_pipeline.ingesters.conversation import Conversation
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_count,
    as_dict,
    as_list,
    read_document,
    read_objects,
    text_in,
    text_or_none,
)


class GeminiCli:
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

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield the one conversation of a chat."""
        document = read_document(path)
        talk = Conversation(path.stem, self.name)
        rows: Iterable[tuple[int, Any]]
        if isinstance(document, dict) and isinstance(document.get("messages"), list):
            talk.session_id = text_or_none(document.get("sessionId")) or talk.session_id
            rows = [(0, message) for message in document["messages"]]
            counts.rows += len(document["messages"])
        else:
            rows = read_objects(path, counts, end)
        for offset, row in rows:
            counts.count(_take(talk, as_dict(row), offset))
        yield talk.log()


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
    talk.usage(_usage(as_dict(message.get("tokens"))))
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


def _usage(tokens: dict[str, Any]) -> RecordedUsage:
    n_cached = as_count(tokens.get("cached"))
    return RecordedUsage(
        n_input=max(0, as_count(tokens.get("input")) - n_cached),
        n_cache_read=n_cached,
        n_output=as_count(tokens.get("output")),
    )
