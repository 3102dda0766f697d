"""Small pictures inside Markdown metadata: SVG in a data address, so nothing is fetched."""

import base64
import html
from collections.abc import Mapping, Sequence
from math import log10

import dagster as dg

from replay_pipeline.assets.metadata import inert

_INK, _DIM, _GRID = "#1c1f26", "#5f6675", "#e3e6ec"
_COLORS = ("#4f43dd", "#0e9f6e", "#d9480f", "#0b7285", "#a61e4d", "#5c940d")
_WIDTH, _PLOT_LEFT, _PLOT_WIDTH = 620, 58, 540
_N_BINS = 24


def bars(title: str, values: Mapping[str, float], unit: str = "") -> dg.MarkdownMetadataValue:
    """A horizontal bar chart; nothing to show is said in words."""
    if not values:
        return dg.MetadataValue.md(f"*{inert(title)}: none*")
    row_px, label_px, bar_px = 26, 210, 300
    top = max(values.values()) or 1.0
    parts = [_title(title)]
    for i, (label, value) in enumerate(values.items()):
        y = 34 + i * row_px
        width = bar_px * value / top
        parts += [
            _text(8, y + 15, label if len(label) <= 30 else label[:29] + "…"),
            f'<rect x="{label_px}" y="{y + 3}" width="{width:.1f}" height="17" rx="3" '
            f'fill="{_COLORS[0]}"/>',
            _text(label_px + width + 6, y + 16, f"{value:,.4g}{unit}", fill=_DIM),
        ]
    return _picture(title, "".join(parts), height=44 + row_px * len(values))


def curves(title: str, lines: Mapping[str, Sequence[float]]) -> dg.MarkdownMetadataValue:
    """One line per series over the steps, on one scale."""
    values = [value for line in lines.values() for value in line]
    if not values:
        return dg.MetadataValue.md(f"*{inert(title)}: none*")
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    parts = [_title(title)]
    for share in (0.0, 0.5, 1.0):
        y = 190 - 140 * share
        parts += [
            f'<line x1="{_PLOT_LEFT}" x2="{_PLOT_LEFT + _PLOT_WIDTH}" y1="{y}" y2="{y}" '
            f'stroke="{_GRID}"/>',
            _text(_PLOT_LEFT - 6, y + 4, f"{low + span * share:.3g}", fill=_DIM, anchor="end"),
        ]
    for i, (name, line) in enumerate(lines.items()):
        color = _COLORS[i % len(_COLORS)]
        step_px = _PLOT_WIDTH / max(1, len(line) - 1)
        points = " ".join(
            f"{_PLOT_LEFT + n * step_px:.1f},{190 - 140 * (value - low) / span:.1f}"
            for n, value in enumerate(line)
        )
        parts += [
            f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>',
            f'<rect x="{_PLOT_LEFT + i * 135}" y="207" width="10" height="10" rx="2" fill="{color}"/>',
            _text(_PLOT_LEFT + 14 + i * 135, 216, name),
        ]
    return _picture(title, "".join(parts), height=228)


def histogram(
    title: str, values: Sequence[float], *, marks: Mapping[str, float], unit: str
) -> dg.MarkdownMetadataValue:
    """How positive values are distributed, on a logarithmic axis, with lines at `marks`."""
    positive = [value for value in values if value > 0]
    if not positive:
        return dg.MetadataValue.md(f"*{inert(title)}: none*")
    low = log10(min(positive))
    span = (log10(max(positive)) - low) or 1.0
    counts = [0] * _N_BINS
    for value in positive:
        counts[min(int((log10(value) - low) / span * _N_BINS), _N_BINS - 1)] += 1
    bin_px, top = _PLOT_WIDTH / _N_BINS, max(counts)
    parts = [_title(title)]
    for i, count in enumerate(counts):
        height = 110 * count / top
        parts.append(
            f'<rect x="{_PLOT_LEFT + i * bin_px + 1:.1f}" y="{170 - height:.1f}" '
            f'width="{bin_px - 2:.1f}" height="{height:.1f}" rx="2" fill="{_COLORS[0]}"/>'
        )
    ends = {10**low: "start", 10 ** (low + span): "end"}
    for value, anchor in ends.items():
        x = _PLOT_LEFT if anchor == "start" else _PLOT_LEFT + _PLOT_WIDTH
        parts.append(_text(x, 188, f"{value:.3g}{unit}", fill=_DIM, anchor=anchor))
    for i, (name, value) in enumerate(marks.items()):
        x = _PLOT_LEFT + _PLOT_WIDTH * min(max((log10(value) - low) / span, 0.0), 1.0)
        color = _COLORS[2 - i % 2]
        parts += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="36" y2="170" stroke="{color}" stroke-width="2" '
            'stroke-dasharray="4 3"/>',
            _text(_PLOT_LEFT + 150 * i, 206, f"┆ {name} {value:.3g}{unit}", fill=color),
        ]
    return _picture(title, "".join(parts), height=216)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the ordered values lies; 0 of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _picture(title: str, body: str, *, height: float) -> dg.MarkdownMetadataValue:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>'
        f"{body}</svg>"
    )
    data = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{inert(title)}](data:image/svg+xml;base64,{data})")


def _title(title: str) -> str:
    return _text(8, 20, title, size=14, weight=600)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = _INK,
    anchor: str = "start",
    size: int = 12,
    weight: int = 400,
) -> str:
    shown = html.escape("".join(c for c in text if c.isprintable()))
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{shown}</text>'
    )
