"""Folds over the batches in their order, so that going through thousands of them is one pass."""

from bisect import bisect_left
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Fold(Generic[T]):
    """What all batches before a given one come to, kept from one batch to the next.

    Asked in the order of the batches, each batch is read once. Asked for a batch that lies behind,
    or after `forget`, it starts over.

    Args:
        keys: the keys of all batches, sorted.
        start: what no batch at all comes to.
        add: adds one batch; gives back the new value.
    """

    def __init__(
        self, keys: Callable[[], list[str]], *, start: Callable[[], T], add: Callable[[T, str], T]
    ) -> None:
        self._keys = keys
        self._start = start
        self._add = add
        self._value = start()
        self._next = 0
        self._last = ""

    def before(self, batch: str) -> T:
        """Give the value over every batch whose key is below `batch`. Not to be changed."""
        keys = self._keys()
        end = bisect_left(keys, batch)
        if end < self._next or (self._next and keys[self._next - 1] != self._last):
            self._value, self._next, self._last = self._start(), 0, ""
        for key in keys[self._next : end]:
            self._value = self._add(self._value, key)
            self._last = key
        self._next = end
        return self._value

    def forget(self, batch: str) -> None:
        """`batch` was written anew: if it has been added, start over."""
        if batch <= self._last:
            self._value, self._next, self._last = self._start(), 0, ""
