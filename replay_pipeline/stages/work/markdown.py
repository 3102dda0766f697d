"""Markdown for people, in Dagster and elsewhere: tables, bars as text, and curves as SVG.

Text of sessions and answers is untrusted, so it enters Markdown only through `literal_markdown` or
`code_block`.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
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


MAX_CHARS = 999
"""Dagster shows up to 1,000 characters of Markdown in place, and hides the rest behind a click. So a
picture takes few bytes: no title (the key is one), whole pixels, and one path."""
_BLUE, _GRAY = "#43d", "#667"
_MAX_BARS = 12
_BAR_CHARS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDTH, _HEIGHT = 440, 142
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 432, 8, 120
_MAX_POINTS = 50


def bars(values: Mapping[str, float]) -> Markdown:
    """Return a table with a bar for each value, the largest first."""
    if not values:
        return Markdown("*none*")
    ordered = sorted(values.items(), key=lambda item: -item[1])
    shown, rest = ordered[:_MAX_BARS], ordered[_MAX_BARS:]
    if rest:
        shown.append((f"{len(rest)} more", sum(value for _, value in rest)))
    top = max(value for _, value in shown) or 1.0
    lines = [
        f"| {literal_markdown(name)} | {value:,.4g} | {_bar(value / top)} |"
        for name, value in shown
    ]
    return Markdown("\n".join(["| | | |", "|---|--:|---|", *lines]))


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * _BAR_CHARS * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].strip()


def curve(name: str, values: Sequence[float]) -> Markdown:
    """Return a curve over the steps of a run."""
    if not values:
        return Markdown("*none*")
    shown = _thinned(values)
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    step_px = (_RIGHT - _LEFT) / max(1, len(shown) - 1)
    points = " ".join(
        f"{_LEFT + i * step_px:.0f},{_BOTTOM - (_BOTTOM - _TOP) * (value - low) / span:.0f}"
        for i, value in enumerate(shown)
    )
    body = (
        f'<polyline fill="none" stroke="{_BLUE}" stroke-width="2" points="{points}"/>'
        + _label(4, _TOP + 4, f"{high:.3g}")
        + _label(4, _BOTTOM, f"{low:.3g}")
        + _label(_LEFT, 137, "step 1")
        + _label(_RIGHT - 24, 137, str(len(values)))
    )
    return _picture(name, body)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of the ordered values lies, or 0 without values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _thinned(values: Sequence[float]) -> Sequence[float]:
    step = -(-len(values) // _MAX_POINTS)
    return values if step <= 1 else [*values[:-1:step], values[-1]]


def _picture(name: str, body: str) -> Markdown:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'style="background:#fff" font-size="11" font-family="sans-serif">{body}</svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    return Markdown(f"![{literal_markdown(name)}](data:image/svg+xml;base64,{data})")


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{_GRAY}">{html.escape(text)}</text>'
