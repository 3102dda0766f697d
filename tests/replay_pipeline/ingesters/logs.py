"""Rows of a Claude Code log, written as shortly as a test can say them."""

import json
from pathlib import Path
from typing import Any

from replay_pipeline.ingesters import IngestResult, Traces
from replay_pipeline.types import TraceState


class Log:
    """A session file in the making. Each call appends a row below the last one, or `parent`."""

    def __init__(self, session_id: str = "session-1", **common: Any) -> None:
        self.session_id = session_id
        self.common = {"version": "2.1.38", "cwd": "/home/kim/shop", "sessionId": session_id}
        self.common |= common
        self.lines: list[bytes] = []
        self.last: str | None = None
        self.n = 0

    def row(self, type_: str | None, *, parent: Any = "last", uuid: str | None = "", **fields: Any):
        """Append any row; gives its uuid."""
        self.n += 1
        row: dict[str, Any] = {} if type_ is None else {"type": type_}
        if uuid is not None:
            uuid = uuid or f"{self.session_id}-u{self.n}"
            row |= {"uuid": uuid, "parentUuid": self.last if parent == "last" else parent}
            self.last = uuid
        row |= self.common | {
            "timestamp": f"2026-03-01T10:{self.n // 60:02d}:{self.n % 60:02d}.000Z"
        }
        self.raw(json.dumps(row | fields).encode() + b"\n")
        return uuid

    def raw(self, line: bytes) -> None:
        self.lines.append(line)

    def user(self, content: Any, **fields: Any):
        return self.row("user", message={"role": "user", "content": content}, **fields)

    def says(self, message_id: str, *blocks: Any, tokens: int = 100, **fields: Any):
        """One row of an assistant message; a string is a text block."""
        content = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
        message = {
            "id": message_id,
            "role": "assistant",
            "model": "claude-opus-4-6",
            "content": content,
            "stop_reason": None,
            "usage": {"input_tokens": tokens, "cache_read_input_tokens": 0, "output_tokens": 7},
        }
        if "message" in fields:
            message |= fields.pop("message")
        return self.row("assistant", message=message, **fields)

    def calls(self, message_id: str, call_id: str, name: str = "Read", **arguments: Any):
        """One row of an assistant message with one call, below the last row."""
        return self.says(message_id, tool_use(call_id, name, **arguments))

    def answers(self, call_id: str, content: Any = "ok", *, is_error: bool = False, **fields: Any):
        block = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        if is_error:
            block["is_error"] = True
        return self.user([block], **fields)

    def does(self, message_id: str, name: str = "Read", result: str = "ok", **arguments: Any):
        """A message with one call, and its result."""
        self.calls(message_id, f"t-{message_id}", name, **arguments)
        return self.answers(f"t-{message_id}", result)

    @property
    def bytes(self) -> bytes:
        return b"".join(self.lines)

    def write(self, folder: Path, name: str | None = None) -> Path:
        path = folder / (name or f"{self.session_id}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.bytes)
        return path


def tool_use(call_id: str, name: str = "Read", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def states_of(result: IngestResult) -> list[TraceState]:
    """Every state of an ingestion, with its prefix."""
    names = ("sessions", "turns", "states", "tools")
    return list(Traces(**{name: getattr(result, name) for name in names}).materialize())


def shape(messages: list[dict[str, Any]]) -> list[str]:
    """Messages in one word each: who, and the text or the calls."""
    out = []
    for message in messages:
        names = "+".join(c["id"] for c in message.get("tool_calls", ()))
        if message["role"] == "tool":
            out.append(f"{message['tool_call_id']}={message['content']}")
        elif message["role"] == "user":
            out.append(f"> {message['content']}")
        elif message["role"] == "assistant":
            out.append(f"{message['content']}({names})" if names else message["content"])
    return out


def assert_results_follow_their_calls(messages: list[dict[str, Any]]) -> None:
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting
            waiting = [call["id"] for call in message.get("tool_calls", ())]
    assert not waiting
