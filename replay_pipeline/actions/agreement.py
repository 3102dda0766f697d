"""Decide when two actions are the same. In doubt they differ, because a wrong match makes a false pair."""

import re
from collections.abc import Callable
from typing import Any

from replay_pipeline.actions.canonical import Action, Call, canonical_action
from replay_pipeline.actions.edits import (
    Edit,
    are_same_change,
    has_perfect_matching,
    perfect_matching,
)
from replay_pipeline.actions.keys import depend, keys_of, purpose_of_call
from replay_pipeline.actions.tools import family_of
from replay_pipeline.types import AgreementLevel, Message

LEVELS: tuple[AgreementLevel, ...] = ("exact", "effect", "target", "tool")
"""The levels of agreement, from strict to loose."""

TextComparator = Callable[[str, str], bool]
"""A function that decides whether two final texts mean the same."""

Lines = tuple[float, float] | None
Edits = tuple[Edit, ...] | None

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
    """Return the strictest level at which two actions are the same, or None.

    The result is symmetric in `a` and `b`. An invalid action agrees with nothing, not even with
    itself.

    Args:
        a: An action, or an assistant message (read without a working directory).
        b: The other one.
        same_text: Judges final texts that differ by more than typography and don't choose the same
            option. If it says yes, the level is `effect`.
    """
    a, b = _as_action(a), _as_action(b)
    if a.invalid_reason is not None or b.invalid_reason is not None:
        return None
    if bool(a.calls) != bool(b.calls):
        return None
    if not a.calls:
        return _text_level(a.text, b.text, same_text)
    found = _calls_level(a.calls, b.calls)
    n_calls = max(len(a.calls), len(b.calls))
    if agrees_at("effect", found) or n_calls == 1 or n_calls > _MAX_CALLS:
        return found
    # A look or a note beside a consequence is not seen before it is made. Another one decides nothing,
    # but the same one in another place shows something else.
    ours, theirs = map(_consequences, (a.calls, b.calls))
    if not ours or not theirs or set(a.calls) - {*ours} == set(b.calls) - {*theirs}:
        return found
    acted = _calls_level(ours, theirs)
    return "effect" if acted == "exact" else max(found, acted, key=strictness)


def agrees_at(level: AgreementLevel, found: AgreementLevel | None) -> bool:
    """Return whether the level `found` is at least as strict as `level`."""
    return _STRICTNESS[found] >= _STRICTNESS[level]


def differ_in_calls_alone(
    a: Action | Message | str, b: Action | Message | str, *, level: AgreementLevel = "effect"
) -> bool:
    """Return whether one action contains every call of the other, in any order, perhaps with more calls.

    Each call of the shorter action must match a different call of the other at `level`. Two
    harnesses may allow one call or several, so more calls aren't a difference of judgment. Neither
    is another order of the same calls.
    """
    fewer, more = sorted((_as_action(a).calls, _as_action(b).calls), key=len)
    if not fewer or len(more) > _MAX_CALLS or len(more) == 1:
        return False
    edges = [
        [n for n, other in enumerate(more) if agrees_at(level, _call_level(call, other))]
        for call in fewer
    ]
    spare = [list(range(len(more)))] * (len(more) - len(fewer))
    return has_perfect_matching([*edges, *spare], len(more))


def strictness(found: AgreementLevel | None) -> int:
    """Return 4 for `exact` down to 1 for `tool`, 0 for no agreement."""
    return _STRICTNESS[found]


def _as_action(action: Action | Message | str) -> Action:
    return action if isinstance(action, Action) else canonical_action(action)


def _text_level(a: str, b: str, same_text: TextComparator | None) -> AgreementLevel | None:
    if a == b or _collapsed(a) == _collapsed(b):
        return "exact"
    if say_the_same(a, b):
        return "effect"
    if same_text is None:
        return None
    # In one order, so that the answer is the same both ways whatever the judge does.
    first, second = sorted((a, b))
    return "effect" if same_text(first, second) else None


