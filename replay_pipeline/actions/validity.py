"""Whether a call fits the tools that were on offer."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jsonschema
import msgspec
from jsonschema.exceptions import SchemaError as BadSchemaError

from replay_pipeline.types import Tool


class ToolList:
    """The tools on offer at a state, ready to judge calls. Build once, use for many calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas: dict[str, bytes] = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or function.get("input_schema") or {}
            self._schemas[str(function.get("name"))] = msgspec.json.encode(parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def complaint(self, name: str, arguments: str) -> str | None:
        """What is wrong with the JSON `arguments` for tool `name`; `None` if nothing."""
        return _complaint(self._schemas[name], arguments)


@lru_cache(maxsize=512)
def _validator(schema: bytes) -> Any:
    decoded = msgspec.json.decode(schema)
    kind = jsonschema.validators.validator_for(decoded, jsonschema.Draft202012Validator)
    try:
        kind.check_schema(decoded)
    except BadSchemaError:
        # A broken schema says nothing about the call.
        return jsonschema.Draft202012Validator({})
    return kind(decoded)


@lru_cache(maxsize=8_192)
def _complaint(schema: bytes, arguments: str) -> str | None:
    for error in _validator(schema).iter_errors(json.loads(arguments)):
        place = ".".join(map(str, error.absolute_path)) or "arguments"
        return f"{place} fail {error.validator!r}: {error.message:.200}"
    return None
