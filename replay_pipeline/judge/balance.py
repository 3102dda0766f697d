"""Keep pairs whose sides can't be told apart without the prompt.

A model has favorite names. If each of its samples that differs from the teachers became the worse
side of a pair, these names would be on that side alone, and anyone could tell without a prompt which
side is better. So a name has to be on both sides about equally often.
"""

import re
from collections.abc import Sequence

import numpy as np

from replay_pipeline.types import DPOPair

MIN_PAIRS = 20
"""Fewer pairs don't show whether their sides can be told apart."""
_LONGER = " longer"
"""Stands among the words of the longer side. No word has a blank."""
_WORD = re.compile(r"[^\W_]+")


def balanced(pairs: Sequence[DPOPair]) -> list[DPOPair]:
    """Return the pairs whose words are on both sides about as often as a coin would put them there.

    If a coin decided for each session which sides are the better ones, the square of how much more
    often a word is on one side would, divided by its variance, be 1 on average. So pairs leave until
    the mean over all words is at most 1: first the one without which it sinks most. A word counts
    once a side. That a side is the longer one counts as a word.

    Args:
        pairs: the pairs. Fewer than 20 are returned as they are.
    """
    if len(pairs) < MIN_PAIRS:
        return list(pairs)
    words = _WordsOfSides(pairs)
    while (telling := words.most_telling()) is not None:
        words.leave_out(telling)
    return [pair for pair, is_kept in zip(pairs, words.kept, strict=True) if is_kept]


class _WordsOfSides:
    """The words of pairs: an entry for each word that only one side of a pair has."""

    def __init__(self, pairs: Sequence[DPOPair]) -> None:
        words, cells = dict[str, int](), dict[tuple[str, int], int]()
        entries: list[tuple[int, int, int, int]] = []
        for place, pair in enumerate(pairs):
            for word, sign in _telling_words(pair["chosen"], pair["rejected"]).items():
                number = words.setdefault(word, len(words))
                key = (str(pair.get("session_id")), number)
                entries.append((place, number, cells.setdefault(key, len(cells)), sign))
        columns = np.array(entries, np.int64).reshape(-1, 4).T
        self._pair, self._word, self._cell, self._sign = columns
        self._word_of_cell = np.array([word for _, word in cells], np.int64)
        self.kept = np.ones(len(pairs), bool)

    def leave_out(self, place: int) -> None:
        self.kept[place] = False
        self._sign = np.where(self._pair == place, 0, self._sign)

    def most_telling(self) -> int | None:
        """Return the pair without which the words tell least, or `None` if they tell no more than chance."""
        in_session = np.bincount(self._cell, self._sign, len(self._word_of_cell))
        total = np.bincount(self._word, self._sign, len(self._word_of_cell))
        variance = np.bincount(self._word_of_cell, np.square(in_session), len(total))
        excess = _excess(total, variance)
        if excess.sum() <= 0:
            return None
        own = in_session[self._cell]
        without = _excess(
            total[self._word] - self._sign,
            variance[self._word] - np.square(own) + np.square(own - self._sign),
        )
        gains = np.bincount(self._pair, excess[self._word] - without, len(self.kept))
        return int(np.argmax(np.where(self.kept, gains.round(9), -np.inf)))


def _excess(total: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return how much more a word tells than by chance: 0 for one that tells nothing anywhere."""
    return np.where(variance > 0, np.square(total) / np.maximum(variance, 1) - 1, 0.0)


def _telling_words(chosen: str, rejected: str) -> dict[str, int]:
    """Return the words of one side alone: 1 for the chosen side, -1 for the rejected one."""
    better, worse = set(_WORD.findall(chosen)), set(_WORD.findall(rejected))
    found = {word: 1 if word in better else -1 for word in sorted(better ^ worse)}
    if len(chosen) != len(rejected):
        found[_LONGER] = 1 if len(chosen) > len(rejected) else -1
    return found
