"""The parts of a call that must be equal for two calls to agree, and what it can see or change."""

import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from replay_pipeline.actions.canonical import Action, Call
from replay_pipeline.actions.consequences import (
    Consequence,
    acts_in_code,
    acts_in_lines,
    consequence_of_tool,
)
from replay_pipeline.actions.edits import Edit, edits_of
from replay_pipeline.actions.paths import absolute, identity
from replay_pipeline.actions.shell import ShellPlan, shell_plan
from replay_pipeline.actions.tools import (
    Reach,
    ToolSpec,
    family_of,
    spec_of,
    with_one_url,
)


class CallKeys(NamedTuple):
    """One call, read for comparison."""

    effect: Any
    """Equal for calls with the same effect."""
    target: Any
    """Equal for calls on the same object. `None` if the call has no object."""
    lines: tuple[float, float] | None = None
    """First and last line that a read or the end of a pipe shows, counted from 1."""
    edits: tuple[Edit, ...] | None = None
    """Replacements of an edit, in order."""


def keys_of(call: Call) -> CallKeys:
    """Return the keys of a valid call. They are computed once and stored with the call."""
    keys: CallKeys | None = call.keys
    if keys is None:
        keys = _read_keys(call)
        object.__setattr__(call, "keys", keys)  # a memo of a frozen call: no part of its value
    return keys


@lru_cache(maxsize=16_384)
def _read_keys(call: Call) -> CallKeys:
    arguments = call.values()
    if call.name == "Bash":
        plan = shell_plan(arguments.pop("command"), call.cwd)
        for key in spec_of("Bash").display:
            arguments.pop(key, None)
        return CallKeys((plan.effect, _items(arguments)), plan.target, plan.shown)
    spec = spec_of(call.name)
    for path in spec.paths:
        if isinstance(arguments.get(path), str):
            arguments[path] = identity(absolute(arguments[path], call.cwd))
    if call.name == "WebFetch":
        arguments = with_one_url(arguments)
    target = _target(call.name, spec, arguments)
    if family_of(call.name) == "Edit":
        return CallKeys(None, target, edits=edits_of(arguments))
    lines = None
    if call.name == "Read":
        first = arguments.pop("offset", 1) or 1
        lines = (first, first + arguments.pop("limit", 2_000) - 1)
    for key in spec.display:
        arguments.pop(key, None)
    for key in spec.prose:
        if isinstance(prose := arguments.get(key), str):
            arguments[key] = " ".join(prose.split())
    return CallKeys(_items(arguments), target, lines)


def _target(name: str, spec: ToolSpec, arguments: dict[str, Any]) -> Any:
    if name in ("Grep", "Glob"):
        # The place searched, or for a search of everything what is looked for.
        key = "path" if "path" in arguments else "pattern"
        return key, arguments[key]
    return (
        tuple((key, _hashable(arguments[key])) for key in spec.target if key in arguments) or None
    )


def _items(arguments: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, _hashable(value)) for key, value in sorted(arguments.items()))


def _hashable(value: Any) -> Any:
    """Return `value` as a key that keeps true, 1 and "True" apart."""
    return ("json", repr(value)) if isinstance(value, dict | list | bool | float) else value


def reach_of(call: Call) -> Reach:
    """Return whether a valid call only looks, or what it may change."""
    if call.only_looks is not None:
        return "look" if call.only_looks else "anything"
    if (reach := spec_of(call.name).reach) is not None:
        return reach
    found = consequence_of(call)
    return "look" if found.only_looks else "nothing" if found.is_note else "anything"


_HANDED = re.compile(
    r"\b(?:python3?|node|deno|ruby|perl|php|psql|mysql|mariadb|sqlite3|mongosh|redis-cli|ssh)\b[^|;&\n]*<<"
    r"|\|\s*(?:psql|mysql|mariadb|sqlite3|mongosh|redis-cli)\b"
)
"""Code or statements that a program gets from its input."""


@lru_cache(maxsize=16_384)
def consequence_of(call: Call) -> Consequence:
    """Return the consequence of a valid call, whatever its tool is."""
    if call.name != "Bash":
        return consequence_of_tool(call.name, call.values())
    plan, command = plan_of(call), call.values()["command"]
    acts = plan.acts
    if _HANDED.search(command):
        acts |= acts_in_code(command)
    if plan.target is None:
        acts |= acts_in_lines(command)
    return Consequence(plan.only_looks and not acts, acts, plan.keeps_files)


_CUT = re.compile(r"\s*(?:2>&1)?\s*(?:\|\s*(?:head|tail)\b[^|;&]*)?$")


def bare(command: str) -> str:
    """Return a command without what only shows less of its output, and with one name for an interpreter."""
    while (shorter := _CUT.sub("", command, count=1)) != command:
        command = shorter
    return re.sub(r"\b(python|pip)3\b", r"\1", " ".join(command.split()))


def purpose_of(action: Action) -> Literal["looks", "books"] | None:
    """Return whether an action only looks around or only keeps its own books; None of a consequence.

    What changes files, runs more than a look, asks the person, delegates, or ends the turn has a
    consequence, and so has each call of a tool that nobody knows.
    """
    if not action.calls or not action.is_valid:
        return None
    found = set(map(purpose_of_call, action.calls))
    return None if None in found else "looks" if "looks" in found else "books"


def purpose_of_call(call: Call) -> Literal["looks", "books"] | None:
    """Return whether one valid call only looks around or only keeps books; None of a consequence."""
    if call.only_looks is not None:
        return "looks" if call.only_looks else None
    found = consequence_of(call)
    if call.name != "Bash" and not found.is_listed and not call.name.startswith("mcp__"):
        return None
    return "looks" if found.only_looks else "books" if found.keeps_books else None


def plan_of(call: Call) -> ShellPlan:
    """Return the plan of the command in a valid call of Bash."""
    return shell_plan(call.values()["command"], call.cwd)


def depend(one: Call, other: Call) -> bool:
    """Return whether the order of two calls can matter.

    Two calls that only look never depend on each other, and neither do changes of different
    objects. A Read depends on changes of its file. Any other look may depend on every change.
    """
    reaches = {reach_of(one), reach_of(other)}
    if "nothing" in reaches or reaches == {"look"}:
        return False
    if "anything" in reaches:
        return True
    names_one = reaches == {"object"} or "Read" in (one.name, other.name)
    return not names_one or keys_of(one).target == keys_of(other).target
