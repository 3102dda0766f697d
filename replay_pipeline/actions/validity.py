"""Check a call against the available tools."""

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import msgspec

from replay_pipeline.actions.tools import SPECS
from replay_pipeline.types import Tool


class ToolList:
    """The available tools at a state. Build it once, and use it to judge many calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas: dict[str, bytes] = {}
        for tool in tools:
            function = tool.get("function", tool)
            name = str(function.get("name"))
            parameters = function.get("parameters") or function.get("input_schema") or {}
            self._schemas[name] = msgspec.json.encode(_demanded(name, parameters))

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def complaint(self, name: str, arguments: str) -> str | None:
        """Return the error in `arguments` for the tool `name`, or `None` if they are valid.

        A null counts as absent.
        """
        return _complaint(self._schemas[name], arguments)


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
