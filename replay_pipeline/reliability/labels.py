"""Every way in which the groups of a ballot can be right or wrong."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from replay_pipeline.reliability.ballots import Known, Pattern

RIGHT, ALSO_RIGHT, TEMPTING, OWN = range(4)
"""What a group of equal actions can be: the commoner right action of the state, another right one,
the wrong action that tempts several, or a wrong one that only its own rater takes."""
N_LABELS = 4


@cache
def labelings(pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Return all ways to label the groups of a pattern.

    Each of the first three labels goes to one group at most; a group of several raters is one of
    these, since nobody shares an action of its own.
    """
    sizes = [0] * (max(pattern) + 1)
    for number in pattern:
        if number >= 0:
            sizes[number] += 1
    found: list[tuple[int, ...]] = []

    def grow(labels: tuple[int, ...]) -> None:
        if len(labels) == len(sizes):
            found.append(labels)
            return
        for label in range(N_LABELS):
            is_free = sizes[len(labels)] == 1 if label == OWN else label not in labels
            if is_free:
                grow((*labels, label))

    grow(())
    return tuple(found)


class Rows:
    """The labelings of many patterns below each other, as arrays.

    `labels_N_R` has the label of each rater (or `N_LABELS`, where it has none), `pattern_N` the
    number of the pattern, `starts_P` where each pattern begins.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        known: Sequence[Known] | None = None,
    ) -> None:
        labels: list[list[int]] = []
        owners: list[int] = []
        starts: list[int] = []
        self.by_group: list[tuple[tuple[int, ...], ...]] = []
        for place, pattern in enumerate(patterns):
            facts = known[place] if known else ()
            kept = [ways for ways in labelings(pattern) if _fits(ways, facts)]
            # What is known may contradict every labeling (two right groups of three): then the votes
            # alone are left.
            kept = kept or list(labelings(pattern))
            starts.append(len(labels))
            self.by_group.append(tuple(kept))
            for ways in kept:
                labels.append([ways[number] if number >= 0 else N_LABELS for number in pattern])
                owners.append(place)
        self.labels_N_R = np.array(labels, dtype=np.int64)
        self.pattern_N = np.array(owners, dtype=np.int64)
        self.starts_P = np.array(starts, dtype=np.int64)
        self.n_patterns = len(patterns)


def _fits(ways: tuple[int, ...], known: Known) -> bool:
    for number, is_so in known:
        if number >= 0:
            found = ways[number] <= ALSO_RIGHT
        else:
            found = ways[-1 - number] <= ALSO_RIGHT < ways[0]
        if found != is_so:
            return False
    return True
