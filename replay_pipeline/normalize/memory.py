"""What a deduplicator remembers of the pairs that passed it, in this batch and in earlier ones."""

from abc import ABC, abstractmethod
from collections import Counter
from operator import eq
from typing import Self

N_BANDS = 16
"""Bands of a signature. Two rows are compared only if one band is equal."""


class Memory(ABC):
    """An operator's memory of the rows that passed it.

    The memory of earlier batches counts too, and doesn't change.
    """

    def __init__(self, earlier: Self | None = None) -> None:
        self.added: list[bytes] = []
        """Keys that passed in this run, in order."""
        self._layers = (self,) if earlier is None else (self, earlier)

    def refuse(self, key: bytes) -> tuple[str, str] | None:
        """Return the value and limit that a row breaks. Return None, and remember the row, if it passes."""
        reason = self._reason(key)
        if reason is None:
            self.remember(key)
            self.added.append(key)
        return reason

    @abstractmethod
    def remember(self, key: bytes) -> None:
        """Add the key of a row that passed."""

    @abstractmethod
    def _reason(self, key: bytes) -> tuple[str, str] | None:
        """Return value and limit that a key breaks."""


class SeenKeys(Memory):
    """Refuses a key that passed before."""

    def __init__(self, earlier: Self | None = None) -> None:
        super().__init__(earlier)
        self._seen: set[bytes] = set()

    def remember(self, key: bytes) -> None:
        """Refuse this key from now on."""
        self._seen.add(key)

    def _reason(self, key: bytes) -> tuple[str, str] | None:
        for layer in self._layers:
            if key in layer._seen:
                where = "this batch" if layer is self else "an earlier batch"
                return f"same as a pair of {where}", "first of its kind"
        return None


class CountedKeys(Memory):
    """Refuses an action that passed often enough, in its conversation or anywhere.

    The first half of a key is the action, the second its conversation.
    """

    def __init__(
        self, per_conversation: int, per_dataset: int, earlier: Self | None = None
    ) -> None:
        super().__init__(earlier)
        self._caps = per_conversation, per_dataset
        self._seen: Counter[bytes] = Counter()

    def remember(self, key: bytes) -> None:
        """Count this key."""
        self._seen.update((key, key[: len(key) // 2]))

    def _reason(self, key: bytes) -> tuple[str, str] | None:
        names = "conversation", "dataset"
        for name, part, cap in zip(names, (key, key[: len(key) // 2]), self._caps, strict=True):
            if sum(layer._seen[part] for layer in self._layers) >= cap:
                return f"{cap} pairs of this {name} have this chosen action", f"at most {cap}"
        return None


class SeenSketches(Memory):
    """Refuses a MinHash signature that agrees with an earlier one in enough places."""

    def __init__(self, threshold: float, earlier: Self | None = None) -> None:
        super().__init__(earlier)
        self._threshold = threshold
        self._bands: list[dict[bytes, list[bytes]]] = [{} for _ in range(N_BANDS)]

    def remember(self, key: bytes) -> None:
        """Compare with this signature from now on."""
        for band, part in zip(self._bands, _bands_of(key), strict=True):
            band.setdefault(part, []).append(key)

    def _reason(self, key: bytes) -> tuple[str, str] | None:
        candidates = {
            other
            for layer in self._layers
            for band, part in zip(layer._bands, _bands_of(key), strict=True)
            for other in band.get(part, ())
        }
        similarity = max((_agreement(key, other) for other in candidates), default=0.0)
        if similarity >= self._threshold:
            return f"{similarity:.3f}", f"similarity < {self._threshold}"
        return None


def _bands_of(key: bytes) -> list[bytes]:
    width = len(key) // N_BANDS
    return [key[start : start + width] for start in range(0, len(key), width)]


def _agreement(one: bytes, other: bytes) -> float:
    values = memoryview(one).cast("I")
    return sum(map(eq, values, memoryview(other).cast("I"))) / len(values)
