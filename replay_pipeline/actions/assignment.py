"""One-to-one assignment between two small sets."""

from collections.abc import Sequence


def has_perfect_matching(edges: Sequence[Sequence[int]], n_right: int) -> bool:
    """Return whether each left item can be matched with a different right item.

    Args:
        edges: For each left item the right items it may have.
        n_right: Number of right items.
    """
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
