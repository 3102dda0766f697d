"""Folds over the batches in order, which need one pass even over thousands of batches."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Fold(Generic[T]):
    """The combined value of all batches before a given one, extended from batch to batch.

    If you ask in the order of the batches, each batch is read once. If you ask for an earlier
    batch, or after `forget`, the fold starts over. `keys` are those of all batches, sorted; `start` makes
    the value without any batch, and `add` returns that with one more.
    """

    def __init__(
        self,
        keys: Callable[[], list[str]],
        *,
        start: Callable[[], T],
        add: Callable[[T, str], T],
    ) -> None:
        self._keys = keys
        self._start = start
        self._add = add
        self._value = start()
        self._next = 0
        self._last = ""

    def before(self, batch: str) -> T:
        """Return the value over every batch whose key is below `batch`. Don't change it."""
        keys = self._keys()
        end = bisect_left(keys, batch)
        if end < self._next or (self._next and keys[self._next - 1] != self._last):
            self._value, self._next, self._last = self._start(), 0, ""
        for key in keys[self._next : end]:
            self._value, self._last = self._add(self._value, key), key
        self._next = end
        return self._value

    def forget(self, batch: str) -> None:
        """Start over if `batch`, which was rewritten, has been added."""
        if batch <= self._last:
            self._value, self._next, self._last = self._start(), 0, ""
