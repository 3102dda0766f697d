"""Convert messages and tools between a dataset's form and that of verifiers' traces.

A dataset uses OpenAI's form, in which the call's function is nested. verifiers uses a flat form,
with arguments as text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.types import Message, Tool
from trainer.errors import DatasetError


def flat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turn a prompt into verifiers' `Messages`."""
    return [_flat(message) for message in messages]


def _flat(message: Message) -> dict[str, Any]:
    role, text = message["role"], _text(message.get("content"))
    if role in ("system", "user"):
        return {"role": role, "content": text}
    if role == "tool":
        return {"role": role, "tool_call_id": message.get("tool_call_id") or "", "content": text}
    if role != "assistant":
        raise DatasetError(f"a message has the role {role!r}")
    calls = [
        {
            "id": call.get("id") or f"call_{number}",
            "name": call["function"]["name"],
            "arguments": _arguments(call["function"].get("arguments")),
        }
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    if not calls:
        return {"role": role, "content": text}
    # Endpoints refuse a text without words beside a call.
    return {"role": role, "content": text or None, "tool_calls": calls}


def flat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Turn the tools of a dataset row into verifiers' `Tool`s."""
    return [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description") or "",
            "parameters": tool["function"].get("parameters") or {},
        }
        for tool in tools or ()
    ]


def nested_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Turn the tools of verifiers into OpenAI's form."""
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def nested_action(message: Mapping[str, Any]) -> Message:
    """Turn a reply of a trace into an action for the rewards."""
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in message.get("tool_calls") or ()
    ]
    action: Message = {"role": "assistant", "content": message.get("content") or ""}
    return action | ({"tool_calls": calls} if calls else {})


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False)


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    parts = [part.get("text", "") if isinstance(part, Mapping) else part for part in content]
    return "\n".join(str(part) for part in parts)
