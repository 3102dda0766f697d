"""Receipts and tables as what people look at in Dagster: numbers, tables, text.

Every plain number under a key becomes a chart over the partitions in the UI by itself. Text of
sessions and answers is untrusted: it reaches Markdown through `inert` or `code_block` only.
"""

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from replay_pipeline.redaction.printable import printable
from replay_pipeline.storage.schemas import TABLES, describe

_SHOWN_CHARS = 400
_BLOCK_CHARS = 4_000
_MARKS = "\\`*_[]|!#~:@."
"""What Markdown, and its habit of linking every address it sees, would act on."""


def column_schema(table: str) -> dg.TableSchema:
    """The columns of a table, with what they mean, for the asset's Columns tab."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(field.name, str(field.type), description=describe(table, field.name))
            for field in TABLES[table]
        ]
    )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> dg.MarkdownMetadataValue:
    """`rows` as a Markdown table; all text is inert."""
    if not rows:
        return dg.MetadataValue.md("*none*")
    names = list(rows[0])
    lines = [
        "| " + " | ".join(map(inert, names)) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(inert(row[name]) for name in names) + " |" for row in rows),
    ]
    return dg.MetadataValue.md("\n".join(lines))


def inert(value: object) -> str:
    """`value` as Markdown text that is shown and never interpreted, cut to a readable length."""
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
    shown = html.escape(printable(text).replace("\n", " ⏎ "), quote=False)
    # The joiner is invisible; without it, Markdown links the address that the entities spell.
    shown = re.sub(r"(?i)(https?|ftp|www|mailto|xmpp)(?=[:.])|(?=@)", "\\g<0>\u2060", shown)
    return re.sub(f"[{re.escape(_MARKS)}]", lambda mark: f"&#{ord(mark[0])};", shown)


def code_block(text: str, language: str = "text") -> str:
    """`text` as a Markdown block in which nothing is interpreted, cut to a readable length."""
    text = text if len(text) <= _BLOCK_CHARS else text[:_BLOCK_CHARS] + "\n…"
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"
