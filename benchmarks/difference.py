"""Name what two actions differ in, from the actions and the schemas of their tools.

Whether an action that differs from a right one is wrong depends on what it differs in. Among real models, of
two answers that differ in an argument that spells out its documented default both are right as a rule, and of
two that call different functions hardly ever (`real_models.py`).
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from replay_pipeline.actions.canonical import Action, Call
from replay_pipeline.actions.edits import perfect_matching
from replay_pipeline.types import Tool

DifferenceKind = Literal[
    "default",
    "form",
    "contains",
    "text",
    "list",
    "optional",
    "value",
    "number",
    "tool",
    "calls",
    "words",
    "turn",
    "missing",
]
"""What two actions differ in at most, in the order of how much it tells:

- `default`: only in arguments that spell out their documented default
- `form`: in case, punctuation, or spelling out the same value in another type
- `contains`: one text contains the other
- `text`: another text in the same argument
- `list`: other items in a list or object
- `optional`: an optional argument that only one of them gives
- `value`: another value of another type, or another choice of an enumeration
- `number`: another number
- `tool`: another tool
- `calls`: more or fewer calls
- `words`: other words, without a call
- `turn`: one answers in words, the other calls a tool
- `missing`: a required argument that only one of them gives
"""
KINDS: tuple[DifferenceKind, ...] = get_args(DifferenceKind)
IN_WORDS: Mapping[DifferenceKind, str] = {
    "default": "differs only in an argument that is the default",
    "form": "differs only in how a value is written",
    "contains": "one text contains the other",
    "text": "another text in the same argument",
    "list": "other items in a list",
    "optional": "an optional argument that only one gives",
    "value": "another value",
    "number": "another number",
    "tool": "another tool",
    "calls": "more or fewer calls",
    "words": "other words",
    "turn": "words instead of a call",
    "missing": "a required argument is missing",
}

_RANK = {kind: rank for rank, kind in enumerate(KINDS)}
_DEFAULT_SAID = re.compile(
    r"\bdefaults?\b(?:\s+(?:value|is|to|of|are))*\W{0,4}(?P<value>[^.;,)\n]+)", re.I
)


def difference(a: Action, b: Action, tools: Sequence[Tool] = ()) -> DifferenceKind | None:
    """Return the kind of the largest difference of two actions, or None if they are the same.

    The result is symmetric in `a` and `b`.

    Args:
        a: a valid action.
        b: the other one.
        tools: the tools of the state, whose schemas tell defaults and what is required.
    """
    if not a.calls or not b.calls:
        if a.calls or b.calls:
            return "turn"
        return None if a.text == b.text else "words"
    if len(a.calls) != len(b.calls):
        return "calls"
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    ranks = [
        [
            -1 if (kind := _of_calls(ours, theirs, schemas)) is None else _RANK[kind]
            for theirs in b.calls
        ]
        for ours in a.calls
    ]
    # Calls may stand in another order: the matching whose largest difference is least.
    for most in sorted({rank for row in ranks for rank in row}):
        edges = [[n for n, rank in enumerate(row) if rank <= most] for row in ranks]
        if perfect_matching(edges, len(b.calls)) is not None:
            return None if most < 0 else KINDS[most]
    return "calls"


def _of_calls(a: Call, b: Call, schemas: Mapping[str, Any]) -> DifferenceKind | None:
    if a.name != b.name:
        return "tool"
    ours, theirs = a.values(), b.values()
    schema = schemas.get(a.name) or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    kinds: list[DifferenceKind] = []
    for name in ours.keys() | theirs.keys():
        about = properties.get(name) if isinstance(properties.get(name), dict) else {}
        if name in ours and name in theirs:
            kinds += [kind] if (kind := _of_values(ours[name], theirs[name], about)) else []
        elif _is_default(ours.get(name, theirs.get(name)), about):
            kinds.append("default")
        else:
            kinds.append("missing" if name in required else "optional")
    return max(kinds, key=_RANK.__getitem__, default=None)


def _is_default(value: Any, about: Mapping[str, Any]) -> bool:
    if "default" in about and _plain(value) == _plain(about["default"]):
        return True
    said = _DEFAULT_SAID.search(str(about.get("description") or ""))
    return said is not None and _plain(value) == _plain(said["value"].strip("'\"` "))


def _of_values(a: Any, b: Any, about: Mapping[str, Any]) -> DifferenceKind | None:
    if a == b and type(a) is type(b):
        return None
    if _plain(a) == _plain(b):
        return "form"
    if isinstance(a, str) and isinstance(b, str):
        if about.get("enum"):
            return "value"
        ours, theirs = _plain(a), _plain(b)
        return "contains" if ours and theirs and (ours in theirs or theirs in ours) else "text"
    if _is_number(a) and _is_number(b):
        return "number"
    if isinstance(a, list | dict) and isinstance(b, list | dict):
        return "list"
    return "value"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    """Return a value without what is only its form: case, punctuation, and the type of a number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    folded = unicodedata.normalize("NFKC", text).casefold()
    # A sign or a decimal point is no punctuation.
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w.\-+]|_|(?<!\W)[-+]|[-+](?!\d)", "", folded)
