"""Pairs of agent actions, as the stage before writes them."""

import json
from typing import Any

import pyarrow as pa

from tests.full_tables import full_table

READ = {
    "type": "function",
    "function": {
        "name": "Read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"file_path": {"type": "string"}}},
    },
}


def row(
    state_id: str = "s1",
    *,
    chosen: str = "read the tests before the change",
    rejected: str = "change the code right away",
    chosen_action: dict | None = None,
    rejected_action: dict | None = None,
    prompt: str | None = None,
    tools: list[dict] | None = None,
    **others: Any,
) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt or f"Please fix the bug in {state_id}."}]
    return {
        "state_id": state_id,
        "session_id": "session-1",
        "state_messages_json": json.dumps(messages),
        "tools_json": None if tools is None else json.dumps(tools),
        "chosen": chosen,
        "rejected": rejected,
        "chosen_action_json": None if chosen_action is None else json.dumps(chosen_action),
        "rejected_action_json": None if rejected_action is None else json.dumps(rejected_action),
        "n_teachers_agreeing": 2,
        **others,
    }


def pair_table(*rows: dict[str, Any]) -> pa.Table:
    return full_table(list(rows), "dpo_pairs")
