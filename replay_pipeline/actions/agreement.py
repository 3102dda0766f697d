"""When are two actions the same next action? A wrong merge makes a false pair: in doubt, they differ."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from replay_pipeline.actions.assignment import has_perfect_matching
from replay_pipeline.actions.canonical import Action, Call, canonical_action
from replay_pipeline.actions.edits import Edit, are_same_change, edits_of
from replay_pipeline.actions.paths import absolute
from replay_pipeline.actions.shell import shell_plan
from replay_pipeline.actions.tools import family_of, spec_of
from replay_pipeline.types import AgreementLevel, Message

LEVELS: tuple[AgreementLevel, ...] = ("exact", "effect", "target", "tool")
"""From strict to loose."""

TextComparator = Callable[[str, str], bool]
"""Says whether two final texts mean the same."""

_STRICTNESS: dict[AgreementLevel | None, int] = {
    "exact": 4,
    "effect": 3,
    "target": 2,
    "tool": 1,
    None: 0,
}
_MAX_CALLS = 32
"""Actions with more calls agree only if they have the same calls."""


def agreement_level(
    a: Action | Message | str,
    b: Action | Message | str,
    *,
    same_text: TextComparator | None = None,
) -> AgreementLevel | None:
    """The strictest level at which two actions are the same next action; `None` if at none.

    Symmetric in `a` and `b`. An invalid action agrees with nothing, itself included.

    Args:
        a: An action, or an assistant message (read without a working directory).
        b: The other one.
        same_text: Judge of final texts that differ; agreement by it counts as `effect`.
    """
    a, b = _as_action(a), _as_action(b)
    if not (a.is_valid and b.is_valid) or bool(a.calls) != bool(b.calls):
        return None
    if not a.calls:
        return _text_level(a.text, b.text, same_text)
    if a.calls == b.calls:
        return "exact"
    if len(a.calls) == 1 == len(b.calls):
        return _call_level(a.calls[0], b.calls[0])
    return _set_level(a.calls, b.calls)


def agrees_at(level: AgreementLevel, found: AgreementLevel | None) -> bool:
    """Whether an agreement `found` is at least as strict as `level`."""
    return _STRICTNESS[found] >= _STRICTNESS[level]


def strictness(found: AgreementLevel | None) -> int:
    """4 for `exact` down to 1 for `tool`, 0 for no agreement."""
    return _STRICTNESS[found]


def _as_action(action: Action | Message | str) -> Action:
    return action if isinstance(action, Action) else canonical_action(action)


def _text_level(a: str, b: str, same_text: TextComparator | None) -> AgreementLevel | None:
    if a == b or _collapsed(a) == _collapsed(b):
        return "exact"
    if same_text is None:
        return None
    # In one order, so that the answer is the same both ways whatever the judge does.
    first, second = sorted((a, b))
    return "effect" if same_text(first, second) else None


def _collapsed(text: str) -> str:
    return " ".join(text.split())


def _call_level(a: Call, b: Call) -> AgreementLevel | None:
    family = family_of(a.name)
    if family != family_of(b.name):
        return None
    if a == b:
        return "exact"
    if family == "Edit":
        return _gathered_level((a,), (b,))
    if _key(a, "effect") == _key(b, "effect") or (
        a.name == b.name == "Read" and _reads_overlap(a, b)
    ):
        return "effect"
    target = _key(a, "target")
    return "target" if target is not None and target == _key(b, "target") else "tool"


def _set_level(a: tuple[Call, ...], b: tuple[Call, ...]) -> AgreementLevel | None:
    """The weakest level of the best one-to-one assignment, edits of one file gathered or not."""
    if len(a) == len(b) and Counter(a) == Counter(b) and not _edits_depend_on_order(a, b):
        return "exact"
    if max(len(a), len(b)) > _MAX_CALLS:
        return None
    ours, theirs = _gathered(a), _gathered(b)
    found: AgreementLevel | None = None
    if len(ours) == len(theirs):
        found = _best_assignment([[_gathered_level(x, y) for y in theirs] for x in ours])
    return found


def _best_assignment(levels: list[list[AgreementLevel | None]]) -> AgreementLevel | None:
    for level in LEVELS:
        edges = [[n for n, at in enumerate(row) if agrees_at(level, at)] for row in levels]
        if has_perfect_matching(edges, len(levels)):
            return level
    return None


def _edits_depend_on_order(a: tuple[Call, ...], b: tuple[Call, ...]) -> bool:
    """Whether edits of one file come in another order, which may give another file."""
    return [c for c in a if _is_edit(c)] != [c for c in b if _is_edit(c)]


def _gathered(calls: tuple[Call, ...]) -> list[tuple[Call, ...]]:
    """Each call alone, but the edits of one file together, in order."""
    groups: dict[Any, list[Call]] = {}
    for number, call in enumerate(calls):
        key = ("edit", _key(call, "target")) if _is_edit(call) else number
        groups.setdefault(key, []).append(call)
    return [tuple(group) for group in groups.values()]


def _is_edit(call: Call) -> bool:
    return family_of(call.name) == "Edit"


def _gathered_level(a: tuple[Call, ...], b: tuple[Call, ...]) -> AgreementLevel | None:
    if a == b:
        return "exact"
    if not (_is_edit(a[0]) and _is_edit(b[0])):
        return _call_level(a[0], b[0]) if len(a) == len(b) == 1 else None
    if _key(a[0], "target") != _key(b[0], "target"):
        return "tool"
    ours, theirs = _all_edits(a), _all_edits(b)
    same = ours is not None and theirs is not None and are_same_change(ours, theirs)
    return "effect" if same else "target"


def _all_edits(calls: tuple[Call, ...]) -> tuple[Edit, ...] | None:
    found: list[Edit] = []
    for call in calls:
        edits = _edits(call)
        if edits is None:
            return None
        found += edits
    return tuple(found)


@lru_cache(maxsize=4_096)
def _edits(call: Call) -> tuple[Edit, ...] | None:
    return edits_of(call.values())


def _reads_overlap(a: Call, b: Call) -> bool:
    """Whether two reads of one file show a common line."""
    if _key(a, "target") != _key(b, "target"):
        return False
    first, last, how = _reading(a)
    other_first, other_last, other_how = _reading(b)
    return how == other_how and first <= other_last and other_first <= last


@lru_cache(maxsize=16_384)
def _reading(call: Call) -> tuple[float, float, Any]:
    """First and last line, counted from 1, and what else the read asks for."""
    arguments = call.values()
    first = arguments.pop("offset", 1) or 1
    last = first + arguments.pop("limit", 2_000) - 1
    del arguments["file_path"]
    return first, last, _hashable(arguments)


@lru_cache(maxsize=16_384)
def _key(call: Call, level: AgreementLevel) -> Any:
    """What must be equal at `level`; `None` at `target` when the call has no object."""
    arguments = call.values()
    if call.name == "Bash":
        return _shell_key(call, arguments, level)
    spec = spec_of(call.name)
    for path in spec.paths:
        if isinstance(arguments.get(path), str):
            arguments[path] = absolute(arguments[path], call.cwd)
    arguments = spec.question(arguments)
    if level == "effect":
        return tuple(
            (
                key,
                _collapsed(value)
                if key in spec.prose and isinstance(value, str)
                else _hashable(value),
            )
            for key, value in sorted(arguments.items())
            if key not in spec.display
        )
    if call.name in ("Grep", "Glob"):
        return _search_target(arguments)
    found = tuple((key, _hashable(arguments[key])) for key in spec.target if key in arguments)
    return found or None


def _shell_key(call: Call, arguments: dict[str, Any], level: AgreementLevel) -> Any:
    plan = shell_plan(arguments.pop("command"), call.cwd)
    if level == "effect":
        return plan.effect, tuple((k, _hashable(v)) for k, v in sorted(arguments.items()))
    return plan.target


def _search_target(arguments: dict[str, Any]) -> Any:
    """The place searched, or for a search of the whole working directory what is looked for."""
    if "path" in arguments:
        return "path", arguments["path"]
    return "pattern", arguments["pattern"]


def _hashable(value: Any) -> Any:
    """`value` as a key that keeps true, 1 and "True" apart."""
    return ("json", repr(value)) if isinstance(value, dict | list | bool | float) else value
