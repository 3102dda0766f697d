"""The native form of an action: calls in the form that the client expects.

The canonical form is for comparing actions, so it leaves out what makes no difference. A client
needs more: its tools want absolute paths, and required arguments such as a description. So
published and trained actions are rendered from the canonical form. Both sides of a pair get the
same spelling, so that spelling can't tell them apart.

Text next to a call is left out. Agent and teachers write it in different styles, so it would reveal
whose side it is, and nothing shows which text is better. Optional labels are left out for the same
reason. A required label is made from what the call does.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from replay_pipeline.actions.canonical import Action, Call, MalformedCallError, canonical_action
from replay_pipeline.actions.paths import absolute, is_absolute, relative, spelled
from replay_pipeline.actions.tools import SPECS, ToolSpec, spec_of
from replay_pipeline.types import Message, Tool

_LABEL_WORDS = 5
_ABSOLUTE = re.compile(r"\babsolute\b", re.IGNORECASE)
_RELATIVE = re.compile(r"\brelative\b", re.IGNORECASE)
_EITHER = re.compile(r"absolute or relative|relative or absolute", re.IGNORECASE)
_encode = msgspec.json.Encoder().encode


class NativeForm:
    """The form of calls at one state, which follows from its tool schemas, its folder, and its history.

    Args:
        messages: the prompt. Its calls show the session's habits.
        tools: the available tools.
        cwd: folder that relative paths are read against. Without one, paths don't change.
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
        """Return an assistant message whose canonical form is this action.

        An action that can't run stays in canonical form.
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
        return spelled(convert(path, self._cwd), self._cwd, sep=self._separator)

    @cached_property
    def _separator(self) -> str:
        """What stands between folders on a drive: as the session writes it, else as its folder has it."""
        written = [
            given[name]
            for other, spec in SPECS.items()
            for name in spec.paths
            for given in self._calls_of(other)
            if _is_path(given.get(name)) and is_absolute(given[name])
        ]
        shown = written or [self._cwd or ""]
        return "\\" if 2 * sum("\\" in path for path in shown) >= len(shown) else "/"

    def _wants_absolute(self, tool: str, key: str) -> bool:
        """Return whether the tool says so; else whether the session mostly writes its paths so.

        Where neither tells, a path is written in full if the prompt shows the folder: nobody could
        write a folder that isn't there to read.
        """
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
        if not written:
            return any(str(self._cwd) in str(m.get("content") or "") for m in self._messages)
        return 2 * sum(map(is_absolute, written)) >= len(written)

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
