"""The canonical form of an action, computed by the same code for student and teacher."""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec

from replay_pipeline.actions.paths import absolute, relative, without_needless_cd
from replay_pipeline.actions.tools import ToolList, spec_of, without_defaults_inside
from replay_pipeline.types import Message, Tool

MAX_ARGUMENT_CHARS = 250_000
"""Calls with longer arguments are invalid. No model writes them, and comparing them would take too long."""
MAX_ARGUMENTS = 256
"""A call with more keys is invalid."""
MAX_VALUES = 1_000
"""The most numbers, strings, lists, and objects inside the arguments of one call."""
MAX_CALLS = 256
"""The most calls of one action. Together they have at most twice `MAX_ARGUMENT_CHARS`."""
_MAX_CACHED_CHARS = 8_192
_MAX_DEPTH = 64

_THINKING = re.compile(r"\A\s*<(think|thinking)>.*?</\1>", re.DOTALL)
_RENDERED = re.compile(r"([A-Za-z_][\w.:-]*) (\{.*\})")
_ENCODER = msgspec.json.Encoder(order="sorted")


class MalformedCallError(ValueError):
    """A tool call that can't be read. The message becomes the `invalid_reason`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call with canonical arguments."""

    name: str
    arguments: str
    """JSON object with sorted keys, without nulls, labels, and explicit defaults. Paths inside the
    working directory are relative to it."""
    cwd: str | None = None
    """Working directory that the paths are relative to."""
    plain: str | None = field(default=None, repr=False, compare=False)
    """The arguments without what the schema of a foreign tool says makes no difference, if it was given."""
    only_looks: bool | None = field(default=None, repr=False, compare=False)
    """Whether a foreign tool changes nothing, as far as its annotations say."""
    keys: Any = field(default=None, init=False, repr=False, compare=False)
    """The cached result of `keys.keys_of`."""

    def __hash__(self) -> int:
        # A string keeps its hash, so this is much faster than hashing all fields.
        return hash(self.arguments)

    def values(self) -> dict[str, Any]:
        """Return the arguments as an object."""
        return _decode(self.arguments)

    def shown(self) -> str:
        """Return the arguments for people and models: `arguments` without a needless `cd`.

        Some agents write `cd <working directory> &&` before every command. It has no effect, but
        would reveal which side of a pair is whose.
        """
        if self.name != "Bash" or "cd " not in self.arguments:
            return self.arguments
        try:
            values = self.values()
            command = without_needless_cd(values["command"], self.cwd)
        except (MalformedCallError, KeyError, TypeError, AttributeError):
            return self.arguments
        return _as_text({**values, "command": command})


@dataclass(frozen=True, slots=True)
class Action:
    """The next move of an agent: either tool calls or a text."""

    text: str = ""
    """Final text of an action without calls. Text next to a call isn't part of the action."""
    calls: tuple[Call, ...] = ()
    """The calls in their order. The order doesn't matter for agreement."""
    invalid_reason: str | None = None
    """Why the action can't run and has no vote, or None for a valid action."""

    def __hash__(self) -> int:
        return hash(self.calls or self.text)

    @property
    def is_valid(self) -> bool:
        """Return whether the action could have been carried out."""
        return self.invalid_reason is None

    @property
    def tools(self) -> tuple[str, ...]:
        """Return the names of the tools that it calls, in order."""
        return tuple(call.name for call in self.calls)

    def render(self) -> str:
        """Return the canonical text: one line `Tool {arguments}` per call, or the final text."""
        if not self.calls:
            return self.text
        return "\n".join(f"{call.name} {call.shown()}" for call in self.calls)

    def to_message(self) -> Message:
        """Return the canonical assistant message. Call ids count from zero, so that both sides of a pair have the same."""
        if not self.calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.shown()},
            }
            for number, call in enumerate(self.calls)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def canonical_action(
    message: Message | str | None,
    *,
    cwd: str | None = None,
    tools: Sequence[Tool] | ToolList | None = None,
) -> Action:
    """Return the canonical form of an assistant message.

    This drops thinking, ids, refusals, labels, and text next to a tool call. It never raises: a
    message that can't be carried out becomes an action with an `invalid_reason`.

    Args:
        message: A message in OpenAI chat form, Anthropic content blocks, or a plain string.
        cwd: Folder that relative paths are read against.
        tools: The available tools. If given, a call is invalid if its tool isn't among them or its
            arguments break the schema.
    """
    text, raw_calls = _parts(message)
    if not raw_calls:
        if len(text) > MAX_ARGUMENT_CHARS:
            return Action(text=text, invalid_reason="text_too_large")
        text = _clean_text(text)
        return Action(text=text, invalid_reason=None if text else "empty")
    if len(raw_calls) > 2 and _are_too_many(raw_calls):
        return Action(invalid_reason="too_many_calls")
    cwd = absolute(cwd, None) if cwd else None
    toolbox = tools if isinstance(tools, ToolList) or tools is None else ToolList(tools)
    calls: list[Call] = []
    reason: str | None = None
    for name, arguments in raw_calls:
        try:
            calls.append(canonical_call(name, arguments, cwd=cwd, tools=toolbox))
        except MalformedCallError as error:
            reason = reason or str(error)
            calls.append(Call(str(name or "?"), _as_text(arguments), cwd))
    return Action(calls=tuple(calls), invalid_reason=reason)


def _are_too_many(raw_calls: list[tuple[Any, Any]]) -> bool:
    n_chars = sum(len(arguments) for _, arguments in raw_calls if isinstance(arguments, str))
    return len(raw_calls) > MAX_CALLS or n_chars > 2 * MAX_ARGUMENT_CHARS


