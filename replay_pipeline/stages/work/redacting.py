"""Redact stored tables, for sessions whose logs no longer exist."""

from collections.abc import Callable, Mapping

import pyarrow as pa

from replay_pipeline.ingesters.log_rows import Cleaner
from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.storage.arrays import string_array

_TEXTS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("project",),
    "turns": ("cwd", "messages_json", "thinking"),
    "states": ("cwd", "action_text", "action_tool_calls_json", "hint"),
    "tools": ("tool_json",),
}
"""The columns of an ingestion that hold what people and programs wrote."""


def redacted_again(
    tables: Mapping[str, pa.Table], *, salt: str
) -> tuple[dict[str, pa.Table], dict[str, int]]:
    """Redact ingested tables by today's rules, and return them with the number of replacements.

    Placeholders don't change, so tables without new findings come back equal.

    Args:
        tables: `sessions`, `turns`, `states` and `tools` of one batch.
        salt: makes the placeholders of this installation different from others.
    """
    redactor = Redactor(salt=salt)
    cleaner = Cleaner(redactor, frozenset())
    redacted = {name: _with_texts(tables[name], name, cleaner) for name in tables}
    return redacted, dict(redactor.counts)


def _with_texts(table: pa.Table, name: str, cleaner: Cleaner) -> pa.Table:
    for column in _TEXTS[name]:
        clean: Callable[[str], str] = (
            cleaner.arguments if column.endswith("_json") else cleaner.text
        )
        values = [text and clean(text) for text in table[column].to_pylist()]
        place = table.column_names.index(column)
        table = table.set_column(place, table.field(column), string_array(values))
    return table
