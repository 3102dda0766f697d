"""The findings of an operator about rows, and which rows it refuses and why."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One statistic of every row, and the range of values (inclusive) with which a row stays."""

    field: str
    """`chosen`, `rejected` or `pair`."""
    metric: str
    values: np.ndarray
    minimum: float | None = None
    maximum: float | None = None
    notes: Sequence[str] = ()
    """The finding for each row in words. Empty if the value is enough."""

    @property
    def key(self) -> str:
        """The name of the statistic in tables."""
        return f"{self.field}.{self.metric}"

    @property
    def limit(self) -> str:
        """Return the range in words."""
        low = "" if self.minimum is None else f"{_number(self.minimum)} <= "
        high = "" if self.maximum is None else f" <= {_number(self.maximum)}"
        return f"{low}{self.metric}{high}"

    def value(self, row: int) -> str:
        """Return the reported value of a row."""
        return self.notes[row] if self.notes else _number(self.values[row].item())


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.6g}"


@dataclass(frozen=True, kw_only=True)
class RowVerdict:
    """Which rows fail, and by which field, value and limit."""

    fails: np.ndarray
    fields: np.ndarray
    values: np.ndarray
    limits: np.ndarray
    measures: Sequence[Measure] = ()

    @classmethod
    def of(cls, n_rows: int, measures: Sequence[Measure] = ()) -> "RowVerdict":
        """Return a verdict under which every row passes, so far."""
        texts = [np.full(n_rows, "", object) for _ in range(3)]
        return cls(
            fails=np.zeros(n_rows, bool),
            fields=texts[0],
            values=texts[1],
            limits=texts[2],
            measures=measures,
        )

    def reason(self, row: int) -> str:
        """Return the field, value, and limit of a failed row as JSON, or an empty text if it passes."""
        parts = [self.fields[row], self.values[row], self.limits[row]]
        return json.dumps(parts) if self.fails[row] else ""

    def fail(self, rows: Iterable[Any], field: str, value: str, limit: str) -> None:
        """Let rows fail for one reason."""
        for row in rows:
            self.fails[row] = True
            self.fields[row], self.values[row], self.limits[row] = field, value, limit


class Memory(ABC):
    """An operator's memory of the rows that passed it.

    Args:
        earlier: the memory of earlier batches. It counts too, and doesn't change.
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
    """Refuses pairs of a session, or of an action in a session, above a limit."""

    def __init__(self, max_pairs: int, max_repeats: int, earlier: Self | None = None) -> None:
        super().__init__(earlier)
        self._counts: Counter[bytes] = Counter()
        self._max_pairs, self._max_repeats = max_pairs, max_repeats

    def remember(self, key: bytes) -> None:
        """Count the session and its action."""
        self._counts.update((key[:16], key))

    def _reason(self, key: bytes) -> tuple[str, str] | None:
        caps = ((key, self._max_repeats, "same action"), (key[:16], self._max_pairs, "pairs"))
        for part, cap, what in caps:
            count = sum(layer._counts[part] for layer in self._layers)
            if count >= cap:
                return str(count + 1), f"{what} of a session <= {cap}"
        return None


N_BANDS = 16
"""Bands of a signature. Two rows are compared only if one band is equal."""


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
    return float((np.frombuffer(one, np.uint32) == np.frombuffer(other, np.uint32)).mean())
