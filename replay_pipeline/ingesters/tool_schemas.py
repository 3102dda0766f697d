"""Tool definitions, learned from the calls in the corpus.

Session logs don't record the tools that the model was offered. So their JSON schemas are inferred
from the recorded arguments. Teachers then get a real `tools` list and answer in the same form as
the agent.
"""

import logging
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.json_lines import UNREADABLE
from replay_pipeline.types import Tool

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_MAX_DEPTH = 6
_MAX_PROPERTIES = 40
"""An object with more different keys is a map, not a record."""

_KNOWN_TOOLS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("known_tools.toml").read_text("utf-8")
)
_LABELS = {tool: frozenset(names) for tool, names in _KNOWN_TOOLS["labels"].items()}


@dataclass(slots=True)
class _ValueShape:
    """All values seen at one place."""

    n: int = 0
    types: set[str] = field(default_factory=set)
    properties: dict[str, "_ValueShape"] = field(default_factory=dict)
    n_objects: int = 0
    is_map: bool = False
    items: "_ValueShape | None" = None

    def see(self, value: Any, depth: int = 0, n: int = 1) -> None:
        """Learn from `n` values that have the types of `value`."""
        self.n += n
        kind = _JSON_TYPES[type(value)]
        self.types.add(kind)
        if depth >= _MAX_DEPTH:
            return
        if kind == "object":
            self.n_objects += n
            for key, inner in value.items():
                if self.is_map:
                    break
                shape = self.properties.get(key)
                if shape is None:
                    shape = self.properties[key] = _ValueShape()
                shape.see(inner, depth + 1, n)
            if len(self.properties) > _MAX_PROPERTIES:
                self.is_map, self.properties = True, {}
        elif kind == "array":
            self.items = self.items or _ValueShape()
            for inner in value:
                self.items.see(inner, depth + 1, n)

    def schema(self, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
        types = set(self.types)
        if "number" in types:
            types.discard("integer")
        schema: dict[str, Any] = {}
        if types:
            schema["type"] = min(types) if len(types) == 1 else sorted(types)
        if "object" in types and not self.is_map:
            schema["properties"] = {k: self.properties[k].schema() for k in sorted(self.properties)}
            required = [
                key
                for key in sorted(self.properties)
                if key not in optional and self._is_required(key)
            ]
            if required:
                schema["required"] = required
        if "array" in types and self.items is not None and self.items.n:
            schema["items"] = self.items.schema()
        return schema

    def _is_required(self, key: str) -> bool:
        # Seen in every call of a sample that is large enough to believe it.
        return self.properties[key].n == self.n_objects >= 3


_JSON_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def series_of(version: str | None) -> str:
    """Return the release series of a version, such as `2.1` for `2.1.38`."""
    return ".".join((version or "").split(".")[:2])


_NEWEST = (999, 0)


def _number(series: str) -> tuple[int, int]:
    try:
        major, minor = series.split(".")
        return int(major), int(minor)
    except ValueError:
        return _NEWEST


@cache
def offered_tools(series: str) -> dict[str, Tool]:
    """Return the tools of Claude Code in a release series, by name. For an unknown series, the newest one's.

    The list is fixed and not learned, so requests keep their hashes when more sessions are read.
    """
    version = _number(series)
    return {
        name: tool
        for name, tool in known_tools().items()
        if _number(_SPANS[name].get("since", "0.0")) <= version
        and version <= _number(_SPANS[name].get("until", ""))
    }


_SPANS: dict[str, Any] = {each["name"]: each for each in _KNOWN_TOOLS["claude_code"]}


@cache
def known_tools() -> dict[str, Tool]:
    """Return the tools of Claude Code in any release series, by name."""
    return {
        name: {
            "type": "function",
            "function": {
                "name": name,
                "description": each["description"],
                "parameters": {
                    "type": "object",
                    "properties": each.get("properties", {}),
                    "required": each.get("required", []),
                },
            },
        }
        for name, each in _SPANS.items()
    }


_FlatCall = tuple[str, str | None, tuple[str, ...], tuple[type, ...]]
"""Tool, version, and the keys and types of arguments without inner objects or lists."""


class ToolLearner:
    """Infers one definition per tool and release series from calls."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, str], _ValueShape] = {}
        self._flat: Counter[_FlatCall] = Counter()
        self._recorded: dict[str, Tool] = {}

    def see(self, name: str, arguments: str, version: str | None) -> None:
        """Learn from one call whose arguments the client accepted."""
        try:
            value = msgspec.json.decode(arguments)
        except UNREADABLE:
            return
        if not isinstance(value, dict):
            return
        types = tuple(map(type, value.values()))
        if dict in types or list in types:
            self._learn(name, version, value)
        else:
            self._flat[name, version, tuple(value), types] += 1

    def _learn_flat(self) -> None:
        """Most calls of a tool have the same few keys: each form is learnt once."""
        for (name, version, keys, types), n in self._flat.items():
            self._learn(name, version, {k: t() for k, t in zip(keys, types, strict=True)}, n)
        self._flat.clear()

    def _learn(self, name: str, version: str | None, value: dict[str, Any], n: int = 1) -> None:
        if _NAME.fullmatch(name):
            self._shapes.setdefault((name, series_of(version)), _ValueShape()).see(value, n=n)

    def record(self, tool: Tool) -> None:
        """Add a definition from the log itself. It replaces an inferred one."""
        name = tool["function"]["name"]
        if _NAME.fullmatch(name):
            self._recorded.setdefault(name, _with_parameters(tool))
            self._shapes.setdefault((name, ""), _ValueShape())

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of the `tools` table, sorted by name and series."""
        self._learn_flat()
        rows = []
        for (name, series), shape in sorted(self._shapes.items()):
            inferred = _tool(name, shape.schema(_LABELS.get(name, frozenset())))
            tool = self._recorded.get(name) or inferred
            rows.append(
                {
                    "name": name,
                    "agent_version": series,
                    "n_calls": shape.n,
                    "source": "recorded" if name in self._recorded else "inferred",
                    "tool_json": msgspec.json.encode(tool, order="sorted").decode(),
                }
            )
        return rows


def _with_parameters(tool: Tool) -> Tool:
    function = {"description": "", "parameters": {}, **tool["function"]}
    if not isinstance(function["parameters"], dict):
        function["parameters"] = {}
    return {"type": "function", "function": function}


def _tool(name: str, parameters: dict[str, Any]) -> Tool:
    parameters.setdefault("type", "object")
    parameters.setdefault("properties", {})
    description = _KNOWN_TOOLS["descriptions"].get(name) or f"Tool {name}."
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def merge_schemas(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that accepts everything that either of the two accepts."""
    types = _types(a) | _types(b)
    if "number" in types:
        types.discard("integer")
    merged: dict[str, Any] = {}
    if types and _types(a) and _types(b):
        merged["type"] = min(types) if len(types) == 1 else sorted(types)
    if "properties" in a and "properties" in b:
        left, right = a["properties"], b["properties"]
        merged["properties"] = {
            key: merge_schemas(left[key], right[key])
            if key in left and key in right
            else left.get(key) or right.get(key) or {}
            for key in sorted({*left, *right})
        }
        both = sorted(set(a.get("required", ())) & set(b.get("required", ())))
        if both:
            merged["required"] = both
    elif "properties" in a or "properties" in b:
        only, other = (a, b) if "properties" in a else (b, a)
        if "object" not in _types(other):
            merged["properties"] = only["properties"]
            if "required" in only:
                merged["required"] = only["required"]
    if "items" in a and "items" in b:
        merged["items"] = merge_schemas(a["items"], b["items"])
    elif "items" in a or "items" in b:
        only, other = (a, b) if "items" in a else (b, a)
        if "array" not in _types(other):
            merged["items"] = only["items"]
    return merged


def _types(schema: dict[str, Any]) -> set[str]:
    kind = schema.get("type")
    return set(kind) if isinstance(kind, list) else {kind} if kind else set()


def merge_tools(tools: Iterable[Tool]) -> Tool:
    """Merge several inferred definitions of one tool.

    Raises:
        ValueError: there is no tool to merge.
    """
    merged: Tool | None = None
    for tool in tools:
        if merged is None:
            merged = tool
            continue
        function = merged["function"]
        parameters = merge_schemas(
            function.get("parameters", {}), tool["function"].get("parameters", {})
        )
        merged = {"type": "function", "function": {**function, "parameters": parameters}}
    if merged is None:
        raise ValueError("merge_tools needs at least one tool")
    return merged
