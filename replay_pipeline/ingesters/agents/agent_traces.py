"""Agent-trace rows: each row is one session as chat messages, as `datasets` yields them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters.agents.base import Conversation
from replay_pipeline.ingesters.base import ReadCounts, SessionLog
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_dict,
    as_list,
    objects_in,
    read_objects,
    text_in,
    text_or_none,
)


class AgentTraces:
    """Reads JSON lines with `messages` in OpenAI's form, and with `tools` if they were recorded."""

    name = "agent_traces"
    rank = 4

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row holds chat messages."""
        line = head.split(b"\n", 1)[0]
        for row in objects_in(line, ReadCounts()):
            messages = as_list(row.get("messages"))
            return bool(messages) and "role" in as_dict(messages[0])
        start = head[:4096]
        return start.startswith(b"{") and b'"messages"' in start and b'"role"' in start

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per row."""
        for number, (offset, row) in enumerate(read_objects(path, counts, end)):
            messages = as_list(row.get("messages"))
            if not messages:
                counts.count("no_message")
                continue
            counts.count(None)
            yield _session(row, messages, f"{path.stem}-{number}", offset)


def _session(row: dict[str, Any], messages: list[Any], name: str, offset: int) -> SessionLog:
    metadata = as_dict(row.get("metadata"))
    talk = Conversation(text_or_none(row.get("session_id")) or name, "agent_traces")
    talk.agent = text_or_none(row.get("harness")) or talk.agent
    talk.model = text_or_none(row.get("model")) or text_or_none(metadata.get("model"))
    talk.cwd = text_or_none(metadata.get("cwd"))
    talk.tools = [tool for tool in as_list(row.get("tools")) if _is_tool(tool)]
    for message in map(as_dict, messages):
        role = message.get("role")
        text = text_in(message.get("content"))
        if role == "assistant":
            talk.close()
            turn = talk.assistant(offset=offset)
            if text:
                turn.texts.append(text)
            thinking = text_or_none(message.get("reasoning_content")) or text_or_none(
                message.get("thinking")
            )
            if thinking:
                turn.thinking.append(thinking)
            for call in map(as_dict, as_list(message.get("tool_calls"))):
                function = as_dict(call.get("function")) or call
                arguments = arguments_text(function.get("arguments"))
                name_ = text_or_none(function.get("name")) or ""
                talk.call(turn, text_or_none(call.get("id")), name_, arguments)
        elif role == "tool":
            talk.result(_answered(talk, message), text)
        elif text:
            talk.user(text, offset=offset, kind="user" if role == "user" else "meta")
    return talk.log()


def _answered(talk: Conversation, message: dict[str, Any]) -> str:
    """Return the call that a result answers: the named one, or the first that has none."""
    call_id = text_or_none(message.get("tool_call_id"))
    if call_id is not None or not talk.turns:
        return call_id or ""
    turn = talk.turns[-1]
    return next((call.id for call in turn.calls if call.id not in turn.results), "")


def _is_tool(value: Any) -> bool:
    function = as_dict(as_dict(value).get("function"))
    return text_or_none(function.get("name")) is not None
