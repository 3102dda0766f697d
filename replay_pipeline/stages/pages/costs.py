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
_LONG_PROMPT = 200_000
_CLOUD = re.compile(r"^(?:[a-z-]{2,8}\.)?anthropic\.")
"""What Amazon puts before the name of a model."""
_VERSION = re.compile(
    r"(-latest|[-@]\d{8}|-\d{4}-\d\d-\d\d|\[\w+\]|-v\d+(:\d+)?(:\w+)?|@default)+$"
)
"""What comes after the name of a model: a date, the size of its window, or a cloud's version."""


@cache
def _prices() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("prices.toml").read_text("utf-8"))


def prices_date() -> str:
    """Return the month in which the list prices were last compared with the vendors'."""
    return _prices()["date"]


def _name_of(model: str | None) -> str:
    return _VERSION.sub("", _CLOUD.sub("", (model or "").rpartition("/")[2]))


def list_price_usd(
    model: str | None, tokens: Mapping[str, int], *, of_prompt: float = 1.0, of_answer: float = 1.0
) -> float | None:
    """Return the list price of these tokens, or `None` if the model has no list price.

    `tokens` are counts by the names of `TOKENS`. What was sent and what was written may cost a multiple.
    """
    if (price := _prices()["models"].get(_name_of(model))) is None:
        return None
    fresh, output, *reading = price
    read = reading[0] if reading else _CACHE_READ * fresh
    units = tokens.get("input", 0) + _CACHE_WRITE * tokens.get("cache_write", 0)
    units += _CACHE_WRITE_1H * tokens.get("cache_write_1h", 0)
    usd = of_prompt * (units * fresh + tokens.get("cache_read", 0) * read)
    return (usd + of_answer * tokens.get("output", 0) * output) / 1e6


def turn_usd(turn: Row) -> float | None:
    """Return what a turn of the model cost at list prices, or `None` if that is not known."""
    prices, name, tokens = _prices(), _name_of(turn["model"]), tokens_of([turn])
    more = prices["region"].get(turn["inference_region"], 1.0)
    if turn["speed"] == "fast":
        if name not in prices["fast"]:
            return None
        more *= prices["fast"][name]
    prompt, answer, *until = prices["long"].get(name, (1.0, 1.0))
    at = turn["timestamp"]
    if tokens.total() - tokens["output"] <= _LONG_PROMPT or (
        until and at and at.date() >= until[0]
    ):
        prompt = answer = 1.0
    usd = list_price_usd(turn["model"], tokens, of_prompt=prompt * more, of_answer=answer * more)
    return usd if usd is None else usd + (turn["n_web_searches"] or 0) * prices["usd_per_search"]


def usd_of(turns: Iterable[Row]) -> tuple[float, list[str]]:
    """Return what turns of models cost at list prices, and which of these models have none."""
    usd, unknown = 0.0, set[str]()
    for turn in turns:
        each = turn_usd(turn) if turn["model"] is not None else 0.0
        usd += each or 0.0
        if each is None:
            unknown.add(f"{turn['model']}{' (fast)' if turn['speed'] == 'fast' else ''}")
    return usd, sorted(unknown)


def tokens_of(turns: Iterable[Row]) -> Counter[str]:
    """Add up the recorded tokens of turns."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update({name: turn[column] or 0 for name, column in TOKENS.items()})
    total["cache_write"] -= total["cache_write_1h"]
    return total
