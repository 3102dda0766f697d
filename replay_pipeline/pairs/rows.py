"""Pairs, positives and outcomes as rows of their tables, and back."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from replay_pipeline.storage.pair_rows import NOT_UTF8, json_text, pair_of_row, row_of_pair
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import DPOPair

_PART_BYTES = 32_000_000


def pairs_table(pairs: Iterable[DPOPair]) -> pa.Table:
    """Pairs as the table `dpo_pairs`."""
    return pa.concat_tables(pairs_parts(pairs))


def pairs_parts(pairs: Iterable[DPOPair]) -> Iterator[pa.Table]:
    """`pairs_table` in parts: a row has its whole prefix, so that all may take gigabytes."""
    return _parts(pairs, "dpo_pairs")


def pairs_from_table(table: pa.Table) -> list[DPOPair]:
    """The pairs that `pairs_table` wrote. Other columns are kept as they are."""
    return [pair_of_row(row) for row in table.to_pylist()]


def positives_table(positives: Iterable[Mapping[str, Any]]) -> pa.Table:
    """States at which teachers and student agree, as the table `positives`."""
    return pa.concat_tables(positives_parts(positives))


def positives_parts(positives: Iterable[Mapping[str, Any]]) -> Iterator[pa.Table]:
    """`positives_table` in parts."""
    return _parts(positives, "positives")


def outcomes_table(outcomes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One row per state, as the table `outcomes`."""
    return table_of([dict(outcome) for outcome in outcomes], "outcomes")


def _parts(pairs: Iterable[Mapping[str, Any]], name: str) -> Iterator[pa.Table]:
    """Tables of about `_PART_BYTES` bytes; one without rows if there is no pair."""
    as_json = _SharedJson()
    rows: list[dict[str, Any]] = []
    n_bytes, is_first = 0, True
    for pair in pairs:
        row = row_of_pair(pair, as_json=as_json)
        rows.append(row)
        n_bytes += sum(len(value) for value in row.values() if isinstance(value, str | bytes))
        if n_bytes > _PART_BYTES:
            yield table_of(rows, name)
            rows, n_bytes, is_first = [], 0, False
    if rows or is_first:
        yield table_of(rows, name)


class _SharedJson:
    """JSON text of lists that share their items, as the prefixes of a session do."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bytes]] = {}
        self._n_bytes = 0

    def __call__(self, value: Any) -> str | bytes | None:
        if not isinstance(value, list):
            return json_text(value)
        try:
            return b"[%b]" % b",".join(map(self._item, value))
        except NOT_UTF8:
            return json_text(value)

    def _item(self, item: object) -> bytes:
        known = self._known.get(id(item))
        if known is not None:
            return known[1]
        text = msgspec.json.encode(item)
        self._n_bytes += len(text)
        if self._n_bytes > _PART_BYTES:
            self._known.clear()
            self._n_bytes = len(text)
        self._known[id(item)] = (item, text)  # the item keeps its id while it is here
        return text
