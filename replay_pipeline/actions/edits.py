"""Decide whether edits of one file make the same change, from the edits alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from replay_pipeline.actions.comments import code_of


def has_perfect_matching(edges: Sequence[Sequence[int]], n_right: int) -> bool:
    """Return whether each left item can be matched with a different right item."""
    return perfect_matching(edges, n_right) is not None


def perfect_matching(edges: Sequence[Sequence[int]], n_right: int) -> list[int] | None:
    """Return a different right item for each left item, or None if that is impossible.

    Args:
        edges: For each left item the right items it may have.
        n_right: Number of right items.
    """
    if len(edges) != n_right or not all(edges):
        return None
    owner: dict[int, int] = {}

    def place(left: int, seen: set[int]) -> bool:
        for right in edges[left]:
            if right in seen:
                continue
            seen.add(right)
            if right not in owner or place(owner[right], seen):
                owner[right] = left
                return True
        return False

    if not all(place(left, set()) for left in range(len(edges))):
        return None
    return sorted(owner, key=owner.__getitem__)


_MAX_EDITS = 24
_MAX_CHARS = 50_000
_MAX_CODE_CHARS = 16_000
"""In longer edits comments count."""


class Edit(NamedTuple):
    """One replacement in a file."""

    old: str
    new: str
    is_everywhere: bool = False


def edits_of(arguments: dict[str, Any]) -> tuple[Edit, ...] | None:
    """Return the replacements of an Edit or MultiEdit call, in order, or None if one is malformed."""
    found = []
    for edit in arguments.get("edits", [arguments]):
        if not isinstance(edit, dict):
            return None
        old, new = edit.get("old_string"), edit.get("new_string")
        if not isinstance(old, str) or not isinstance(new, str):
            return None
        found.append(Edit(old, new, bool(edit.get("replace_all"))))
    return tuple(found)


def are_same_change(ours: tuple[Edit, ...], theirs: tuple[Edit, ...], path: str = "") -> bool:
    """Return whether both lists of edits turn the same file into the same result.

    True only if the edits prove it: equal edits, an edit with more context, several edits inside
    the context of one, or independent edits in another order. Where both change code, comments may
    differ.

    Args:
        ours: one list.
        theirs: the other one.
        path: the file, whose ending tells its language. Without one, comments count.
    """
    if ours == theirs:
        return True
    if len(ours) > _MAX_EDITS or len(theirs) > _MAX_EDITS:
        return False
    n_chars = sum(len(edit.old) + len(edit.new) for edit in ours + theirs)
    if n_chars > _MAX_CODE_CHARS:
        path = ""
    if len(ours) == len(theirs) == 1:
        return _is_same(ours[0], theirs[0], path)
    if n_chars > _MAX_CHARS:
        return False
    if len(ours) == 1:
        return _is_done_inside(theirs, ours[0], path)
    if len(theirs) == 1:
        return _is_done_inside(ours, theirs[0], path)
    return _are_pairwise_same(ours, theirs, path)


def _is_same(one: Edit, other: Edit, path: str) -> bool:
    return (
        one == other or _is_done_inside((one,), other, path) or _is_done_inside((other,), one, path)
    )


def _is_done_inside(edits: tuple[Edit, ...], wide: Edit, path: str) -> bool:
    """Return whether `wide` is `edits` with more context: applied to its old text they give its new."""
    if wide.is_everywhere:
        return False
    text = wide.old
    for edit in edits:
        if edit.is_everywhere or not edit.old:
            return False
        place = text.find(edit.old)
        # The text to replace must be unique, or the edit would fail or hit another place.
        if place < 0 or text.find(edit.old, place + 1) >= 0:
            return False
        text = text[:place] + edit.new + text[place + len(edit.old) :]
    if text == wide.new:
        return True
    code, before = code_of(text, path), code_of(wide.old, path)
    return None not in (code, before) and code == code_of(wide.new, path) != before


def _are_pairwise_same(ours: tuple[Edit, ...], theirs: tuple[Edit, ...], path: str) -> bool:
    if len(ours) != len(theirs):
        return False
    if all(_is_same(a, b, path) for a, b in zip(ours, theirs, strict=True)):
        return True
    if not (_are_independent(ours) and _are_independent(theirs)):
        return False
    edges = [[n for n, other in enumerate(theirs) if _is_same(edit, other, path)] for edit in ours]
    return has_perfect_matching(edges, len(theirs))


def _are_independent(edits: tuple[Edit, ...]) -> bool:
    """Return whether no edit can see what another one writes or removes, so that order means nothing."""
    return all(
        _is_blind_to(a, b) and _is_blind_to(b, a)
        for number, a in enumerate(edits)
        for b in edits[:number]
    )


def _is_blind_to(edit: Edit, other: Edit) -> bool:
    if not edit.old or edit.is_everywhere or other.is_everywhere:
        return False
    if edit.old in other.old or edit.old in other.new:
        return False
    return not _shares_edge_line(edit.old, other.old)


def _shares_edge_line(one: str, other: str) -> bool:
    """Return whether the last lines of one are the first of the other: they may overlap in the file."""
    tail, head = one.split("\n"), other.split("\n")
    return any(
        tail[-n:] == head[:n] and any(line.strip() for line in head[:n])
        for n in range(1, min(len(tail), len(head), 32) + 1)
    )
