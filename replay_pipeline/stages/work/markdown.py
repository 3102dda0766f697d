"""Markdown for people, in Dagster and elsewhere: tables, and bars and curves as text.

Text of sessions and answers is untrusted, so it enters Markdown only through `literal_markdown` or
`code_block`.
"""

import html
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from replay_pipeline.redaction.printable import printable

_SHOWN_CHARS = 400
_BLOCK_CHARS = 4_000
_MARKS = "\\`*_[]|!#~:@."
"""What Markdown, and its habit of linking every address it sees, would act on."""


class Markdown(str):
    """Text that is rendered as Markdown instead of shown as it is."""

    __slots__ = ()


class Location(str):
    """A file or an object that can be opened."""

    __slots__ = ()


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> Markdown:
    """Return `rows` as a Markdown table in which all text is inert."""
    if not rows:
        return Markdown("*none*")
    names = list(rows[0])
    lines = [
        "| " + " | ".join(map(literal_markdown, names)) + " |",
        "|" + " --- |" * len(names),
        *("| " + " | ".join(literal_markdown(row[name]) for name in names) + " |" for row in rows),
    ]
    return Markdown("\n".join(lines))


def literal_markdown(value: object) -> str:
    """Return `value` as literal Markdown text, cut to a readable length."""
    text = f"{value:,.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " …"
    shown = html.escape(printable(text).replace("\n", " ⏎ "), quote=False)
    # The joiner is invisible; without it, Markdown links the address that the entities spell.
    shown = re.sub(r"(?i)(https?|ftp|www|mailto|xmpp)(?=[:.])|(?=@)", "\\g<0>\u2060", shown)
    return re.sub(f"[{re.escape(_MARKS)}]", lambda mark: f"&#{ord(mark[0])};", shown)


def code_block(text: str, language: str = "text") -> str:
    """Return `text` as a literal Markdown code block, cut to a readable length."""
    text = text if len(text) <= _BLOCK_CHARS else text[:_BLOCK_CHARS] + "\n…"
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


_MAX_BARS = 12
_BAR_CHARS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bars(values: Mapping[str, float]) -> Markdown:
    """Return a table with a bar for each value, the largest first."""
    if not values:
        return Markdown("*none*")
    ordered = sorted(values.items(), key=lambda item: -item[1])
    shown, rest = ordered[:_MAX_BARS], ordered[_MAX_BARS:]
    if rest:
        shown.append((f"{len(rest)} more", sum(value for _, value in rest)))
    top = max(value for _, value in shown) or 1.0
    lines = ["| | | |", "|---|--:|---|"]
    for name, value in shown:
        whole, eighths = divmod(round(value / top * _BAR_CHARS * 8), 8)
        bar = "█" * whole + _EIGHTHS[eighths].strip()
        lines.append(f"| {literal_markdown(name)} | {value:,.4g} | {bar} |")
    return Markdown("\n".join(lines))


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Draw a curve as one line of blocks. The height of a block is the mean over a part of the curve."""
    n = min(width, len(values))
    means = [fmean(values[k * len(values) // n : (k + 1) * len(values) // n]) for k in range(n)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span)] for mean in means)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of the ordered values lies, or 0 without values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
