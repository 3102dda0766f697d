"""Convert teacher answers between the records of `types.py` and the rows of the stored table."""

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgspec
import pyarrow as pa

from replay_pipeline.storage.pair_rows import json_or_none, json_value
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import Look, TeacherAction

_PLAIN = tuple(f.name for f in fields(TeacherAction) if f.name not in ("action", "looks"))


def teacher_actions_table(
    actions: Iterable[TeacherAction], name: str = "teacher_actions"
) -> pa.Table:
    """Return one row per answer, in a fixed order: by state, then by teacher."""
    rows = sorted(actions, key=lambda row: (row.state_id, row.teacher, row.n_after or 0))
    return table_of([_to_row(action) for action in rows], name)


def teacher_actions_from_table(table: pa.Table) -> list[TeacherAction]:
    """Return the answers that `teacher_actions_table` wrote, but for steps behind the votes."""
    return [_from_row(row) for row in table.to_pylist() if row.get("n_after") is None]


def continuations_from_table(table: pa.Table) -> list[TeacherAction]:
    """Return the steps behind the votes."""
    if "n_after" not in table.column_names:
        return []
    return [_from_row(row) for row in table.filter(table["n_after"].is_valid()).to_pylist()]


def _to_row(answer: TeacherAction) -> dict[str, Any]:
    row = {name: getattr(answer, name) for name in _PLAIN}
    if answer.action is not None:
        calls = answer.action.get("tool_calls") or []
        row["action_text"] = answer.action.get("content") or ""
        row["action_tool_calls_json"] = json.dumps(calls, ensure_ascii=False)
    if answer.looks:
        row["looks_json"] = json_or_none(msgspec.to_builtins(answer.looks))
    return row


def _from_row(row: dict[str, Any]) -> TeacherAction:
    action = None
    if row["action_tool_calls_json"] is not None:
        action = {"role": "assistant", "content": row["action_text"]}
        if calls := json.loads(row["action_tool_calls_json"]):
            action["tool_calls"] = calls
    looks = msgspec.convert(json_value(row.get("looks_json") or "[]"), tuple[Look, ...])
    # A table that was written before steps behind votes has only votes.
    plain: dict[str, Any] = {"n_after": None, **row}
    return TeacherAction(action=action, looks=looks, **{name: plain[name] for name in _PLAIN})
