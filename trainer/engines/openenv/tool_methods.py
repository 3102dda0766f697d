"""Turn JSON schemas of tools into Python methods, from which TRL makes the model's tool list.

A parameter whose name isn't valid in Python (`-A`, `class`) gets another one (`_A`, `class_`).
Calls are translated back, and accept the original name too.
"""

import functools
import inspect
import keyword
import operator
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from trainer.errors import TrainerConfigError

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "null": type(None),
}
RESERVED = frozenset({"reset", "get_reward"})

ToolCaller = Callable[[Any, str, dict[str, Any]], str]
"""A function from an environment, a tool's name, and its arguments to the tool's answer."""


def tool_method(
    name: str, description: str, schema: Mapping[str, Any], call: ToolCaller
) -> Callable[..., str]:
    """Make a method that passes its arguments to `call`, with the signature of `schema`.

    Raises:
        TrainerConfigError: TRL would hide a tool with this name from the model.
    """
    if name in RESERVED or name.startswith("_") or not name:
        raise TrainerConfigError(f"TRL does not offer a tool called {name!r} to a model: rename it")
    properties = dict(schema.get("properties") or {})
    required = set(schema.get("required") or ())
    python_names = _python_names(properties)

    def method(self: Any, **arguments: Any) -> str:
        original = {python_names.get(key, key): value for key, value in arguments.items()}
        return call(self, name, original)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    annotations: dict[str, Any] = {}
    lines = [" ".join(description.split()) or name, "", "Args:"]
    # Parameters without a default come first, as Python wants it.
    for python_name in sorted(python_names, key=lambda key: python_names[key] not in required):
        original = python_names[python_name]
        hint = _hint(properties[original])
        is_required = original in required
        annotations[python_name] = hint
        parameters.append(
            inspect.Parameter(
                python_name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if is_required else None,
                annotation=hint,
            )
        )
        lines.append(f"    {python_name}: {_description(properties[original], original)}")
    method.__name__ = method.__qualname__ = name
    method.__doc__ = "\n".join(lines if properties else lines[:1])
    method.__annotations__ = {**annotations, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return method


def _python_names(properties: Mapping[str, Any]) -> dict[str, str]:
    """Map Python names to original names, each once."""
    names: dict[str, str] = {}
    for original in properties:
        name = re.sub(r"\W", "_", original) or "_"
        if name[0].isdigit():
            name = f"_{name}"
        while keyword.iskeyword(name) or name == "self" or name in names:
            name += "_"
        names[name] = original
    return names


def _description(schema: Any, original: str) -> str:
    """Put a description on one line: an end of line ends a parameter, `choices` would be parsed."""
    text = schema.get("description") if isinstance(schema, Mapping) else None
    words = " ".join(str(text or original).split())
    return re.sub(r"\(choices:", "(one of:", words, flags=re.IGNORECASE)


def _hint(schema: Any) -> Any:
    """Return the Python type of a schema; what Python cannot say is any value."""
    if not isinstance(schema, Mapping):
        return Any
    if values := schema.get("enum"):
        is_plain = all(isinstance(value, str | int | bool | None) for value in values)
        return typing.Literal.__getitem__(tuple(values)) if is_plain else Any  # type: ignore[attr-defined]
    for key in ("anyOf", "oneOf"):
        if options := schema.get(key):
            return _either([_hint(option) for option in options])
    kind = schema.get("type")
    if isinstance(kind, list):
        return _either([_hint({**schema, "type": one}) for one in kind])
    if kind == "array":
        item = _hint(schema.get("items"))
        return list if item is Any else list[item]
    return _TYPES.get(str(kind), Any)


def _either(hints: list[Any]) -> Any:
    return Any if Any in hints else functools.reduce(operator.or_, hints)
