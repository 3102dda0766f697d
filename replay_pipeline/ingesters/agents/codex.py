"""Codex CLI: rollout files, with and without the envelope of later versions."""

import re
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation, LinearReader, usage_of
from replay_pipeline.ingesters.base import LACKS, ReadCounts, Result
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    objects_in,
    text_in,
    text_or_none,
)

_ENVELOPES = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})
_BOOKKEEPING = frozenset({"token_usage_record", "world_state"})
_CALLS = frozenset({"function_call", "custom_tool_call", "local_shell_call"})
_BY_PROVIDER = frozenset({"web_search_call", "image_generation_call"})
"""Tools that run at the provider: what they gave is not in the log."""
_REFUSED = re.compile(r"unsupported (?:custom tool )?call: ")
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_EXITED = re.compile(r"^(?:Exit code|Process exited with code):? (-?\d{1,9})\b", re.MULTILINE)
_CONTEXT = (
    "<environment_context>",
    "<user_instructions>",
    "# AGENTS.md instructions",
    "<permissions",
)


class Codex(LinearReader):
    """Reads `rollout-*.jsonl`.

    The log has no ids of API messages, so everything that the model writes up to the next tool
    output or user message is one decision.
    """

    name = "codex"

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is one of a rollout."""
        is_cut = head.startswith(b'{"timestamp"') and b'"session_meta"' in head[:200]
        return is_cut or super().sniff(head)

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether a row is of a rollout."""
        if text_or_none(row.get("type")) in _ENVELOPES and isinstance(row.get("payload"), dict):
            return True
        return "instructions" in row and "id" in row and "timestamp" in row

    def take(self, talk: Conversation, row: dict[str, Any]) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        kind, payload = text_or_none(row.get("type")), as_dict(row.get("payload"))
        if kind not in _ENVELOPES and isinstance(row.get("payload"), dict):
            return "bookkeeping" if kind in _BOOKKEEPING else _unknown(kind, talk)
        if kind not in _ENVELOPES:
            kind, payload = ("session_meta" if "instructions" in row else "response_item"), row
        talk.timestamp = text_or_none(row.get("timestamp"))
        if kind == "session_meta":
            if not talk.turns:
                talk.session_id = text_or_none(payload.get("id")) or talk.session_id
                # The system prompt, which later versions log.
                value = payload.get("base_instructions") or payload.get("instructions")
                text = text_in(value if not isinstance(value, dict) else value.get("text"))
                talk.system = text or None
            talk.cwd = text_or_none(payload.get("cwd")) or talk.cwd
            talk.version = text_or_none(payload.get("cli_version")) or talk.version
            return None
        if kind == "turn_context":
            talk.cwd = text_or_none(payload.get("cwd")) or talk.cwd
            talk.model = text_or_none(payload.get("model")) or talk.model
            return None
        if kind == "compacted":
            _compacted(talk, payload)
            return None
        if kind == "event_msg":
            return _event(talk, payload)
        return _item(talk, payload)


def _unknown(kind: str | None, talk: Conversation) -> str:
    version = f"_of_{talk.version[:20]}" if talk.version else ""
    return f"unknown_row_{str(kind)[:40]}{version}"


def _compacted(talk: Conversation, payload: dict[str, Any]) -> None:
    """Start again from what the model was left with: a summary, or whole messages."""
    history = as_list(payload.get("replacement_history"))
    talk.cleared()
    summary = text_in(payload.get("message"))
    if summary and not history:
        talk.user(summary, kind="summary")
    for item in map(as_dict, history):
        kind = text_or_none(item.get("type")) or "unknown"
        is_message = kind == "message"
        text = text_in(item.get("content")) if is_message else text_in(item.get("summary"))
        # A summary may be logged as a cipher that only the provider can read.
        text = text or (f"[{kind}]" if not is_message and kind != "reasoning" else "")
        if text and item.get("role") == "assistant":
            talk.copied(text)
        elif text:
            talk.user(text, kind="summary")


def _event(talk: Conversation, payload: dict[str, Any]) -> str | None:
    if payload.get("type") == "turn_aborted":
        # Calls that were all answered are done: only what came after them was stopped.
        if talk.is_waiting:
            talk.interrupted()
        talk.close()
        return None
    if payload.get("type") != "token_count":
        return "bookkeeping"
    last = as_dict(as_dict(payload.get("info")).get("last_token_usage"))
    if not last:
        return "bookkeeping"
    n_cached = last.get("cached_input_tokens")
    talk.usage(usage_of(last.get("input_tokens"), last.get("output_tokens"), n_cached=n_cached))
    return None


def _item(talk: Conversation, item: dict[str, Any]) -> str | None:
    kind = text_or_none(item.get("type"))
    if kind == "message":
        return _message(talk, item)
    if kind == "reasoning":
        text = text_in(item.get("summary"))
        turn = talk.assistant()
        if text:
            turn.thinking.append(text)
        return None
    if kind in _CALLS:
        turn = talk.assistant()
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = {"input": item.get("input")}
        elif kind == "local_shell_call":
            arguments = {"command": as_list(as_dict(item.get("action")).get("command"))}
        name = text_or_none(item.get("name")) or "shell"
        if space := text_or_none(item.get("namespace")):
            name = f"{space}__{name}"
        talk.call(turn, text_or_none(item.get("call_id")), name, arguments)
        return None
    if kind in _BY_PROVIDER:
        talk.assistant().flags |= {f"{LACKS}{kind}"}
        return None
    if kind in _OUTPUTS:
        result = Result(*_output(item.get("output")))
        is_known = talk.answer(text_or_none(item.get("call_id")), result)
        return None if is_known else "orphan_result"
    return _unknown(kind, talk)


def _message(talk: Conversation, item: dict[str, Any]) -> str | None:
    text = text_in(item.get("content"))
    if not text:
        return "empty"
    if item.get("role") == "assistant":
        talk.assistant().texts.append(text)
    else:
        is_context = text.startswith(_CONTEXT) or item.get("role") != "user"
        kind = "meta" if is_context else "user"
        if item.get("role") in ("developer", "system"):
            kind = "developer"
        if text.startswith("<turn_aborted>"):
            kind = "interrupt"
        talk.user(text, kind=kind)
    return None


def _output(output: Any) -> tuple[str, bool]:
    """Return text of a tool output, and whether the call failed."""
    if isinstance(output, dict):
        return text_in(output.get("content")), output.get("success") is False
    if isinstance(output, str) and output.startswith('{"output"'):
        for value in objects_in(output.encode(), ReadCounts()):
            code = as_dict(value.get("metadata")).get("exit_code")
            return text_in(value.get("output")), code not in (None, 0)
    text = text_in(output)
    exited = _EXITED.search(text[:400])
    has_failed = exited is not None and int(exited[1]) != 0
    return text, has_failed or _REFUSED.match(text) is not None