def _consequences(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    return tuple(call for call in calls if purpose_of_call(call) is None)


def _calls_level(ours: tuple[Call, ...], theirs: tuple[Call, ...]) -> AgreementLevel | None:
    if len(ours) == 1 == len(theirs):
        return _call_level(ours[0], theirs[0])
    return "exact" if ours == theirs else _set_level(ours, theirs)


def _call_level(a: Call, b: Call) -> AgreementLevel | None:
    family = family_of(a.name)
    if a.name != b.name:
        if family != family_of(b.name):
            return None
    elif a.arguments == b.arguments and a.cwd == b.cwd:
        return "exact"
    elif a.plain is not None and a.plain == b.plain:
        return "effect"
    ours, theirs = keys_of(a), keys_of(b)
    is_on_same = ours.target is not None and ours.target == theirs.target
    if family == "Edit":
        if not is_on_same:
            return "tool"
        return "effect" if _is_same_change(ours.edits, theirs.edits, a) else "target"
    if ours.effect == theirs.effect and _share_lines(ours.lines, theirs.lines):
        return "effect"
    return "target" if is_on_same else "tool"


def _share_lines(ours: Lines, theirs: Lines) -> bool:
    """Return whether two reads show a common line; true of what is no read."""
    if ours is None or theirs is None:
        return True
    return ours[0] <= theirs[1] and theirs[0] <= ours[1]


def _is_same_change(ours: Edits, theirs: Edits, call: Call) -> bool:
    if ours is None or theirs is None:
        return False
    return are_same_change(ours, theirs, str(call.values().get("file_path")))


def _set_level(a: tuple[Call, ...], b: tuple[Call, ...]) -> AgreementLevel | None:
    """Return the weakest level of the best one-to-one assignment, edits of one file gathered or not.

    Calls are made one after the other. Down to `effect` those that depend on each other must come
    in the same order; on which objects they act says no order.
    """
    if max(len(a), len(b)) > _MAX_CALLS:
        return None
    ours, theirs = _gathered(a), _gathered(b)
    if len(ours) != len(theirs):
        return None
    levels = [[_gathered_level(x, y) for y in theirs] for x in ours]
    before, behind = _dependences(ours), _dependences(theirs)
    for level in LEVELS:
        edges = [[n for n, at in enumerate(row) if agrees_at(level, at)] for row in levels]
        if agrees_at("effect", level) and (any(before) or any(behind)):
            if _has_ordered_matching(edges, before, behind):
                return level
        elif has_perfect_matching(edges, len(levels)):
            return level
    return None


def _has_ordered_matching(
    edges: list[list[int]], before: list[set[int]], behind: list[set[int]]
) -> bool:
    """Return whether a matching keeps the order of all that depend on each other.

    Args:
        edges: For each of our groups the ones of theirs that do the same.
        before: For each of our groups the earlier ones that it depends on.
        behind: The same of theirs.
    """
    ours, theirs = _depths(before), _depths(behind)
    edges = [[n for n in row if theirs[n] == ours[i]] for i, row in enumerate(edges)]
    found = perfect_matching(edges, len(behind))
    return found is not None and all(
        {found[earlier] for earlier in before[i]} == behind[n] for i, n in enumerate(found)
    )


def _depths(dependences: list[set[int]]) -> list[int]:
    """Return the length of the longest chain of dependences that ends at each place."""
    found: list[int] = []
    for earlier in dependences:
        found.append(1 + max((found[i] for i in earlier), default=-1))
    return found


def _dependences(groups: list[tuple[Call, ...]]) -> list[set[int]]:
    """Return, for each group of calls, the earlier groups that must stay before it."""
    return [
        {
            i
            for i, earlier in enumerate(groups[:n])
            if any(depend(one, other) for one in earlier for other in group)
        }
        for n, group in enumerate(groups)
    ]


def _gathered(calls: tuple[Call, ...]) -> list[tuple[Call, ...]]:
    """Return each call alone, but the edits of one file together that nothing comes between."""
    groups: list[list[Call]] = []
    open_: dict[Any, list[Call]] = {}
    for call in calls:
        key = keys_of(call).target if _is_edit(call) else None
        for other, group in list(open_.items()):
            if other != key and any(depend(call, edit) for edit in group):
                del open_[other]
        if key is not None and key in open_:
            open_[key].append(call)
            continue
        groups.append([call])
        if key is not None:
            open_[key] = groups[-1]
    return [tuple(group) for group in groups]


def _is_edit(call: Call) -> bool:
    return family_of(call.name) == "Edit"


def _gathered_level(a: tuple[Call, ...], b: tuple[Call, ...]) -> AgreementLevel | None:
    if a == b:
        return "exact"
    if len(a) == 1 == len(b):
        return _call_level(a[0], b[0])
    if not (_is_edit(a[0]) and _is_edit(b[0])):
        return None
    if keys_of(a[0]).target != keys_of(b[0]).target:
        return "tool"
    return "effect" if _is_same_change(_all_edits(a), _all_edits(b), a[0]) else "target"


def _all_edits(calls: tuple[Call, ...]) -> Edits:
    found: list[Edit] = []
    for call in calls:
        edits = keys_of(call).edits
        if edits is None:
            return None
        found += edits
    return tuple(found)


def _collapsed(text: str) -> str:
    return " ".join(text.split())


_MAX_CHOICE_CHARS = 600
"""A longer text says more than which option it takes."""
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3})(?=[^\s*])([^*]*[^\s*])\1(?!\w)|`+")
"""Stars around words, and backticks. Stars of a glob and underscores belong to names."""
_FULL_STOP = re.compile(r"(?<=[\w)\]\"'])\s*\.$")
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-"})
_QUOTED = re.compile("[\u2018\u2019\u201c\u201d\u2013]")
_LETTER = r"([A-Ha-h1-9])"
_ALONE = re.compile(rf"(?:the )?(?:answer|option|choice)?(?: is|:)? ?\(?{_LETTER}[.):]?\.?", re.I)
_TAKEN = re.compile(
    rf"(?:so |then )?(?:my |the )?(?:answer|choice)(?: is|:) ?(?:option )?\(?{_LETTER}\b"
    rf"|i(?:['’]d| would|['’]ll| will)? (?:choose|pick|take|select|recommend|suggest|go (?:with|for)) "
    rf"(?:option \(?{_LETTER}\b|\({_LETTER}\))"
    rf"|(?:option \(?{_LETTER}\b|\({_LETTER}\)|{_LETTER}\))",
    re.IGNORECASE,
)
_MENTIONED = re.compile(rf"\({_LETTER}\)|\boption \(?{_LETTER}\b", re.IGNORECASE)
_HEDGED = re.compile(
    r"\b(?:but|however|except|unless|instead|not|neither|nor|first|then|after|also|either|or|both|n't)\b"
    r"|n['’]t\b|\?",
    re.IGNORECASE,
)


def say_the_same(one: str, other: str) -> bool:
    """Return whether two texts differ only in typography, or choose the same option."""
    one, other = _normal(one), _normal(other)
    if one == other:
        return True
    choice = _choice_of(one)
    return choice is not None and choice == _choice_of(other)


def _choice_of(plain: str) -> str | None:
    """Return the option that a text in normal form takes, such as `c`, or None if it may mean anything else.

    The text must begin with the option or consist of it, name no other option, and express no
    doubt.
    """
    if len(plain) > _MAX_CHOICE_CHARS:
        return None
    found = _ALONE.fullmatch(plain)
    if found is None:
        found = _TAKEN.match(plain)
        if found is None or _HEDGED.search(plain):
            return None
    letter = next(group for group in found.groups() if group).lower()
    mentioned = {(m[1] or m[2]).lower() for m in _MENTIONED.finditer(plain)}
    return letter if mentioned <= {letter} else None


def _normal(text: str) -> str:
    """Return a text without emphasis, in plain quotes and single blanks, without a full stop at the end."""
    plain = _EMPHASIS.sub(r"\2", text)
    if _QUOTED.search(plain):  # translating a long text takes ten times as long as looking
        plain = plain.translate(_QUOTES)
    return _FULL_STOP.sub("", " ".join(plain.split()))
