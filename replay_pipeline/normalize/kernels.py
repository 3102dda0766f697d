"""Text statistics over whole Arrow columns, with the same results as data-juicer's loops over characters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

if TYPE_CHECKING:
    import polars as pl

_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_NOT_A_LETTER = r"\s+|\d+|[!-/:-@\[-`{-~]"
"""White space, digits and ASCII punctuation, as data-juicer's document deduplicator sees them."""
_STRIPPED = "".join(filter(str.isspace, map(chr, range(0x3001))))
"""What `str.strip` takes off: some separators more than `\\s` of a regular expression knows."""


@dataclass(frozen=True, slots=True)
class TextStats:
    """Counts per row: characters, words with a regular character, and special characters."""

    n_chars: np.ndarray
    n_words: np.ndarray
    n_special: np.ndarray

    @property
    def special_ratio(self) -> np.ndarray:
        """Return the share of special characters, or 0 for an empty text."""
        return self.n_special / np.maximum(self.n_chars, 1)


def character_class(special: Iterable[str]) -> str:
    """Return special characters as the inside of a regular expression's character class.

    Entries of several code points are left out, since they can't match a single character.
    """
    return "".join(rf"\x{{{ord(char):x}}}" for char in sorted(special) if len(char) == 1)


def text_stats(column: pa.Array, special: str) -> TextStats:
    """Count the characters, words, and special characters of every text. A null counts as empty.

    Args:
        column: strings.
        special: result of `character_class`.
    """
    texts = _series(column).str
    return TextStats(
        texts.len_chars().to_numpy().astype(np.int64),
        # A word is a run between separators in which at least one character is not special.
        texts.count_matches(rf"[^{special}][^ \t\n]*").to_numpy().astype(np.int64),
        texts.count_matches(f"[{special}]").to_numpy().astype(np.int64),
    )


def text_digests(column: pa.Array, *, lowercase: bool, ignore_non_character: bool) -> list[bytes]:
    """Hash each text to 128 bits, after the same text changes as data-juicer's deduplicator."""
    texts = _series(column)
    if lowercase:
        texts = texts.str.to_lowercase()
    if ignore_non_character:
        texts = texts.str.replace_all(_NOT_A_LETTER, "")
    stripped = texts.str.strip_chars(_STRIPPED)
    return [xxhash.xxh3_128_digest(text.encode()) for text in stripped]


def _series(column: pa.Array) -> "pl.Series":
    # It starts a pool of threads: for those who count, not for all who import.
    import polars as pl  # noqa: PLC0415

    return pl.Series(values=column.cast(pa.large_string()), dtype=pl.String).fill_null("")


def repetition_ratio(text: str, n: int) -> float:
    """Return the share of `n`-character windows that belong to the most repeated ones.

    Windows that occur more than once count as repeated, the most frequent first, and at most as
    many as the square root of the number of distinct windows.
    """
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    n_windows = len(points) - n + 1
    if n_windows <= 0:
        return 0.0
    hashes = np.zeros(n_windows, np.uint64)
    for shift in range(n):
        hashes = hashes * _HASH_BASE + points[shift : shift + n_windows]
    frequencies = np.sort(np.unique(hashes, return_counts=True)[1])[::-1]
    n_repeated = min(int(np.sqrt(len(frequencies))), int((frequencies > 1).sum()))
    return int(frequencies[:n_repeated].sum()) / n_windows
