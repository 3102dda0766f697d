"""Check each request against the published rules of its protocol, before money moves.

Providers differ in what they refuse, and a router may ask any of them, so the strictest published
rule counts. Sources: OpenAI's API reference, chat completions; Anthropic's, messages and tool use;
OpenRouter's, request schema.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

_MAX_MARKS = 4
_Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_CallId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,40}$")]
_Words = Annotated[str, Meta(pattern=r"\S", max_length=10_485_760)]
_Limit = Annotated[int, Meta(ge=1)] | UnsetType
_JsonObject = dict[str, Any]


class _Strict(Struct, forbid_unknown_fields=True):
    pass


class _Mark(_Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | UnsetType = UNSET


class _TextBlock(_Strict, tag_field="type", tag="text"):
    text: _Words
    cache_control: _Mark | UnsetType = UNSET


class _Url(_Strict):
    url: Annotated[str, Meta(pattern=r"^(https://|data:image/(png|jpeg|gif|webp);base64,)")]
    detail: Literal["auto", "low", "high"] | UnsetType = UNSET


class _Image(_Strict, tag_field="type", tag="image_url"):
    image_url: _Url
    cache_control: _Mark | UnsetType = UNSET


_Texts = _Words | Annotated[list[_TextBlock], Meta(min_length=1)]
_Parts = _Words | Annotated[list[_TextBlock | _Image], Meta(min_length=1)]


class _CalledFunction(_Strict):
    name: _Name
    arguments: str


class _ToolCall(_Strict):
    id: _CallId
    type: Literal["function"]
    function: _CalledFunction


class _System(_Strict, tag_field="role", tag="system"):
    content: _Texts


class _User(_Strict, tag_field="role", tag="user"):
    content: _Parts


class _Assistant(_Strict, tag_field="role", tag="assistant"):
    content: _Texts | None = None
    tool_calls: Annotated[list[_ToolCall], Meta(min_length=1)] | UnsetType = UNSET


class _Result(_Strict, tag_field="role", tag="tool"):
    tool_call_id: _CallId
    content: _Texts


_Message = _System | _User | _Assistant | _Result


class _Schema(Struct):
    type: Literal["object"]
    properties: dict[Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")], _JsonObject]
    oneOf: UnsetType = UNSET
    anyOf: UnsetType = UNSET
    allOf: UnsetType = UNSET


class _Function(_Strict):
    name: _Name
    parameters: _Schema
    description: str | UnsetType = UNSET


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _Completion(Struct):
    """A request of the chat completions; fields that are not named here are the endpoint's own."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: Annotated[list[_Tool], Meta(min_length=1, max_length=128)] | UnsetType = UNSET
    max_tokens: _Limit = UNSET
    max_completion_tokens: _Limit = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    tool_choice: Literal["none", "auto", "required"] | _JsonObject | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    stop: str | Annotated[list[str], Meta(max_length=4)] | UnsetType | None = UNSET
    session_id: Annotated[str, Meta(max_length=256)] | UnsetType = UNSET
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | UnsetType
    ) = UNSET


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


_completion = msgspec.json.Decoder(_Completion)
_anthropic = msgspec.json.Decoder(_Messages)


def broken_rule(body: bytes, path: str = "/chat/completions") -> str | None:
    """Return the published rule that a request breaks, or `None`.

    Args:
        body: the request as it would be sent.
        path: the path below the base URL, which decides the protocol.
    """
    try:
        if path == "/messages":
            request = _anthropic.decode(body)
            turns, names = _turns(request), [tool.name for tool in request.tools or ()]
        else:
            completion = _completion.decode(body)
            if completion.max_tokens is not UNSET and completion.max_completion_tokens is not UNSET:
                return "max_tokens and max_completion_tokens exclude each other"
            turns = _completion_turns(completion)
            names = [tool.function.name for tool in completion.tools or ()]
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    if body.count(b'"cache_control":') > _MAX_MARKS:
        # An upper bound: the words may be in a message as well, where the quotes are escaped.
        return f"more than {_MAX_MARKS} cache marks"
    if len(set(names)) < len(names):
        return "two tools have one name"
    return _broken_order(turns, has_tools=bool(names))


_Said = tuple[str, Sequence[str], Sequence[str]]
"""Of one message: its role, the ids of its calls, and those of the results in it."""


def _completion_turns(request: _Completion) -> list[_Said]:
    turns: list[_Said] = []
    for message in request.messages:
        if isinstance(message, _Assistant):
            calls = message.tool_calls or ()
            if not calls and message.content is None:
                raise msgspec.ValidationError("an assistant's message has neither text nor calls")
            for call in calls:
                _arguments.decode(call.function.arguments)
            turns.append(("assistant", [call.id for call in calls], ()))
        elif isinstance(message, _Result):
            if turns and turns[-1][2]:
                turns[-1] = ("user", (), [*turns[-1][2], message.tool_call_id])
            else:
                turns.append(("user", (), [message.tool_call_id]))
        elif isinstance(message, _User):
            turns.append(("user", (), ()))
        elif turns:
            raise msgspec.ValidationError("a system message comes after the first message")
    return turns


def _turns(request: _Messages) -> list[_Said]:
    return [
        (
            turn.role,
            [block.id for block in turn.content if isinstance(block, _ToolUse)],
            [block.tool_use_id for block in turn.content if isinstance(block, _ToolResult)],
        )
        for turn in request.messages
    ]


_arguments = msgspec.json.Decoder(_JsonObject)


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
