"""Anthropic's Messages API, which DeepSeek, Z.ai, and Moonshot serve as well."""

from typing import Any

import msgspec
from pydantic import SecretStr

from replay_pipeline.replay.dialects.base import Ask, Dialect, Prompt, marked

_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class Anthropic(Dialect):
    """The translator in both directions, so that the rest of the code knows one form of messages.

    The address is `https://api.anthropic.com/v1`, or that of a compatible server up to `/v1`.
    Source: Anthropic's API reference, Messages and tool use (version 2023-06-01).
    """

    name = "anthropic"
    hosts = ("api.anthropic.com",)
    path = "/messages"
    limit = "max_tokens"
    parameters = frozenset(
        {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "thinking",
         "tool_choice", "service_tier", "output_config"}
    )  # fmt: skip
    is_whole = True

    def body(self, prompt: Prompt, ask: Ask) -> dict[str, Any]:
        """Build a request of the Messages API, with cache marks in its blocks."""
        params, _ = self.adapted(ask)
        body: dict[str, Any] = {"model": ask.teacher.model, **params, "messages": []}
        system: list[dict[str, Any]] = []
        for message in marked(prompt, ask.n_asked):
            if message["role"] == "system":
                system += _blocks(message["content"])
                continue
            role, blocks = _turn(message)
            if body["messages"] and body["messages"][-1]["role"] == role:
                body["messages"][-1]["content"] += blocks
            else:
                body["messages"].append({"role": role, "content": blocks})
        if system:
            body["system"] = system
        if prompt.tools:
            body["tools"] = [_tool(tool["function"]) for tool in prompt.tools]
        return body

    def headers(self) -> dict[str, str]:
        """Name the version of the API."""
        return {**super().headers(), "anthropic-version": "2023-06-01"}

    def authorization(self, key: SecretStr | None) -> dict[str, str]:
        """Return the key in `x-api-key`."""
        return {} if key is None else {"x-api-key": key.get_secret_value()}

    def reply(self, content: bytes) -> bytes:
        """Translate a reply. Anything outside the Messages API stays as it is."""
        try:
            reply = msgspec.json.decode(content, type=_Reply)
        except (msgspec.DecodeError, RecursionError):
            return content
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [
            {"id": block.id, "type": "function",
             "function": {"name": block.name, "arguments": bytes(block.input).decode()}}
            for block in reply.content
            if block.type == "tool_use"
        ]  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _STOPS.get(reply.stop_reason or "", reply.stop_reason),
        }
        translated: dict[str, Any] = {"id": reply.id, "model": reply.model, "choices": [choice]}
        if (usage := reply.usage) is not None:
            # Anthropic counts the cached tokens beside the others, everybody else among them.
            read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
            prompt = usage.input_tokens + (read or 0) + (written or 0)
            translated["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": usage.output_tokens,
                "total_tokens": prompt + usage.output_tokens,
                "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
            }
        return msgspec.json.encode(translated)


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Reply(msgspec.Struct, tag_field="type", tag="message"):
    content: list[_Block]
    id: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None


def _turn(message: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    if message["role"] == "tool":
        blocks = _blocks(message["content"])
        result: dict[str, Any] = {
            "type": "tool_result",
            "tool_use_id": message["tool_call_id"],
            "content": [{"type": "text", "text": block["text"]} for block in blocks],
        }
        if mark := blocks[-1].get("cache_control"):
            result["cache_control"] = mark
        return "user", [result]
    blocks = _blocks(message["content"]) if message.get("content") else []
    for call in message.get("tool_calls") or []:
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": msgspec.Raw(call["function"]["arguments"].encode()),
            }
        )
    return message["role"], blocks


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_image(part) if part["type"] == "image_url" else part for part in content]


def _image(part: dict[str, Any]) -> dict[str, Any]:
    url = part["image_url"]["url"]
    if url.startswith("data:"):
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
    else:
        source = {"type": "url", "url": url}
    mark = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
    return {"type": "image", "source": source, **mark}


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    if description := function.get("description"):
        tool["description"] = description
    return tool
