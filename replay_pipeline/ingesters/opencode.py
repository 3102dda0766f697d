"""OpenCode: an exported session, or a session file of its storage with the parts around it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.base import ReadCounts, RecordedUsage, SessionLog, Turn
from replay_pipeline.ingesters.conversation import Conversation
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_count,
    as_dict,
    as_list,
    as_text,
    moment_of,
    read_document,
    text_in,
)


class OpenCode:
    """Reads `opencode export` documents and `storage/session/<project>/ses_*.json`.

    One message holds several calls to the model; each `step-start` part begins one.
    """

    name = "opencode"

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` has the beginning of an export or of a session's storage file."""
        start = head.lstrip()
        if not start.startswith(b"{") or b'"ses_' not in head:
            return False
        is_export = b'"info"' in head and b'"messages"' in head
        is_stored = b'"directory"' in head and b'"projectID"' in head and b'"role"' not in head
        return is_export or is_stored

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Read the one conversation of a session: a document, so there is no part of it to read."""
        del end
        document = as_dict(read_document(path))
        info = as_dict(document.get("info")) or document
        messages = as_list(document.get("messages")) or _stored(path, str(info.get("id")))
        talk = Conversation(as_text(info.get("id")) or path.stem, self.name)
        talk.cwd = as_text(info.get("directory"))
        talk.version = as_text(info.get("version"))
        counts.rows += len(messages)
        for message in map(as_dict, messages):
            if _take(talk, as_dict(message.get("info")), as_list(message.get("parts"))):
                counts.rows_used += 1
            else:
                counts.skipped["empty"] += 1
        yield talk.log()


def _stored(path: Path, session_id: str) -> list[dict[str, Any]]:
    """Return messages and parts that lie beside a stored session."""
    if len(path.parents) < 3:
        return []
    storage = path.parents[2]
    messages = []
    for file in sorted((storage / "message" / session_id).glob("*.json")):
        parts = sorted((storage / "part" / file.stem).glob("*.json"))
        messages.append({"info": read_document(file), "parts": [read_document(p) for p in parts]})
    return messages


def _take(talk: Conversation, info: dict[str, Any], parts: list[Any]) -> bool:
    created = as_dict(info.get("time")).get("created")
    timestamp = moment_of(created)
    parts = list(map(as_dict, parts))
    if info.get("role") == "user":
        text = "\n".join(t for p in parts if (t := as_text(p.get("text"))) is not None)
        if text:
            talk.user(text, offset=0, timestamp=timestamp)
        return bool(text)
    if info.get("role") != "assistant":
        return False
    talk.model = as_text(info.get("modelID")) or talk.model
    talk.cwd = as_text(as_dict(info.get("path")).get("cwd")) or talk.cwd
    message_id = as_text(info.get("id")) or ""
    n_steps = 0
    turn: Turn | None = None
    for part in parts:
        kind = as_text(part.get("type"))
        if kind == "step-start":
            talk.close()
            n_steps += 1
            continue
        if kind not in {"text", "reasoning", "tool", "step-finish"}:
            continue
        own_id = f"{message_id}-{n_steps}" if n_steps > 1 else message_id
        if kind == "step-finish":
            if turn is not None and turn.usage is None:
                turn.usage = _usage(as_dict(part.get("tokens")))
            continue
        turn = talk.assistant(offset=0, timestamp=timestamp, message_id=own_id)
        _part(talk, turn, part)
    if turn is not None and turn.usage is None:
        turn.usage = _usage(as_dict(info.get("tokens")))
    talk.close()
    return turn is not None


def _part(talk: Conversation, turn: Turn, part: dict[str, Any]) -> None:
    text = as_text(part.get("text"))
    if part.get("type") == "tool":
        state = as_dict(part.get("state"))
        name = as_text(part.get("tool")) or ""
        call_id = talk.call(
            turn, as_text(part.get("callID")), name, arguments_text(state.get("input"))
        )
        if as_text(state.get("status")) in {"completed", "error"}:
            is_error = state.get("status") == "error"
            answer = state.get("error") if is_error else state.get("output")
            talk.result(call_id, text_in(answer), is_error=is_error)
            # A step may call again after its first call has run.
            talk.reopen(turn)
    elif text is not None:
        (turn.thinking if part.get("type") == "reasoning" else turn.texts).append(text)


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
