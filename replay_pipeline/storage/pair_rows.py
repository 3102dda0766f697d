"""A preference pair as a row of its table, and back: the one place where messages become JSON text."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from replay_pipeline.types import DPOPair

_JSON_COLUMNS = {
    "state_messages": "state_messages_json",
    "tools": "tools_json",
    "chosen_action": "chosen_action_json",
    "rejected_action": "rejected_action_json",
    "action_message": "action_json",
}
_KEYS = {column: key for key, column in _JSON_COLUMNS.items()}
NOT_UTF8 = (UnicodeEncodeError, TypeError, OverflowError)
"""Raised for what UTF-8 JSON cannot hold: half of a surrogate pair, or a very large number."""


def json_text(value: Any) -> str | None:
    """Return a value as JSON text, `None` as it is."""
    if value is None:
        return None
    try:
        return msgspec.json.encode(value).decode()
    except NOT_UTF8:
        # A lone surrogate cannot be stored as UTF-8, but its escape can.
        return json.dumps(value, separators=(",", ":"))


def json_value(text: str) -> Any:
    """Read JSON text; half of a surrogate pair, which UTF-8 cannot hold, becomes a question mark.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        whole = json.dumps(json.loads(text), ensure_ascii=False)
        return msgspec.json.decode(whole.encode("utf-8", "replace"))


def pair_id_of(state_id: str, chosen: str, rejected: str) -> str:
    """Name a pair by its state and its two sides, so that a mark on it means these sides."""
    parts = json.dumps([state_id, chosen, rejected]).encode()
    return f"p_{hashlib.blake2b(parts, digest_size=8).hexdigest()}"


def id_of_pair(pair: Mapping[str, Any]) -> str:
    """Give the id of a pair; one that was made elsewhere is named as ours are."""
    return pair.get("pair_id") or pair_id_of(pair["state_id"], pair["chosen"], pair["rejected"])


def row_of_pair(
    pair: Mapping[str, Any], *, as_json: Callable[[Any], str | bytes | None] = json_text
) -> dict[str, Any]:
    """Turn a pair (or positive) into a row: its messages and tools become JSON text.

    In a plain text, which has no escapes, half of a surrogate pair becomes a question mark.
    """
    return {
        _JSON_COLUMNS.get(key, key): as_json(value) if key in _JSON_COLUMNS else _storable(value)
        for key, value in pair.items()
    }


def _storable(value: Any) -> Any:
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


def pair_of_row(row: Mapping[str, Any]) -> DPOPair:
    """Turn a row of `dpo_pairs` back into its pair; columns without a value are left out."""
    pair = {
        _KEYS.get(column, column): json.loads(value) if column in _KEYS else value
        for column, value in row.items()
        if value is not None
    }
    return cast("DPOPair", pair)
