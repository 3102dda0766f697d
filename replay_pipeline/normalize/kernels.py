"""Text statistics over whole Arrow columns, equal to data-juicer's per-character loops.

A column is read as one buffer of bytes with row offsets. Each byte (or code point, for rows that
are not ASCII) is looked up in a table of character classes, and the rows are summed up in one
sweep. Blocks of about one MiB keep the temporaries small.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import regex
import xxhash

SPECIAL, SEPARATOR, REGULAR = 0, 1, 2
_N_CODE_POINTS = 0x110000
_BLOCK_BYTES = 1 << 20
_DROPPED = 0xFF  # in no UTF-8 text
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_NOT_A_LETTER = r"\s+|\d+|[!-/:-@\[-`{-~]"
"""White space, digits and ASCII punctuation, as data-juicer's document deduplicator sees them."""


@dataclass(frozen=True, slots=True)
class TextStats:
    """Per row: characters, words that hold a regular character, special characters."""

    n_chars: np.ndarray
    n_words: np.ndarray
    n_special: np.ndarray

    @property
    def special_ratio(self) -> np.ndarray:
        """Share of special characters; 0 for an empty text."""
        return self.n_special / np.maximum(self.n_chars, 1)


def character_classes(special: Iterable[str]) -> np.ndarray:
    """A table from code point to class. Entries of several code points never match one."""
    table = np.full(_N_CODE_POINTS, REGULAR, np.uint8)
    table[[ord(char) for char in special if len(char) == 1]] = SPECIAL
    table[[ord(" "), ord("\n"), ord("\t")]] = SEPARATOR
    return table


def text_stats(column: pa.Array, classes: np.ndarray) -> TextStats:
    """Statistics of every text of a string column; a null counts as empty."""
    n_rows = len(column)
    stats = TextStats(*(np.zeros(n_rows, np.int64) for _ in range(3)))
    for start, stop, codes, offsets in _blocks(column):
        rows = np.arange(start, stop)
        wide = _any_in_row(codes >= 0x80, offsets)
        if not wide.all():
            _count(codes, offsets, classes[:256], stats, rows)
        if wide.any():
            _count(*_code_points(codes, offsets, wide), classes, stats, rows[wide])
    return stats


def _count(
    codes: np.ndarray, offsets: np.ndarray, classes: np.ndarray, stats: TextStats, rows: np.ndarray
) -> None:
    lengths = np.diff(offsets)
    stats.n_chars[rows] = lengths
    stats.n_words[rows] = stats.n_special[rows] = 0
    filled = lengths > 0
    if not filled.any():
        return
    kind = classes.take(codes)
    starts = offsets[:-1][filled]
    stats.n_special[rows[filled]] = _row_sums(kind != REGULAR, starts)
    # A word starts at a regular character whose predecessor, special ones left out, is a separator.
    is_kept = kind != SPECIAL
    n_kept = _row_sums(is_kept, starts)
    kept = kind[is_kept]
    if not len(kept):
        return
    is_start = kept == REGULAR
    is_first = np.zeros(len(kept), bool)
    any_kept = n_kept > 0
    row_starts = (np.cumsum(n_kept) - n_kept)[any_kept]
    is_first[row_starts] = True
    is_start[1:] &= (kept[:-1] == SEPARATOR) | is_first[1:]
    stats.n_words[rows[filled][any_kept]] = _row_sums(is_start, row_starts)


