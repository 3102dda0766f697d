"""Folds over the batches in order, which need one pass even over thousands of batches."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from replay_pipeline.storage.root_index import RootIndex

T = TypeVar("T")

_WORTH_KEEPING = 100
"""Batches that a process has added, from which on the next one should begin behind them."""

_KEPT_BEHIND = 500
"""At every so many batches the value is kept as well: what is shown of the newest begins that far back."""


@dataclass(frozen=True, kw_only=True)
class Kept(Generic[T]):
    """The store that keeps the value of a fold beyond this process."""

    index: RootIndex
    name: str
    version_of: Callable[[str], str]
    """Returns a version that changes when a batch's contribution does."""
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]

    def load(self, keys: list[str]) -> tuple[T, int] | None:
        """Return the stored value and the number of keys it covers, if it is still valid for them."""
        kept = filter(None, map(self.index.fold, (self.name, *map(self._behind, range(2)))))
        for last, chain, value in sorted(kept, reverse=True):
            n = bisect_left(keys, last) + 1
            if keys[n - 1 : n] == [last] and self._chain(keys[:n]) == chain:
                return self.decode(value), n
        return None

    def save(self, value: T, keys: list[str]) -> None:
        """Save the value over these keys, and two earlier values for passes that don't start at the newest batch."""
        is_behind = len(keys) % _KEPT_BEHIND == 0
        name = self._behind(len(keys) // _KEPT_BEHIND) if is_behind else self.name
        self.index.keep_fold(name, keys[-1], self._chain(keys), self.encode(value))

    def _behind(self, number: int) -> str:
        return f"{self.name}/{number % 2}"

    def _chain(self, keys: Iterable[str]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for key in keys:
            digest.update(f"{key} {self.version_of(key)}\0".encode())
        return digest.hexdigest()


class Fold(Generic[T]):
    """The combined value of all batches before a given one, extended from batch to batch.

    If you ask in the order of the batches, each batch is read once. If you ask for an earlier
    batch, or after `forget`, the fold starts over.

    Args:
        keys: the keys of all batches, sorted.
        start: the value without any batch.
        add: adds one batch, and returns the new value.
        kept: stores the value of a long pass for the next process.
    """

    def __init__(
        self,
        keys: Callable[[], list[str]],
        *,
        start: Callable[[], T],
        add: Callable[[T, str], T],
        kept: Kept[T] | None = None,
    ) -> None:
        self._kept = kept
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
        if self._kept and not self._next and end > _WORTH_KEEPING:
            loaded = self._kept.load(keys[:end])
            if loaded is not None:
                self._value, self._next = loaded
                self._last = keys[self._next - 1]
        n_added = end - self._next
        for n, key in enumerate(keys[self._next : end], self._next + 1):
            self._value = self._add(self._value, key)
            self._last = key
            if self._kept and n % _KEPT_BEHIND == 0:
                self._kept.save(self._value, keys[:n])
        self._next = end
        if self._kept and n_added > _WORTH_KEEPING:
            self._kept.save(self._value, keys[:end])
        return self._value

    def forget(self, batch: str) -> None:
        """Start over if `batch`, which was rewritten, has been added."""
        if batch <= self._last:
            self._value, self._next, self._last = self._start(), 0, ""
