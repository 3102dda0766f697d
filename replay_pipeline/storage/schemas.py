"""Arrow schemas of the tables at rest: the contract with everything outside this package.

They are declared in `tables.toml`, with what each column means. Messages, tool lists and statistics
are kept as JSON text: their shape differs from row to row, and a struct column would merge the
shapes. Each table is written by `replay_pipeline.storage.tables`, which stamps `schema_version` into
the file and checks it on reading.
"""

import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = "2"
"""Raised when a column changes its meaning or goes; a new nullable column does not raise it."""

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


def _columns_of(table: str) -> dict[str, list[str]]:
    """Kind and meaning of each column, those of the table that it extends first."""
    declared = _DECLARED["tables"][table]
    inherited = _columns_of(declared["extends"]) if "extends" in declared else {}
    return inherited | declared["columns"]


_COLUMNS = {table: _columns_of(table) for table in _DECLARED["tables"]}

TABLES: dict[str, pa.Schema] = {
    table: pa.schema([(name, _KINDS[kind]) for name, (kind, *_) in columns.items()])
    for table, columns in _COLUMNS.items()
}
"""Every table at rest by name."""

REPEATING: dict[str, list[str]] = {
    table: [name for name, (kind, *_) in columns.items() if kind == "name"]
    for table, columns in _COLUMNS.items()
}
"""Columns of names and labels: a dictionary shortens them, unlike texts, ids and numbers."""

ABOUT: dict[str, str] = {name: table["about"] for name, table in _DECLARED["tables"].items()}
"""What a row of each table is."""

WRITTEN_BY: dict[str, str] = {
    name: table["written_by"] for name, table in _DECLARED["tables"].items()
}
"""The command that writes each table."""

INGESTED = tuple(name for name, command in WRITTEN_BY.items() if command == "ingest")
"""The tables of an ingestion."""

DPO_PAIRS, POSITIVES, OUTCOMES = TABLES["dpo_pairs"], TABLES["positives"], TABLES["outcomes"]
NORMALIZED_PAIRS, DROPPED_PAIRS = TABLES["normalized_pairs"], TABLES["dropped_pairs"]


def describe(table: str, column: str) -> str:
    """Say what `column` of `table` means; raises KeyError where nothing is written about it."""
    _, *own = _COLUMNS[table][column]
    return own[0] if own else _DECLARED["everywhere"][column]
