"""The views of an action for operators: its text, its prose, or its canonical form.

A stored action is a text (`chosen`) and a JSON message (`chosen_action_json`). A judgment of the
JSON text would count a tool call's quotes and braces against it. So operators choose a view:

- `text`: the column as it is;
- `action`: prose, then tool names and argument values, without keys, quotes and escapes;
- `prose`: only what the assistant says;
- `canonical`: the action as JSON with sorted keys and without call ids, for equality.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import msgspec
import pyarrow as pa

from replay_pipeline.normalize.kernels import TextStats, text_stats
from replay_pipeline.storage.pair_rows import json_value

View = Literal["text", "action", "prose", "canonical"]
SIDES = ("chosen", "rejected")
PROMPT = "state_messages_json"
READ_COLUMNS = (
    *SIDES,
    "chosen_action_json",
    "rejected_action_json",
    PROMPT,
    "tools_json",
    "state_id",
    "session_id",
    "cwd",
    "hint",
)
"""Columns that operators look at."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments` is a mapping, or the text that could not be parsed as one."""

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An assistant message, read from any of its serialized forms."""

    text: str
    calls: tuple[ToolCall, ...]

    def view(self, view: View) -> str:
        """Return the action as the text of a view. `text` isn't one of them, because it is the column itself."""
        if view == "prose":
            return self.text
        if view == "canonical":
            calls = [[call.name, call.arguments] for call in self.calls]
            return json.dumps([self.text.strip(), calls], sort_keys=True, ensure_ascii=False)
        parts = [self.text] if self.text else []
        for call in self.calls:
            parts.append(call.name)
            parts += _leaves(call.arguments)
        return "\n".join(parts)

    def texts(self) -> list[str]:
        """Return the prose and the text values of the calls, one by one."""
        return [self.text, *(leaf for call in self.calls for leaf in _leaves(call.arguments))]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield json.dumps(value)


def read_side(action_json: str | None, text: str = "") -> ParsedAction:
    """Read an action from its message, or from its text if there is no message.

    It reads OpenAI messages, lists of content blocks, and single calls (`name` with `arguments` or
    `input`), compact or indented. Anything else is prose.
    """
    source = action_json if action_json is not None else text
    if source[:1] in ("{", "[") or source[:1].isspace():
        try:
            return _action_of(json_value(source)) or ParsedAction(source, ())
        except (ValueError, RecursionError):
            pass
    return ParsedAction(source, ())


def _action_of(value: Any) -> ParsedAction | None:
    if isinstance(value, list):
        return _from_blocks(value)
    if not isinstance(value, dict):
        return None
    if "tool_calls" in value or "content" in value:
        content = value.get("content")
        action = _from_blocks(content) if isinstance(content, list) else None
        action = action or ParsedAction(content if isinstance(content, str) else "", ())
        calls = tuple(_call(call) for call in value.get("tool_calls") or ())
        return ParsedAction(action.text, action.calls + calls)
    if isinstance(value.get("name"), str) and ("arguments" in value or "input" in value):
        return ParsedAction("", (_call(value),))
    return None


def _from_blocks(blocks: list[Any]) -> ParsedAction | None:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        if not isinstance(block, dict):
            return None
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif "name" in block or "function" in block:
            calls.append(_call(block))
        elif "type" not in block:
            return None
    return ParsedAction("\n".join(texts), tuple(calls))


def _call(call: Any) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", function.get("input"))
    if isinstance(arguments, str):
        try:
            parsed = json_value(arguments)
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None:
        arguments = {}
    name = function.get("name")
    return ToolCall(
        name if isinstance(name, str) else "",
        arguments if isinstance(arguments, dict) else json.dumps(arguments),
    )


def string_leaves(value: str) -> list[str]:
    """Return every text in a JSON value. If the text isn't JSON, return only it."""
    if value[:1] not in ("{", "["):
        return [value]
    try:
        return list(_leaves(json_value(value)))
    except (ValueError, RecursionError):
        return [value]


def prompt_text(messages_json: str | None) -> str:
    """Return the text of a prompt, message by message, with the argument values of calls."""
    return "\n".join(_message_texts(messages_json))


def last_texts(messages_json: str | None) -> tuple[str, str]:
    """Return the last user text of a prompt, and the text of its last message."""
    try:
        messages = json_value(messages_json or "[]")
    except (ValueError, RecursionError):
        return "", messages_json or ""
    asked = [message for message in messages if _role_of(message) == "user"][-1:]
    texts = [_text_of(message) for message in (*asked, *messages[-1:])]
    return (texts[0], texts[-1]) if texts else ("", "")


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _text_of(message: Any) -> str:
    return (_action_of(message) or ParsedAction("", ())).view("action")


def _message_texts(messages_json: str | None) -> list[str]:
    try:
        messages = json_value(messages_json or "[]")
    except (ValueError, RecursionError):
        return [messages_json or ""]
    actions = (_action_of(message) or ParsedAction("", ()) for message in messages)
    return [action.view("action") for action in actions]


class PairBatch:
    """Rows of the pair table. Each view of each side is computed once."""

    def __init__(self, columns: Mapping[str, pa.Array]) -> None:
        self._columns = columns
        self._views: dict[tuple[str, str], pa.Array] = {}
        self._stats: dict[tuple[str, str], TextStats] = {}

    @classmethod
    def from_table(cls, table: pa.Table) -> "PairBatch":
        """Return a batch over the columns of an Arrow table, without copying one-chunk columns."""
        return cls({name: table[name].combine_chunks() for name in table.column_names})

    @classmethod
    def from_samples(cls, samples: Mapping[str, Sequence[Any]]) -> "PairBatch":
        """Return a batch over lists of values, the form in which data-juicer calls an operator."""
        columns = {
            name: pa.array(samples[name], pa.large_string())
            for name in READ_COLUMNS
            if name in samples
        }
        return cls(columns)

    def __len__(self) -> int:
        return len(self._columns[SIDES[0]])

    def column(self, name: str) -> pa.Array:
        """Return a column unchanged, or nulls if the table doesn't have it."""
        if name in self._columns:
            return self._columns[name]
        return pa.nulls(len(self), pa.large_string())

    def values(self, name: str) -> list[Any]:
        """Return a column as Python values."""
        return self.column(name).to_pylist()

    def view(self, side: str, view: View) -> pa.Array:
        """Return the texts of one side under a view."""
        if view == "text":
            return self.column(side)
        key = side, view
        if key not in self._views:
            texts = [action.view(view) for action in self.actions[side]]
            self._views[key] = pa.array(texts, pa.large_string())
        return self._views[key]

    def stats(self, side: str, view: View, special: str) -> TextStats:
        """Return the length, words, and special characters of one side under a view."""
        key = side, view
        if key not in self._stats:
            self._stats[key] = text_stats(self.view(side, view), special)
        return self._stats[key]

    @cached_property
    def actions(self) -> dict[str, list[ParsedAction]]:
        """Return the parsed actions of both sides."""
        return {
            side: [
                read_side(action, text or "")
                for action, text in zip(
                    self.values(f"{side}_action_json"), self.values(side), strict=True
                )
            ]
            for side in SIDES
        }


def check_view(view: str) -> View:
    """Return the view with a name.

    Raises:
        ValueError: there is no such view.
    """
    for known in get_args(View):
        if view == known:
            return known
    raise ValueError(f"view {view!r} is not one of {', '.join(get_args(View))}")


def text_message(text: str) -> str:
    """Return a text as an assistant message, in JSON."""
    return msgspec.json.encode({"role": "assistant", "content": text}).decode()
