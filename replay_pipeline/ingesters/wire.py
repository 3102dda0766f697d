"""Messages in the form of Anthropic's Messages API, and their conversion to OpenAI's form."""

from collections.abc import Iterator
from typing import Any

import msgspec

from replay_pipeline.ingesters.json_lines import as_list
from replay_pipeline.types import Message, Tool

WireMessage = dict[str, Any]
"""One message as it was sent: `role` (`user`, `assistant`, or `system`) and `content`."""
_MARKS = ("caller", "cache_control")


def blocks_of(content: Any) -> list[Any]:
    """Return the blocks of a content without cache marks. Plain text counts as one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [unmarked(block) for block in as_list(content)]


def unmarked(block: Any) -> Any:
    """Return a block without what the client adds for its provider: cache marks and callers."""
    if isinstance(block, dict) and any(key in block for key in _MARKS):
        return {key: value for key, value in block.items() if key not in _MARKS}
    return block


def messages_of(wire: WireMessage) -> Iterator[Message]:
    """Convert a message to OpenAI's form, in which each result of a call is a message of its own."""
    role = str(wire.get("role"))
    content = wire.get("content")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks_of(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            if texts:
                yield {"role": role, "content": "\n\n".join(texts)}
                texts = []
            text = text_of_result(block.get("content"))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input")).decode()
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind == "text":
            texts.append(str(block.get("text")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(f"[{kind}]")
    if role == "assistant":
        message: dict[str, Any] = {"role": role, "content": "\n\n".join(texts)}
        yield message | ({"tool_calls": calls} if calls else {})
    elif texts:
        yield {"role": role, "content": "\n\n".join(texts)}


def text_of_result(content: Any) -> str:
    """Return the text of a tool result. Other blocks are named in brackets."""
    if isinstance(content, str):
        return content
    parts = []
    for block in as_list(content):
        if isinstance(block, dict):
            kind, name = block.get("type"), block.get("tool_name")
            named = f"[{kind} {name}]" if name else f"[{kind}]"
            parts.append(block["text"] if isinstance(block.get("text"), str) else named)
    return "\n".join(parts)


def tool_of(wire: dict[str, Any]) -> Tool:
    """Convert a tool to OpenAI's form."""
    function: dict[str, Any] = {"name": str(wire.get("name"))}
    if isinstance(wire.get("description"), str):
        function["description"] = wire["description"]
    function["parameters"] = wire.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": function}


def system_of(shape: dict[str, Any]) -> list[str]:
    """Return the texts of the system prompt."""
    system = shape.get("system")
    return [str(block.get("text")) for block in blocks_of(system) if isinstance(block, dict)]
