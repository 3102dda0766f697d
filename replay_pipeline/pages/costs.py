"""What recorded tokens cost at list prices. `look`, `ingest`, and `compare` all use this module."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
TOKENS = {
    "input": "n_input_tokens",
    "cache_write": "n_cache_creation_tokens",
    "cache_write_1h": "n_cache_creation_1h_tokens",
    "cache_read": "n_cache_read_tokens",
    "output": "n_output_tokens",
}
"""Columns of `turns` by price category. `cache_write` excludes tokens that are written for an hour."""
_CACHE_WRITE, _CACHE_WRITE_1H, _CACHE_READ = 1.25, 2.0, 0.1
_VERSION = re.compile(r"(-latest|[-@]\d{8}|-\d{4}-\d\d-\d\d|\[\w+\])+$")
"""What comes after the name of a model: a date, or the size of its window."""


@cache
def _prices() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("prices.toml").read_text("utf-8"))


def prices_date() -> str:
    """Return the month in which the list prices were last compared with the vendors'."""
    return _prices()["date"]


def list_price_usd(model: str | None, tokens: Mapping[str, int]) -> float | None:
    """Return the list price of these tokens, or `None` if the model has no list price.

    Args:
        model: name of the model in the log.
        tokens: counts by the names of `TOKENS`.
    """
    name = _VERSION.sub("", (model or "").rpartition("/")[2])
    if (price := _prices()["models"].get(name)) is None:
        return None
    fresh, output, *reading = price
    read = reading[0] if reading else _CACHE_READ * fresh
    units = tokens.get("input", 0) + _CACHE_WRITE * tokens.get("cache_write", 0)
    units += _CACHE_WRITE_1H * tokens.get("cache_write_1h", 0)
    usd = units * fresh + tokens.get("cache_read", 0) * read + tokens.get("output", 0) * output
    return usd / 1e6


def tokens_of(turns: Iterable[Row]) -> Counter[str]:
    """Add up the recorded tokens of turns."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update({name: turn[column] or 0 for name, column in TOKENS.items()})
    total["cache_write"] -= total["cache_write_1h"]
    return total


def by_model(turns: Iterable[Row]) -> dict[str, list[Row]]:
    """Group turns by the model that wrote them."""
    groups: dict[str, list[Row]] = {}
    for turn in turns:
        if turn["model"] is not None:
            groups.setdefault(turn["model"], []).append(turn)
    return groups
