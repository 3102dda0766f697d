"""The Arrow schemas of stored tables, which other programs rely on.

`tables.toml` declares them, with the meaning of each column. Messages, tool lists, and statistics
are JSON text, because their shape differs from row to row and a struct column would merge the
shapes. `replay_pipeline.storage.tables` writes each table with a `schema_version`, and checks it on
reading.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = "3"
"""It increases when a column changes its meaning or is removed. A new nullable column doesn't increase it."""

_KINDS: dict[str, pa.DataType] = {
    **dict.fromkeys(("text", "name", "json"), pa.string()),
    "names": pa.list_(pa.string()),
    "time": pa.timestamp("ms", tz="UTC"),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
}
_DECLARED: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables.toml").read_text("utf-8")
)


_COLUMNS: dict[str, dict[str, list[str]]] = {}
"""Kind and meaning of each column, by table."""

TABLES: dict[str, pa.Schema] = {}
"""Every stored table by name."""

REPEATING: dict[str, list[str]] = {}
"""Columns of names and labels, which dictionary encoding shortens, unlike texts, ids, and numbers."""

ABOUT: dict[str, str] = {}
"""The meaning of a row of each table."""

WRITTEN_BY: dict[str, str] = {}
"""The command that writes each table."""


def declare(table: str, declared: Mapping[str, Any]) -> None:
    """Declare a table from its entry in `tables.toml`; the columns of one that it `extends` come first.

    Raises:
        KeyError: a kind is unknown.
    """
    inherited = _COLUMNS[declared["extends"]] if "extends" in declared else {}
    columns = _COLUMNS[table] = {**inherited, **declared["columns"]}
    TABLES[table] = pa.schema([(name, _KINDS[kind]) for name, (kind, *_) in columns.items()])
    REPEATING[table] = [name for name, (kind, *_) in columns.items() if kind == "name"]
    ABOUT[table] = declared["about"]
    WRITTEN_BY[table] = declared["written_by"]


for _table, _declared in _DECLARED["tables"].items():
    declare(_table, _declared)

PROMPT = pa.schema([("state_messages_json", pa.string()), ("tools_json", pa.string())])
"""The prompt of a state. A stored pair only names its state, and these columns are added when
needed. A prefix in every row would take two hundred times the space of its turns."""

DPO_PAIRS, POSITIVES = TABLES["dpo_pairs"], TABLES["positives"]
NORMALIZED_PAIRS, DROPPED_PAIRS = TABLES["normalized_pairs"], TABLES["dropped_pairs"]
DROPPED_POSITIVES = TABLES["dropped_positives"]


def describe(table: str, column: str) -> str:
    """Return the description of `column` in `table`. Raises KeyError if there is none."""
    _, *own = _COLUMNS[table][column]
    return own[0] if own else _DECLARED["everywhere"][column]
