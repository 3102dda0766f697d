"""The native form of an action: the calls as the client of its state takes them.

The canonical form is for comparing: it leaves out what changes nothing. A client wants more. Its tools
ask for absolute paths, and have required arguments that say nothing of what is done. So what is
published and trained on is rendered from the canonical action, for both sides of a pair alike: nothing
of how either side spelled its calls is left to tell them apart.

The words beside a call are left out. Agent and teachers write them in different manners, so they would
tell whose side it is; and nothing shows which words are better. For the same reason a label that is
optional is left out, and one that the schema requires is made from what the call does.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from replay_pipeline.actions.canonical import Action, Call, MalformedCallError, canonical_action
from replay_pipeline.actions.paths import absolute, relative
from replay_pipeline.actions.tools import SPECS, ToolSpec, spec_of
from replay_pipeline.types import Message, Tool

_LABEL_WORDS = 5
_ABSOLUTE = re.compile(r"\babsolute\b", re.IGNORECASE)
_RELATIVE = re.compile(r"\brelative\b", re.IGNORECASE)
_EITHER = re.compile(r"absolute or relative|relative or absolute", re.IGNORECASE)
_encode = msgspec.json.Encoder().encode


class NativeForm:
    """How calls are written at one state: by the schemas of its tools, its folder and its history.

    Args:
        messages: the prompt; its calls show what the session's habit is.
        tools: tools on offer.
        cwd: folder that relative paths are read against; without one, paths stay as they are.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        cwd: str | None = None,
    ) -> None:
        self._messages, self._cwd = messages, cwd
        self._schemas = dict(map(_schema_of, tools or ()))
        self._history: dict[str, list[dict[str, Any]]] = {}

    def message(self, action: Action) -> Message:
        """Return the assistant message of a canonical action, which it is the canonical form of.

        An action that cannot run stays in canonical form.
        """
        message = action.to_message()
        if not (action.is_valid and action.calls):
            return message
        calls = [
            {**shown, "function": {"name": call.name, "arguments": self._arguments(call)}}
            for shown, call in zip(message["tool_calls"], action.calls, strict=True)
        ]
        return {**message, "tool_calls": calls}

    def rendered(self, message: Message) -> Message:
        """Return a message of the assistant with its calls in native form, any other as it is."""
        action = canonical_action(message, cwd=self._cwd)
        is_ours = action.is_valid and action.calls and message["role"] == "assistant"
        return self.message(action) if is_ours else message

    def _arguments(self, call: Call) -> str:
        shown = call.shown()
        try:
            given = msgspec.json.decode(shown)
        except (msgspec.DecodeError, UnicodeEncodeError):  # half of a surrogate pair
            return shown
        schema, spec = self._schemas.get(call.name, {}), spec_of(call.name)
        values = {
            key: self._path(call.name, key, value)
            if key in spec.paths and isinstance(value, str)
            else value
            for key, value in given.items()
        }
        values |= self._added(call, values, schema, spec)
        return _encode({key: values[key] for key in self._ordered(call.name, values)}).decode()

    def _added(
        self, call: Call, values: Mapping[str, Any], schema: Mapping[str, Any], spec: ToolSpec
    ) -> dict[str, Any]:
        """Return what the canonical form leaves out and the client needs, or the session always writes."""
        properties = schema.get("properties") or {}
        required = [key for key in schema.get("required") or () if key not in values]
        usual = [
            key
            for key in (*spec.defaults, *filter(None, [spec.default_path]))
            if key not in values and (not properties or key in properties)
        ]
        added: dict[str, Any] = {}
        for key in (*required, *(key for key in usual if self._is_usual(call.name, key))):
            if key == spec.default_path and self._cwd:
                added[key] = self._path(call.name, key, ".")
            elif key in spec.defaults:
                default = spec.defaults[key]
                added[key] = default[0] if isinstance(default, list) else default
            elif key in spec.labels:
                added[key] = _label(values)
            elif "default" in properties.get(key, {}):
                added[key] = properties[key]["default"]
        return added

    def _ordered(self, tool: str, values: Mapping[str, Any]) -> list[str]:
        """Return the keys in the order of the schema, then of the history, then of the alphabet."""
        known = self._schemas.get(tool, {}).get("properties") or {}
        habit = {} if values.keys() <= known.keys() else dict.fromkeys(self._keys_written(tool))
        first = dict.fromkeys([*known, *habit])
        return [key for key in first if key in values] + sorted(values.keys() - first.keys())

    def _keys_written(self, tool: str) -> Iterator[str]:
        return (key for given in self._calls_of(tool) for key in given)

    def _path(self, tool: str, key: str, path: str) -> str:
        if self._cwd is None:
            return path
        convert = absolute if self._wants_absolute(tool, key) else relative
        return convert(path, self._cwd)

    def _wants_absolute(self, tool: str, key: str) -> bool:
        """Return whether the tool says so; else whether the session mostly writes its paths so."""
        schema = (self._schemas.get(tool, {}).get("properties") or {}).get(key) or {}
        told = str(schema.get("description") or "")
        if _EITHER.search(told) is None and (
            said := _ABSOLUTE.search(told) or _RELATIVE.search(told)
        ):
            return said.re is _ABSOLUTE
        written = [given[key] for given in self._calls_of(tool) if _is_path(given.get(key))]
        if not written:
            written = [
                given[name]
                for other, spec in SPECS.items()
                for name in spec.paths
                for given in self._calls_of(other)
                if _is_path(given.get(name))
            ]
        n_absolute = sum(path.startswith("/") for path in written)
        return 2 * n_absolute >= len(written)

    def _is_usual(self, tool: str, key: str) -> bool:
        """Return whether most calls of the history have the argument."""
        calls = self._calls_of(tool)
        return bool(calls) and 2 * sum(key in given for given in calls) > len(calls)

    def _calls_of(self, tool: str) -> list[dict[str, Any]]:
        if not self._history:
            self._history = {"": []}
            for message in self._messages:
                for call in message.get("tool_calls") or ():
                    function = call.get("function") or {}
                    given = _decoded(function.get("arguments"))
                    self._history.setdefault(str(function.get("name")), []).append(given)
        return self._history.get(tool, [])


def _schema_of(tool: Tool) -> tuple[str, dict[str, Any]]:
    function = tool.get("function", tool)
    schema = function.get("parameters") or function.get("input_schema") or {}
    return str(function.get("name")), schema if isinstance(schema, dict) else {}


def _decoded(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, MalformedCallError, UnicodeEncodeError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _label(values: Mapping[str, Any]) -> str:
    """Make a label of the first words of what a call says."""
    texts = (values.get(key) for key in ("prompt", "command", "query", "pattern", "file_path"))
    text = next((each for each in texts if isinstance(each, str) and each.strip()), "")
    return " ".join(text.split()[:_LABEL_WORDS])
