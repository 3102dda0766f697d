"""Pairs, positives and outcomes as rows of their tables, and back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from replay_pipeline.tables import table_of
from replay_pipeline.types import DPOPair

_JSON_COLUMNS = {
    "state_messages": "state_messages_json",
    "tools": "tools_json",
    "chosen_action": "chosen_action_json",
    "rejected_action": "rejected_action_json",
    "action_message": "action_json",
}
_KEYS = {column: key for key, column in _JSON_COLUMNS.items()}


def pairs_table(pairs: Iterable[DPOPair]) -> pa.Table:
    """Pairs as the table `dpo_pairs`."""
    return table_of([row_of_pair(pair) for pair in pairs], "dpo_pairs")


def pairs_from_table(table: pa.Table) -> list[DPOPair]:
    """The pairs that `pairs_table` wrote. Other columns are kept as they are."""
    return [pair_of_row(row) for row in table.to_pylist()]


def positives_table(positives: Sequence[Mapping[str, Any]]) -> pa.Table:
    """States at which teachers and student agree, as the table `positives`."""
    return table_of([row_of_pair(positive) for positive in positives], "positives")


def outcomes_table(outcomes: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One row per state, as the table `outcomes`."""
    return table_of([dict(outcome) for outcome in outcomes], "outcomes")


def row_of_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    """A pair (or positive) with its messages and tools as JSON text."""
    return {
        _JSON_COLUMNS.get(key, key): _json(value) if key in _JSON_COLUMNS else value
        for key, value in pair.items()
    }


def pair_of_row(row: Mapping[str, Any]) -> DPOPair:
    """The pair behind a row of `dpo_pairs`; columns without a value are left out."""
    pair = {
        _KEYS.get(column, column): json.loads(value) if column in _KEYS else value
        for column, value in row.items()
        if value is not None
    }
    return cast("DPOPair", pair)


def _json(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, TypeError, OverflowError):
        # A lone surrogate cannot be stored as UTF-8, but its escape can.
        return json.dumps(value, separators=(",", ":"))