def canonical_call(
    name: Any, arguments: Any, *, cwd: str | None = None, tools: ToolList | None = None
) -> Call:
    """Return one tool call in canonical form.

    Raises:
        MalformedCallError: the call can't run.
    """
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("unnamed_tool")
    if isinstance(arguments, dict):
        arguments = _as_text(arguments)
    elif arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):
        raise MalformedCallError(f"malformed_arguments: {name}: not a JSON object")
    if len(arguments) > MAX_ARGUMENT_CHARS:
        raise MalformedCallError(f"arguments_too_large: {name}")
    if tools is not None and name not in tools:
        raise MalformedCallError(f"unknown_tool: {name}")
    build = _cached_call if len(arguments) <= _MAX_CACHED_CHARS else _build_call
    call = build(name, arguments, cwd)
    if tools is not None and (why := tools.complaint(name, arguments)):
        raise MalformedCallError(f"schema_invalid: {name}: {why}")
    plain = None if tools is None else tools.plain(name, call.arguments)
    only_looks = None if tools is None else tools.looking.get(name)
    if plain is None and only_looks is None:
        return call
    return replace(call, plain=plain, only_looks=only_looks)


def parse_rendered(text: str, *, cwd: str | None = None) -> Action:
    """Parse the output of `Action.render`, or Hermes-style `<tool_call>` blocks.

    Any other text becomes an action without calls.
    """
    calls = [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in _calls_in_text(text)
    ]
    return canonical_action({"role": "assistant", "content": text, "tool_calls": calls}, cwd=cwd)


def _calls_in_text(text: str) -> list[tuple[str, Any]]:
    if text.count("\n") > MAX_CALLS or len(text) > MAX_ARGUMENT_CHARS:
        return []
    if "<tool_call>" in text:
        found = []
        for block in text.split("<tool_call>", MAX_CALLS + 1)[1:]:
            try:
                call = _decode(block.partition("</tool_call>")[0].strip())
                found.append((call.get("name"), call.get("arguments")))
            except (MalformedCallError, AttributeError):
                found.append(("", None))
        return found
    matches = [_RENDERED.fullmatch(line) for line in text.strip().split("\n")]
    return [(m[1], m[2]) for m in matches if m] if all(matches) else []


def _parts(message: Message | str | None) -> tuple[str, list[tuple[Any, Any]]]:
    """Return text and (name, arguments) of each call, from any of the accepted shapes."""
    if message is None:
        return "", []
    if isinstance(message, str):
        return message, []
    given = message.get("tool_calls")
    calls = [_openai_call(call) for call in given] if isinstance(given, list | tuple) else []
    if legacy := message.get("function_call"):
        calls.append(_openai_call({"function": legacy}))
    content = message.get("content")
    if not isinstance(content, list):
        return (content if isinstance(content, str) else ""), calls
    texts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("text", "output_text"):
            texts.append(str(block.get("text") or ""))
        elif kind == "tool_use":
            calls.append((block.get("name"), block.get("input")))
        elif isinstance(block, str):
            texts.append(block)
    return "\n".join(texts), calls


def _openai_call(call: Any) -> tuple[Any, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None, None
    return function.get("name"), function.get("arguments")


def _clean_text(text: str) -> str:
    text = unicodedata.normalize("NFC", _THINKING.sub("", text)).strip()
    # A lone surrogate cannot be stored as UTF-8.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _build_call(name: str, arguments: str, cwd: str | None) -> Call:
    given = _decode(arguments)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise MalformedCallError(f"malformed_arguments: {name}: not a JSON object")
    if len(given) > MAX_ARGUMENTS:
        raise MalformedCallError(f"arguments_too_large: {name}")
    try:
        n_values = count()
        present = {
            k: v if type(v) is str else _plain(v, 0, n_values)
            for k, v in given.items()
            if v is not None
        }
    except RecursionError as error:
        raise MalformedCallError(f"malformed_arguments: {name}: nested too deep") from error
    except OverflowError as error:
        raise MalformedCallError(f"arguments_too_large: {name}") from error
    spec = spec_of(name)
    defaults = spec.defaults
    if why := spec.complaint(present):
        raise MalformedCallError(f"schema_invalid: {name}: {why}")
    kept: dict[str, Any] = {}
    for key, value in present.items():
        if key in spec.paths and isinstance(value, str):
            value = relative(value, cwd) if value else "."
            if key == spec.default_path and value == relative(cwd or ".", cwd):
                continue
        if key in spec.labels or (key in defaults and _is_same(defaults[key], value)):
            continue
        kept[key] = value
    if name == "MultiEdit":
        kept = without_defaults_inside(kept)
    return Call(name, _as_text(kept), cwd)


_cached_call = lru_cache(maxsize=16_384)(_build_call)


def _is_same(default: Any, value: Any) -> bool:
    """Return equality that keeps 1 apart from true, as JSON does."""
    options: Iterable[Any] = default if isinstance(default, list) else (default,)
    return value in options and any(type(option) is type(value) for option in options)


def _plain(value: Any, depth: int, n_values: Iterator[int]) -> Any:
    """Return `value` with whole floats as integers: 1.0, 1e0 and 1 are one number in JSON.

    Raises:
        OverflowError: a number is infinite or not a number.
        RecursionError: the value is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise RecursionError
    if next(n_values) > MAX_VALUES:
        raise OverflowError
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {k: _plain(v, depth + 1, n_values) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v, depth + 1, n_values) for v in value]
    return value


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        # Slower, but it reads lone surrogates, which real logs contain.
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError("malformed_arguments: not JSON") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return _ENCODER.encode(value).decode()
    except (UnicodeEncodeError, RecursionError, TypeError, OverflowError):
        try:
            return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
        except (RecursionError, TypeError, ValueError):
            # Too deep, in a circle, or with keys that are no strings: nothing that JSON can say.
            return '"no JSON"'
