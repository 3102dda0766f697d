"""Upgrade ledgers of earlier versions when they are opened."""

import types
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any, get_args, get_type_hints

import msgspec

from replay_pipeline.replay.money.calls import decode_row, encode_row
from replay_pipeline.replay.money.schema import Database
from replay_pipeline.types import TeacherAction

_LONGEST_CALL = timedelta(seconds=600)
"""Version 1 did not keep how long a call may take; this was the default of every teacher."""

_ROWS_AT_ONCE = 1000


def from_version_1(database: Database) -> None:
    """Add the columns of version 2, and repair rows that version 1 could not read again.

    Version 1 stored an endpoint's values unchecked. One reply with a number as its id made every
    later run over its state fail.
    """
    for column in ("due_at", "generation_id"):
        database.query(f"alter table calls add column {column} text")
    for call_id, sent_at in database.query(
        "select id, intent_at from calls where state in ('open', 'unknown')"
    ):
        due_at = datetime.fromisoformat(sent_at) + _LONGEST_CALL
        database.query("update calls set due_at = ? where id = ?", (due_at.isoformat(), call_id))
    last = -1
    while rows := database.query(
        "select id, row from calls where id > ? and row is not null order by id limit ?",
        (last, _ROWS_AT_ONCE),
    ):
        mended = [(new, call_id) for call_id, row in rows if (new := mend(bytes(row)))]
        if mended:
            database.run_many("update calls set row = ? where id = ?", mended)
        last = rows[-1][0]
    database.query(
        "insert into limits(set_at, scope, limit_nano, set_by) "
        "select ?, name, limit_nano, 'version 1' from scopes "
        "where limit_nano is not null and name not like 'run:%'",
        (datetime.now().astimezone().isoformat(timespec="milliseconds"),),
    )
    database.query("update ledger set value = '2' where key = 'schema_version'")


def from_version_2(database: Database) -> None:
    """Add the columns of version 3: the time and request of a call, and why its cost was disputed."""
    for column in ("sent_at", "body_sha", "disputed"):
        database.query(f"alter table calls add column {column} text")
    database.query("update ledger set value = '3' where key = 'schema_version'")


UPGRADES = {"1": from_version_1, "2": from_version_2}
"""The upgrade from each earlier version to the next."""


def mend(row: bytes) -> bytes | None:
    """Return a row with its declared types, or None if it needs no change or can't be read.

    >>> mend(b'{"state_id": "s", "teacher": "t", "generation_id": 123, "n_prompt_tokens": "10"}')
    b'{"state_id":"s","teacher":"t","action":null,"model":null,"family":null,...
    """
    try:
        decode_row(row)
    except msgspec.ValidationError:
        found: dict[str, Any] = msgspec.json.decode(row)
    else:
        return None
    if not isinstance(found, dict):
        return None
    hints = get_type_hints(TeacherAction)
    kept = {}
    for each in fields(TeacherAction):
        if each.name in found:
            try:
                kept[each.name] = msgspec.convert(found[each.name], hints[each.name], strict=False)
            except msgspec.ValidationError:
                kept[each.name] = _as_text(found[each.name], hints[each.name])
    return encode_row(TeacherAction(**{k: v for k, v in kept.items() if v is not None}))


def _as_text(value: Any, hint: Any) -> str | None:
    """Keep a name that was sent as a number; whatever else does not fit is left out."""
    is_optional_text = isinstance(hint, types.UnionType) and str in get_args(hint)
    return str(value) if is_optional_text and isinstance(value, int | float) else None
