"""The meaning of each tool's arguments for agreement. The facts are in `tools.toml`.

For a tool that isn't listed there (from an MCP server or a later version), every key of the
canonical arguments counts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module, resources
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from replay_pipeline.types import Tool

Arguments = dict[str, Any]
Kind = Literal["string", "number", "boolean", "array"]
Reach = Literal["nothing", "look", "object", "anything"]
"""What a call can see or change: nothing that other calls touch, anything by looking, the one
object that it names, or anything by changing."""

_TYPES: dict[Kind, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "array": list,
}


class ToolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to read the arguments of one tool. The head of the data file explains each key."""

    required: dict[str, Kind] = {}
    optional: dict[str, Kind] = {}
    parts: dict[str, dict[str, Kind]] = {}
    labels: frozenset[str] = frozenset()
    defaults: dict[str, Any] = {}
    paths: tuple[str, ...] = ()
    default_path: str | None = None
    display: frozenset[str] = frozenset()
    target: tuple[str, ...] = ()
    prose: frozenset[str] = frozenset()
    reach: Reach | None = None

    def complaint(self, arguments: Arguments) -> str | None:
        """Return why the tool can't run with these arguments, or None if it can."""
        for key, kind in self.required.items():
            if key not in arguments:
                return f"{key} is missing"
            if type(arguments[key]) is not _TYPES[kind] and not _has_type(arguments[key], kind):
                return f"{key} has the wrong type"
        for key, kind in self.optional.items():
            if key in arguments and not _has_type(arguments[key], kind):
                return f"{key} has the wrong type"
        for key, needed in self.parts.items():
            for part in arguments[key]:
                if not isinstance(part, dict) or not all(
                    _has_type(part.get(name), kind) for name, kind in needed.items()
                ):
                    return f"one of {key} lacks {' or '.join(needed)}"
        return None


def _has_type(value: Any, kind: Kind) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def without_defaults_inside(arguments: Arguments) -> Arguments:
    """Remove nulls and explicit defaults from the edits of a MultiEdit."""
    if not isinstance(edits := arguments.get("edits"), list):
        return arguments
    plain = [
        {k: v for k, v in edit.items() if v is not None and (k, v) != ("replace_all", False)}
        for edit in edits
    ]
    return {**arguments, "edits": plain}


def with_one_url(arguments: Arguments) -> Arguments:
    """Normalize the scheme, host, default port, and empty path of the URL."""
    try:
        parts = urlsplit(arguments["url"].strip())
        host = (parts.hostname or "").lower()
        port = parts.port
    except ValueError:
        return arguments
    if not host or parts.username or ":" in host:
        return arguments
    if port and (parts.scheme, port) not in (("http", 80), ("https", 443)):
        host = f"{host}:{port}"
    url = urlunsplit((parts.scheme, host, parts.path or "/", parts.query, parts.fragment))
    return {**arguments, "url": url}


SPECS = msgspec.toml.decode(
    (resources.files("replay_pipeline.actions") / "tools.toml").read_bytes(),
    type=dict[str, ToolSpec],
)
"""Claude Code's tools by name."""
_DEFAULT = ToolSpec(target=("file_path", "path", "notebook_path", "uri", "url"))
_FAMILIES = {"MultiEdit": "Edit"}


def spec_of(name: str) -> ToolSpec:
    """Return how to read the arguments of the tool `name`."""
    return SPECS.get(name, _DEFAULT)


def family_of(name: str) -> str:
    """Return the tool that `name` counts as. Edit and MultiEdit count as one."""
    return _FAMILIES.get(name, name)


class ToolList:
    """The available tools at a state. Build it once, and use it to judge many calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas: dict[str, bytes] = {}
        self.looking: dict[str, bool] = {}
        """Whether a foreign tool only looks, where its annotations say so (`readOnlyHint`)."""
        for tool in tools:
            function = tool.get("function", tool)
            name = str(function.get("name"))
            parameters = function.get("parameters") or function.get("input_schema") or {}
            hints = function.get("annotations") or tool.get("annotations") or {}
            if name not in SPECS and isinstance(hint := hints.get("readOnlyHint"), bool):
                self.looking[name] = hint
            self._schemas[name] = msgspec.json.encode(_demanded(name, parameters))

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def complaint(self, name: str, arguments: str) -> str | None:
        """Return the error in `arguments` for the tool `name`, or `None` if they are valid.

        A null counts as absent.
        """
        return _complaint(self._schemas[name], arguments)

    def plain(self, name: str, arguments: str) -> str | None:
        """Return canonical arguments without what the schema says makes no difference, or None if it says nothing.

        That is a documented default that is spelled out, and the order of a list without one.
        """
        return None if name in SPECS else _plain_arguments(self._schemas[name], arguments)


_DEFAULT_SAID = re.compile(
    r"\bdefaults?\b(?:\s+(?:value|is|to|of|are))*\W{0,4}(?P<value>(?:[^.;,)\n]|\.(?=\d))+)", re.I
)
_NO_ORDER = re.compile(
    r"\border (?:does not|doesn't) matter\b|\bin any order\b|\bunordered\b", re.I
)


def is_default(value: Any, about: Mapping[str, Any]) -> bool:
    """Return whether a value is the one that the schema of its argument, or its description, names as the default."""
    if "default" in about:
        default = about["default"]
        return default == value and isinstance(default, bool) == isinstance(value, bool)
    said = _DEFAULT_SAID.search(str(about.get("description") or ""))
    if said is None or isinstance(value, dict | list):
        return False
    text = value if isinstance(value, str) else json.dumps(value)
    return text.casefold() == said["value"].strip("'\"`“”‘’ ").casefold()


@lru_cache(maxsize=8_192)
def _plain_arguments(schema: bytes, arguments: str) -> str | None:
    properties = msgspec.json.decode(schema).get("properties")
    if not isinstance(properties, dict):
        return None
    kept: Arguments = {}
    for key, value in json.loads(arguments).items():
        about = properties.get(key)
        if not isinstance(about, dict):
            about = {}
        if is_default(value, about):
            continue
        told = str(about.get("description") or "")
        is_set = isinstance(value, list) and (about.get("uniqueItems") or _NO_ORDER.search(told))
        kept[key] = sorted(value, key=repr) if is_set else value
    return json.dumps(kept, sort_keys=True)


def _demanded(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without demands that the tool itself does not make.

    A schema inferred from recorded calls calls every key required that each of them had, a mere
    label included.
    """
    required = parameters.get("required")
    if name not in SPECS or not isinstance(required, list):
        return parameters
    needed = [key for key in required if key in SPECS[name].required]
    return {**parameters, "required": needed}


@lru_cache(maxsize=512)
def _validator(schema: bytes) -> Any:
    jsonschema = import_module("jsonschema")  # slow, and `status` judges no call
    decoded = msgspec.json.decode(schema)
    kind = jsonschema.validators.validator_for(decoded, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(decoded)
    except jsonschema.SchemaError:
        # A broken schema says nothing about the call.
        return jsonschema.Draft202012Validator({})
    return kind(decoded)


@lru_cache(maxsize=8_192)
def _complaint(schema: bytes, arguments: str) -> str | None:
    given = json.loads(arguments) or {}
    present = {key: value for key, value in given.items() if value is not None}
    for error in _validator(schema).iter_errors(present):
        place = ".".join(map(str, error.absolute_path)) or "arguments"
        return f"{place} fail {error.validator!r}: {error.message:.200}"
    return None
