"""Refuse the requests that real providers refuse.

This module follows only the published rules, and shares no code with the builder of requests. So a
mistake there isn't repeated here. Sources: OpenAI's API reference and error messages for chat
completions, Anthropic's for messages and tool use, OpenRouter's request schema.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_TOOL_NAME = re.compile(r"\A[a-zA-Z0-9_-]{1,64}\Z")
_PROPERTY = re.compile(r"\A[a-zA-Z0-9_.-]{1,64}\Z")
_FIELDS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "refusal"},
    "tool": {"role", "content", "tool_call_id"},
}
_MAX_TEXT = 10_485_760
_BODY = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "stop",
     "max_completion_tokens", "temperature", "top_p", "top_k", "top_a", "min_p", "seed", "n",
     "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs",
     "top_logprobs", "response_format", "structured_outputs", "reasoning", "reasoning_effort",
     "include_reasoning", "verbosity", "stream", "stream_options", "usage", "user", "metadata",
     "session_id", "provider", "models", "route", "transforms", "plugins", "trace", "store",
     "service_tier", "cache_control", "prompt_cache_key", "safety_identifier", "modalities",
     "prediction", "web_search_options"}
)  # fmt: skip


def complaint(body: Any) -> str | None:
    """Return a provider's message on why it refuses a chat completion, or None if it doesn't."""
    if not isinstance(body, dict):
        return "the body is not an object"
    return next(_complaints(body), None)


def unsupported(body: Mapping[str, Any], supported: set[str]) -> list[str]:
    """Return the fields that an endpoint with these parameters doesn't support, by a router's rules."""
    sent = body.keys() - {"model", "messages", "provider", "metadata", "session_id", "stream",
                          "cache_control", "user", "usage", "transforms", "plugins", "models",
                          "route", "trace"}  # fmt: skip
    return sorted(sent - supported)


def _complaints(body: dict[str, Any]) -> Iterator[str]:
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield "model: a text is needed"
    if extra := body.keys() - _BODY:
        yield f"{', '.join(sorted(extra))}: extra inputs are not permitted"
    yield from _limits(body)
    yield from _choices(body)
    tools = body.get("tools")
    if tools is not None:
        yield from _tools(tools)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        yield "messages: too short"
        return
    for place, message in enumerate(messages):
        for problem in _message(message):
            yield f"messages.{place}: {problem}"
            return
    yield from _order(messages)
    if not tools and any(message.get("tool_calls") for message in messages):
        yield "tools: must be defined where messages hold calls"
    parts = (part for each in messages for part in each.get("content") or () if _is_marked(part))
    if sum(1 for _ in parts) > 4:
        yield "a maximum of 4 blocks with cache_control may be provided"


def _is_marked(part: Any) -> bool:
    return isinstance(part, dict) and "cache_control" in part


def _limits(body: dict[str, Any]) -> Iterator[str]:
    if "max_tokens" in body and "max_completion_tokens" in body:
        yield "max_tokens and max_completion_tokens cannot both be set"
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name, 1)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            yield f"{name}: a positive integer is needed"
    for name, most in (("temperature", 2), ("top_p", 1)):
        value = body.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            yield f"{name}: a number from 0 to {most} is needed"
    metadata = body.get("metadata") or {}
    if len(metadata) > 16 or any(
        len(key) > 64 or not isinstance(value, str) or len(value) > 512
        for key, value in metadata.items()
    ):
        yield "metadata: at most 16 texts of at most 512 characters"
    if len(str(body.get("session_id") or "")) > 256:
        yield "session_id: at most 256 characters"


def _choices(body: dict[str, Any]) -> Iterator[str]:
    choice = body.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("none", "auto", "required"):
        yield f"tool_choice: {choice!r} is none of none, auto, required"
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        yield "seed: an integer is needed"
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and (
        not isinstance(stops, list)
        or len(stops) > 4
        or not all(isinstance(each, str) for each in stops)
    ):
        yield "stop: a text or at most 4 of them are needed"


def _tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list) or not 1 <= len(tools) <= 128:
        yield "tools: a list of 1 to 128 is needed"
        return
    names: list[str] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            yield f"tools.{place}: no function"
            continue
        if not isinstance(function.get("name"), str) or not _TOOL_NAME.match(function["name"]):
            yield f"tools.{place}.function.name: string should match '^[a-zA-Z0-9_-]{{1,64}}$'"
        names.append(str(function.get("name")))
        schema = function.get("parameters", {"type": "object"})
        if not isinstance(schema, dict) or schema.get("type") != "object":
            yield f"tools.{place}: schema must have type 'object'"
            continue
        if schema.keys() & {"oneOf", "anyOf", "allOf"}:
            yield f"tools.{place}: oneOf, anyOf, allOf are not supported at the top level"
        yield from (f"tools.{place}: {problem}" for problem in _schema(schema))
    if len(set(names)) < len(names):
        yield "tools: tool names must be unique"


def _schema(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if (kind == "array" or (isinstance(kind, list) and "array" in kind)) and "items" not in schema:
        yield "array schema missing items"
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict):
        yield "properties: no object"
        return
    for name, inner in properties.items():
        if not _PROPERTY.match(name):
            yield f"property keys should match pattern: {name[:80]!r}"
        yield from _schema(inner)
    yield from _schema(schema.get("items"))


def _message(message: Any) -> Iterator[str]:
    if not isinstance(message, dict) or str(message.get("role")) not in _FIELDS:
        yield "role: system, user, assistant or tool is needed"
        return
    role = message["role"]
    if extra := message.keys() - _FIELDS[role]:
        yield f"{', '.join(sorted(extra))}: extra inputs are not permitted"
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        if role != "assistant" or not calls:
            yield "content: must be non-empty"
    elif isinstance(content, str):
        yield from _words(content)
    elif isinstance(content, list) and content:
        for part in content:
            yield from _part(part, role)
    else:
        yield "content: a text or a list of parts is needed"
    if role == "tool" and not _is_call_id(message.get("tool_call_id")):
        yield "tool_call_id: at most 40 of a-z, A-Z, 0-9, _ and -"
    if "tool_calls" in message:
        if not isinstance(calls, list) or not calls:
            yield "tool_calls: empty array"
            return
        for call in calls:
            yield from _call(call)


def _words(text: str) -> Iterator[str]:
    if not text.strip():
        yield "text content blocks must contain non-whitespace text"
    if len(text) > _MAX_TEXT:
        yield f"string too long: at most {_MAX_TEXT}"


def _part(part: Any, role: str) -> Iterator[str]:
    if not isinstance(part, dict):
        yield "content: a part is not an object"
    elif part.get("type") == "text" and isinstance(part.get("text"), str):
        yield from _words(part["text"])
    elif part.get("type") == "image_url" and role == "user":
        url = (part.get("image_url") or {}).get("url")
        if not isinstance(url, str) or not re.match(r"https://|data:image/\w+;base64,", url):
            yield "image_url: no address of an image"
    else:
        yield f"content: type {str(part.get('type'))[:40]!r} is not taken here"


def _call(call: Any) -> Iterator[str]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        yield "tool_calls: no function"
        return
    if not _is_call_id(call.get("id")):
        yield "tool_calls.id: at most 40 of a-z, A-Z, 0-9, _ and -"
    if not isinstance(function.get("name"), str) or not _TOOL_NAME.match(function["name"]):
        yield "tool_calls.function.name: string should match '^[a-zA-Z0-9_-]{1,64}$'"
    try:
        arguments = json.loads(function.get("arguments") or "", parse_constant=_refuse)
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        yield "tool_calls.function.arguments: input should be a valid dictionary"


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _is_call_id(value: Any) -> bool:
    return isinstance(value, str) and re.match(r"\A[a-zA-Z0-9_-]{1,40}\Z", value) is not None


def _order(messages: list[Any]) -> Iterator[str]:
    """Look at roles, and that every call is answered at once and once."""
    messages = [message for message in messages if isinstance(message, dict)]
    spoken = [message for message in messages if message.get("role") != "system"]
    n_system = len(messages) - len(spoken)
    if any(message.get("role") == "system" for message in messages[n_system:]):
        yield "system message must be at the beginning"
    if not spoken or spoken[0].get("role") != "user":
        yield "first message must use the user role"
    if spoken and spoken[-1].get("role") == "assistant":
        yield "the conversation must end with a user message"
    seen: set[str] = set()
    waiting: set[str] = set()
    for message in spoken:
        if message.get("role") == "tool":
            name = str(message.get("tool_call_id"))
            if name not in waiting:
                yield f"tool_call_id {name[:60]} has no call in the message before"
            waiting.discard(name)
            continue
        if waiting:
            yield f"tool_use ids without tool_result right after: {', '.join(sorted(waiting))[:200]}"
        waiting = set()
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            name = str(call.get("id")) if isinstance(call, dict) else ""
            if name in seen:
                yield f"tool_use ids must be unique: {name[:60]}"
            seen.add(name)
            waiting.add(name)
    if waiting:
        yield f"tool_use ids without tool_result right after: {', '.join(sorted(waiting))[:200]}"
