"""Arrow schemas of the tables at rest: the contract with everything outside this package.

They are declared in `tables.toml`, with what each column means. Messages, tool lists and statistics
are kept as JSON text: their shape differs from row to row, and a struct column would merge the
shapes. Each table is written by `replay_pipeline.storage.tables`, which stamps `schema_version` into
the file and checks it on reading.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

SCHEMA_VERSION = "3"
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


_COLUMNS: dict[str, dict[str, list[str]]] = {}
"""Kind and meaning of each column, by table."""

TABLES: dict[str, pa.Schema] = {}
"""Every table at rest by name."""

REPEATING: dict[str, list[str]] = {}
"""Columns of names and labels: a dictionary shortens them, unlike texts, ids and numbers."""

ABOUT: dict[str, str] = {}
"""What a row of each table is."""

WRITTEN_BY: dict[str, str] = {}
"""The command that writes each table."""


def declare(table: str, declared: Mapping[str, Any]) -> None:
    """Declare a table from `tables.toml`: its rows, its writer, and its columns.

    Args:
        table: its name.
        declared: `about`, `written_by`, `columns` (kind and meaning by name), and `extends` where
            the columns of another table come first.

    Raises:
        KeyError: a kind is not known.
    """
    inherited = _COLUMNS[declared["extends"]] if "extends" in declared else {}
    columns = _COLUMNS[table] = {**inherited, **declared["columns"]}
    TABLES[table] = pa.schema([(name, _KINDS[kind]) for name, (kind, *_) in columns.items()])
    REPEATING[table] = [name for name, (kind, *_) in columns.items() if kind == "name"]
    ABOUT[table] = declared["about"]
    WRITTEN_BY[table] = declared["written_by"]


for _table, _declared in _DECLARED["tables"].items():
    declare(_table, _declared)

INGESTED = tuple(name for name, command in WRITTEN_BY.items() if command == "ingest")
"""The tables of an ingestion."""

PROMPT = pa.schema([("state_messages_json", pa.string()), ("tools_json", pa.string())])
"""What a state had shown. At rest a pair names its state; these are put in where they are needed,
since a prefix in every row takes two hundred times the room of the turns it is made of."""

DPO_PAIRS, POSITIVES, OUTCOMES = TABLES["dpo_pairs"], TABLES["positives"], TABLES["outcomes"]
NORMALIZED_PAIRS, DROPPED_PAIRS = TABLES["normalized_pairs"], TABLES["dropped_pairs"]


def describe(table: str, column: str) -> str:
    """Return the description of `column` in `table`; raises KeyError where there is none."""
    _, *own = _COLUMNS[table][column]
    return own[0] if own else _DECLARED["everywhere"][column]