def _row_sums(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(flags.view(np.uint8), starts, dtype=np.int32)


def _any_in_row(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which rows hold a flagged byte."""
    rows = np.zeros(len(offsets) - 1, bool)
    if flags.any():
        filled = np.diff(offsets) > 0
        rows[filled] = np.logical_or.reduceat(flags, offsets[:-1][filled])
    return rows


def _code_points(
    codes: np.ndarray, offsets: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    texts = [
        codes[offsets[row] : offsets[row + 1]].tobytes().decode() for row in np.flatnonzero(chosen)
    ]
    points = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    return points, np.concatenate(([0], np.cumsum([len(text) for text in texts])))


def _blocks(column: pa.Array) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Row range, bytes and offsets of consecutive blocks; a single long text is a block."""
    column = column.cast(pa.large_string()).fill_null("")
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[
        column.offset : column.offset + len(column) + 1
    ]
    codes = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    start = 0
    while start < len(column):
        limit = offsets[start] + _BLOCK_BYTES
        stop = max(start + 1, int(np.searchsorted(offsets, limit, "right")) - 1)
        stop = min(stop, len(column))
        yield (
            start,
            stop,
            codes[offsets[start] : offsets[stop]],
            offsets[start : stop + 1] - offsets[start],
        )
        start = stop


def text_digests(column: pa.Array, *, lowercase: bool, ignore_non_character: bool) -> list[bytes]:
    """A 128-bit digest per text, after the changes that data-juicer's deduplicator makes."""
    digests: list[bytes] = []
    for _, _, codes, offsets in _blocks(column):
        if lowercase and ignore_non_character:
            digests += _letter_digests(codes, offsets)
        else:
            data = codes.tobytes()
            digests += [
                _digest_of(
                    data[begin:end].decode(), lowercase=lowercase, letters_only=ignore_non_character
                )
                for begin, end in pairwise(offsets)
            ]
    return digests


def _letter_digests(codes: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    lowered, is_odd = _ascii_tables()
    small = lowered.take(codes)
    is_kept = small != _DROPPED
    kept = memoryview(small[is_kept].tobytes())
    ends = np.zeros(len(offsets), np.int64)
    filled = np.diff(offsets) > 0
    if filled.any():
        ends[1:][filled] = _row_sums(is_kept, offsets[:-1][filled])
        np.cumsum(ends, out=ends)
    digests = [xxhash.xxh3_128_digest(kept[begin:end]) for begin, end in pairwise(ends.tolist())]
    for row in np.flatnonzero(_any_in_row(is_odd.take(codes), offsets)):
        text = codes[offsets[row] : offsets[row + 1]].tobytes().decode()
        digests[row] = _digest_of(text, lowercase=True, letters_only=True)
    return digests


def _digest_of(text: str, *, lowercase: bool, letters_only: bool) -> bytes:
    if lowercase:
        text = text.lower()
    if letters_only:
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        text = points[_letters().take(points)].tobytes().decode("utf-32-le")
    return xxhash.xxh3_128_digest(text.strip().encode())


@cache
def _letters() -> np.ndarray:
    """Which code points stay when non-characters are ignored."""
    points = np.concatenate((np.arange(0xD800), np.arange(0xE000, _N_CODE_POINTS)))
    every = points.astype(np.uint32).tobytes().decode("utf-32-le")
    is_kept = np.ones(_N_CODE_POINTS, bool)
    is_kept[[ord(char) for match in regex.findall(_NOT_A_LETTER, every) for char in match]] = False
    return is_kept


@cache
def _ascii_tables() -> tuple[np.ndarray, np.ndarray]:
    """By byte: its lower case, or the mark of a dropped one; and whether its row is an odd one.

    Odd rows go the slow way: those that are not ASCII, and those with one of the separators that
    are no white space to the pattern but are to `str.strip`.
    """
    is_letter = _letters()[:128]
    lowered = np.full(256, _DROPPED, np.uint8)
    lowered[:128][is_letter] = [ord(chr(code).lower()) for code in np.flatnonzero(is_letter)]
    is_odd = np.arange(256) >= 0x80
    is_odd[[code for code in range(128) if chr(code).isspace() and is_letter[code]]] = True
    return lowered, is_odd


def repetition_ratio(text: str, n: int) -> float:
    """Share of `n`-character windows that belong to the most repeated ones.

    The windows counted as repeated are at most the square root of the number of distinct windows,
    most frequent first, and only those that occur more than once.
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
