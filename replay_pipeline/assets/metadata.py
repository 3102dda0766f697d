"""Receipts and tables as what people look at in Dagster: numbers, tables and small plots.

Every plain number under a key becomes a chart over the partitions in the UI by itself.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from replay_pipeline.columns import describe
from replay_pipeline.schemas import TABLES

_SHOWN_CHARS = 400


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
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(inert(row[name]) for name in names) + " |" for row in rows]
    return dg.MetadataValue.md("\n".join(lines))


def inert(value: object) -> str:
    """`value` as Markdown text that is shown and never interpreted, cut to a readable length."""
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
    escaped = html.escape(shown, quote=False)
    for mark in "\\`*_[]|!#~":
        escaped = escaped.replace(mark, f"&#{ord(mark)};")
    return escaped.replace("\n", "<br>")


def bars(title: str, values: Mapping[str, float], unit: str = "") -> dg.MarkdownMetadataValue:
    """A horizontal bar chart as an inline picture."""
    row_px, label_px, bar_px = 26, 210, 300
    top = max(values.values(), default=0.0) or 1.0
    parts = [
        f'<text x="6" y="20" font-size="14" font-weight="600" fill="#222">{_svg(title)}</text>'
    ]
    for i, (label, value) in enumerate(values.items()):
        y = 34 + i * row_px
        width = bar_px * value / top
        parts += [
            f'<text x="6" y="{y + 15}" font-size="12" fill="#444">{_svg(label[:32])}</text>',
            f'<rect x="{label_px}" y="{y + 3}" width="{width:.1f}" height="17" rx="3" fill="#4f43dd"/>',
            f'<text x="{label_px + width + 6:.1f}" y="{y + 16}" font-size="12" fill="#444">'
            f"{value:,.4g}{_svg(unit)}</text>",
        ]
    return _picture(title, "".join(parts), height=44 + row_px * len(values))


def curve(title: str, values: Sequence[float]) -> dg.MarkdownMetadataValue:
    """A line over the steps as an inline picture."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0
    step_px = 500 / max(1, len(values) - 1)
    points = " ".join(
        f"{50 + i * step_px:.1f},{170 - 130 * (value - low) / span:.1f}"
        for i, value in enumerate(values)
    )
    body = (
        f'<text x="6" y="20" font-size="14" font-weight="600" fill="#222">{_svg(title)}</text>'
        f'<text x="6" y="44" font-size="11" fill="#444">{high:.3g}</text>'
        f'<text x="6" y="174" font-size="11" fill="#444">{low:.3g}</text>'
        f'<polyline fill="none" stroke="#4f43dd" stroke-width="2" points="{points}"/>'
    )
    return _picture(title, body, height=190)


def _picture(title: str, body: str, *, height: int) -> dg.MarkdownMetadataValue:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="580" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
        f"{body}</svg>"
    )
    data = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{inert(title)}](data:image/svg+xml;base64,{data})")


def _svg(text: str) -> str:
    return html.escape("".join(c for c in text if c.isprintable()))
