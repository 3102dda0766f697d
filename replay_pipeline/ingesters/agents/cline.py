"""Cline: the messages of a task, from its extension or from its SDK and command line."""

import re
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, DocumentReader, usage_of
from replay_pipeline.ingesters.base import RecordedUsage, Result
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    digest_of,
    moment_of,
    text_in,
    text_or_none,
)

_LIST = re.compile(rb'\s*\[\s*\{\s*"(?:role|content|id)"\s*:')
_PARTS = re.compile(rb'\s*\{\s*"version"\s*:\s*1,\s*"updated_at"\s*:')


class Cline(DocumentReader):
    """Reads `tasks/<id>/api_conversation_history.json` and `sessions/<id>/<name>.messages.json`.

    Both have messages in Anthropic's form. The first kind doesn't contain the task's id, so the
    session is named by its first message, which never changes.
    """

    name = "cline"

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` is the beginning of a list of messages, or of a document with one."""
        if _PARTS.match(head):
            return b'"sessionId"' in head and b'"origin"' in head
        return bool(_LIST.match(head)) and b'"role"' in head and b'"content"' in head

    def messages(self, talk: Conversation, document: Any) -> list[Any]:
        """Take in what names the session, and return the messages."""
        whole, origin = as_dict(document), as_dict(as_dict(document).get("origin"))
        messages = as_list(document) or as_list(whole.get("messages"))
        name = text_or_none(whole.get("sessionId")) or (digest_of(messages[0]) if messages else "")
        talk.session_id = name or talk.session_id
        talk.version = text_or_none(origin.get("version"))
        talk.system = text_or_none(whole.get("system_prompt"))
        if parent := text_or_none(origin.get("parentThreadId")):
            talk.part_of = talk.session_id, parent
        return messages

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one message in; returns the reason if it makes no turn."""
        content = row.get("content")
        talk.timestamp = moment_of(row.get("ts"))
        blocks = [as_dict(block) for block in as_list(content)]
        if isinstance(content, str):
            blocks = [{"type": "text", "text": content}]
        if row.get("role") == "user":
            return _user(talk, blocks)
        if row.get("role") != "assistant":
            return "no_message"
        model = as_dict(row.get("modelInfo"))
        model_id = text_or_none(model.get("modelId")) or text_or_none(model.get("id"))
        talk.model = model_id or talk.model
        talk.close()
        own_id = text_or_none(row.get("id"))
        turn = talk.assistant(f"cline:{own_id}" if own_id else None)
        for block in blocks:
            kind = block.get("type")
            if kind == "tool_use":
                name = text_or_none(block.get("name")) or ""
                talk.call(turn, text_or_none(block.get("id")), name, block.get("input"))
            elif kind == "thinking":
                turn.thinking += filter(None, [text_or_none(block.get("thinking"))])
            elif kind == "redacted_thinking":
                turn.flags |= {kind}
            elif text := text_in(block):
                turn.texts.append(text)
        turn.usage = _usage(as_dict(row.get("metrics")))
        return None if blocks else "empty"


def _user(talk: Conversation, blocks: list[dict[str, Any]]) -> str | None:
    texts = list[str]()
    is_orphan = False
    for block in blocks:
        if block.get("type") != "tool_result":
            texts += filter(None, [_shown(block)])
            continue
        answer = block.get("content")
        text = answer if isinstance(answer, str) else "\n".join(map(_shown, as_list(answer)))
        result = Result(text, block.get("is_error") is True)
        is_orphan |= not talk.answer(text_or_none(block.get("tool_use_id")), result)
    if texts:
        talk.user("\n\n".join(texts))
    if is_orphan and not texts:
        return "orphan_result"
    return None if blocks else "empty"


def _shown(block: Any) -> str:
    """Return what the model sees of a block; that of a tool may be any JSON."""
    if as_dict(block).get("type") == "file":
        return text_or_none(block.get("content")) or ""
    return text_in(block) if text_or_none(as_dict(block).get("type")) else arguments_text(block)


def _usage(metrics: dict[str, Any]) -> RecordedUsage | None:
    """Read the tokens of a message; those of the prompt include what came from a cache."""
    tokens = as_dict(metrics.get("tokens"))
    n_prompt = tokens.get("prompt") or metrics.get("inputTokens")
    n_output = tokens.get("completion") or metrics.get("outputTokens")
    n_cached = tokens.get("cached") or metrics.get("cacheReadTokens")
    n_written = metrics.get("cacheWriteTokens")
    return (
        usage_of(n_prompt, n_output, n_cached=n_cached, n_written=n_written) if n_prompt else None
    )
