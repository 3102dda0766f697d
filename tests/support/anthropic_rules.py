"""The published rules of Anthropic's Messages API, to hold requests to that were built for it.

Source: Anthropic's API reference, messages and tool use.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

_MAX_MARKS = 4
_Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_CallId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,40}$")]
_Words = Annotated[str, Meta(pattern=r"\S", max_length=10_485_760)]
_JsonObject = dict[str, Any]


class _Strict(Struct, forbid_unknown_fields=True):
    pass


class _Mark(_Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | UnsetType = UNSET


class _Schema(Struct):
    type: Literal["object"]
    properties: dict[Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")], _JsonObject]
    oneOf: UnsetType = UNSET
    anyOf: UnsetType = UNSET
    allOf: UnsetType = UNSET


class _AnthropicText(_Strict, tag_field="type", tag="text"):
    text: _Words
    cache_control: _Mark | UnsetType = UNSET


class _AnthropicImage(_Strict, tag_field="type", tag="image"):
    source: dict[str, str]
    cache_control: _Mark | UnsetType = UNSET


class _ToolUse(_Strict, tag_field="type", tag="tool_use"):
    id: _CallId
    name: _Name
    input: _JsonObject


class _ToolResult(_Strict, tag_field="type", tag="tool_result"):
    tool_use_id: _CallId
    content: list[_AnthropicText]
    cache_control: _Mark | UnsetType = UNSET


class _Turn(_Strict):
    role: Literal["user", "assistant"]
    content: Annotated[
        list[_AnthropicText | _AnthropicImage | _ToolUse | _ToolResult], Meta(min_length=1)
    ]


class _AnthropicTool(_Strict):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: _Schema
    description: str | UnsetType = UNSET


class _Messages(Struct):
    """A request of the Messages API."""

    model: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    system: list[_AnthropicText] | UnsetType = UNSET
    tools: list[_AnthropicTool] | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET


_anthropic = msgspec.json.Decoder(_Messages)


_Said = tuple[str, Sequence[str], Sequence[str]]
"""Of one message: its role, the ids of its calls, and those of the results in it."""


def _turns(request: _Messages) -> list[_Said]:
    return [
        (
            turn.role,
            [block.id for block in turn.content if isinstance(block, _ToolUse)],
            [block.tool_use_id for block in turn.content if isinstance(block, _ToolResult)],
        )
        for turn in request.messages
    ]


def _broken_order(turns: Sequence[_Said], *, has_tools: bool) -> str | None:
    """Return what is wrong with the order of the messages, and of calls and results."""
    if not turns or turns[0][0] != "user":
        return "the first message is not the user's"
    if turns[-1][0] != "user":
        return "the last message is the assistant's"
    used: set[str] = set()
    open_calls: set[str] = set()
    for role, calls, results in turns:
        if open_calls != set(results) or len(results) != len(set(results)):
            left = sorted(open_calls ^ set(results))
            return f"calls and results do not fit: {', '.join(left)[:200]}"
        if (calls and role != "assistant") or (results and role != "user"):
            return "a call or a result stands in the wrong role"
        if used & set(calls) or len(set(calls)) < len(calls):
            return "two calls have one id"
        used |= set(calls)
        open_calls = set(calls)
    if used and not has_tools:
        return "there are calls, but no tools"
    return None


def broken_rule(body: bytes) -> str | None:
    """Return the published rule that a request breaks, or `None`."""
    try:
        request = _anthropic.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    names = [tool.name for tool in request.tools or ()]
    if body.count(b'"cache_control":') > _MAX_MARKS:
        return f"more than {_MAX_MARKS} cache marks"
    if len(set(names)) < len(names):
        return "two tools have one name"
    return _broken_order(_turns(request), has_tools=bool(names))
