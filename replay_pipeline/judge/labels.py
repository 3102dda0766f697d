"""All ways in which the groups of a ballot can be right or wrong."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from replay_pipeline.judge.ballots import Known, Pattern

RIGHT, ALSO_RIGHT, TEMPTING, OWN = range(4)
"""The labels of a group: the most common right action, another right action, the wrong action that
tempts several raters, or a wrong action of only one rater."""
N_LABELS = 4


@cache
def labelings(pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Return all ways to label the groups of a pattern.

    Each of the first three labels goes to at most one group. A group of several raters has one of
    these, since the last label is for a single rater.
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
    """The labelings of many patterns, stacked as arrays.

    `labels_N_R` has the label of each rater (or `N_LABELS` for none), `pattern_N` the index of the
    pattern, and `starts_P` the first row of each pattern.
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
