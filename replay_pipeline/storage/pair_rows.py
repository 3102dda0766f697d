"""Convert preference pairs to table rows and back. Only here do messages become JSON text."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from replay_pipeline.errors import SchemaError
from replay_pipeline.storage.schemas import PROMPT
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import DPOPair, NormalizedDPOPair

_JSON_COLUMNS = {
    "chosen_action": "chosen_action_json",
    "rejected_action": "rejected_action_json",
    "action_message": "action_json",
}
_CHAT_COLUMNS = {
    "chosen_messages": "chosen_messages_json",
    "rejected_messages": "rejected_messages_json",
    "stats": "stats_json",
}
_OF_STATES = {
    **dict(zip(PROMPT.names, ("messages", "tools"), strict=True)),
    "client_texts_json": "client_texts",
}
"""What a part with prompts has of its states, by column."""
_KEYS = {column: key for key, column in _JSON_COLUMNS.items()}
_OF_THE_STATE = ("state_messages", "tools")
_NOT_UTF8 = (UnicodeEncodeError, TypeError, OverflowError)
"""Raised for what UTF-8 JSON cannot hold: half of a surrogate pair, or a very large number."""

ROWS_AT_ONCE = 16
"""Number of pairs whose prompts are in memory at once. A real prompt takes about 180 KB, and some a megabyte."""

PromptsOf = Callable[[Sequence[str]], Iterable[Mapping[str, Any]]]
"""Returns the states with these ids, with `messages` and `tools`. Unknown ids are left out."""


def json_or_none(value: Any) -> str | None:
    """Return a value as JSON text, or None."""
    if value is None:
        return None
    try:
        return msgspec.json.encode(value).decode()
    except _NOT_UTF8:
        # A lone surrogate cannot be stored as UTF-8, but its escape can.
        return json.dumps(value, separators=(",", ":"))


def json_value(text: str) -> Any:
    """Read JSON text. Half of a surrogate pair, which UTF-8 can't encode, becomes a question mark.

    Raises:
        ValueError: the text isn't JSON.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        whole = json.dumps(json.loads(text), ensure_ascii=False)
        return msgspec.json.decode(whole.encode("utf-8", "replace"))


def pair_id_of(state_id: str, chosen: str, rejected: str) -> str:
    """Return the id of a pair, made from its state and both sides, so that a mark applies to exactly these sides."""
    parts = json.dumps([state_id, chosen, rejected]).encode()
    return f"p_{hashlib.blake2b(parts, digest_size=8).hexdigest()}"


def id_of_pair(pair: Mapping[str, Any]) -> str:
    """Return the id of a pair. A pair from elsewhere gets an id by the same rule."""
    return pair.get("pair_id") or pair_id_of(pair["state_id"], pair["chosen"], pair["rejected"])


def row_of_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pair (or positive) to a row, with actions as JSON text and without its prompt.

    In plain text, which has no escapes, half of a surrogate pair becomes a question mark.
    """
    return {
        _JSON_COLUMNS.get(key, key): json_or_none(value)
        if key in _JSON_COLUMNS
        else _storable(value)
        for key, value in pair.items()
        if key not in _OF_THE_STATE
    }


def _storable(value: Any) -> Any:
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()


def pairs_of(table: pa.Table, prompts: PromptsOf) -> Iterator[DPOPair]:
    """Yield the pairs in rows of `dpo_pairs`. Null columns are left out."""
    for start in range(0, len(table), ROWS_AT_ONCE):
        rows = table.slice(start, ROWS_AT_ONCE).to_pylist()
        states = _by_id(prompts, [row["state_id"] for row in rows])
        for row in rows:
            pair = {
                _KEYS.get(column, column): json.loads(value) if column in _KEYS else value
                for column, value in row.items()
                if value is not None
            }
            if (state := states.get(row["state_id"])) is not None:
                pair["state_messages"] = state["messages"]
                pair |= {"tools": state["tools"]} if state.get("tools") is not None else {}
            yield cast("DPOPair", pair)


def table_with_prompts(pairs: Iterable[NormalizedDPOPair]) -> pa.Table:
    """Return normalized pairs as a table `normalized_pairs` with its prompts.

    Raises:
        SchemaError: an item isn't a pair, was not normalized, or doesn't fit its column.
    """
    given = list(pairs)
    for pair in given:
        if not isinstance(pair, Mapping):
            raise SchemaError(f"{pair!r} is neither a pair nor a batch: (key, table)")
        if missing := [key for key in ("state_id", "state_messages") if key not in pair]:
            raise SchemaError(f"a pair lacks {' and '.join(missing)}")
        if "chosen_messages" not in pair:
            raise SchemaError(
                f"the pair at {pair['state_id']} is not in chat form yet; call "
                "DJNormalizer().normalize(pairs) first"
            )
    table = table_of(
        [
            row_of_pair({key: value for key, value in pair.items() if key not in _CHAT_COLUMNS})
            | {column: json_or_none(pair.get(key)) for key, column in _CHAT_COLUMNS.items()}
            for pair in given
        ],
        "normalized_pairs",
    )
    for column, key in zip(PROMPT.names, _OF_THE_STATE, strict=True):
        texts = [json_or_none(pair.get(key)) for pair in given]
        table = table.append_column(column, pa.array(texts, pa.string()))
    return table


def with_prompts(
    table: pa.Table, prompts: PromptsOf | None, *, n_rows: int = ROWS_AT_ONCE
) -> Iterator[pa.Table]:
    """Yield a table in parts, with each state's messages in the columns of `PROMPT`.

    Raises:
        SchemaError: the rows have no prompts, and `prompts` isn't given.
    """
    is_full = set(PROMPT.names) <= set(table.column_names)
    if len(table) and prompts is None and not is_full:
        raise SchemaError(
            "the rows name their states but hold no prompts; pass the states as `prompts`, or pass pairs instead of a table"
        )
    for start in range(0, len(table), n_rows):
        part = table.slice(start, n_rows)
        if not is_full and prompts is not None:
            ids = part["state_id"].to_pylist()
            states = _by_id(prompts, ids)
            for column, key in _OF_STATES.items():
                texts = [json_or_none(states.get(state_id, {}).get(key)) for state_id in ids]
                part = part.append_column(column, pa.array(texts, pa.string()))
        yield _with_looks(part)


def _with_looks(part: pa.Table) -> pa.Table:
    """Put the looks of lessons behind the prompts of their states."""
    if "looks_json" not in part.column_names or part["looks_json"].null_count == len(part):
        return part
    name = PROMPT.names[0]
    texts = [
        prompt if looks is None or prompt is None else f"{prompt[:-1]},{looks[1:]}"
        for prompt, looks in zip(
            *(part[each].to_pylist() for each in (name, "looks_json")), strict=True
        )
    ]
    return part.set_column(part.column_names.index(name), name, pa.array(texts, pa.string()))


def _by_id(prompts: PromptsOf, ids: Sequence[str | None]) -> dict[str, Mapping[str, Any]]:
    wanted = [state_id for state_id in dict.fromkeys(ids) if state_id is not None]
    return {state["state_id"]: state for state in prompts(wanted)}
