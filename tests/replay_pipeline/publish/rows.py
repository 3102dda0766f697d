"""Tables as the normalizer writes them."""

import json
from typing import Any

import pyarrow as pa

from tests.full_tables import full_table
from tests.support.messages import call


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    function = {"name": name, "description": f"{name} something.", "parameters": parameters}
    return {"type": "function", "function": function}


def kept_row(number: int, *, session: str | None = None, **others: Any) -> dict[str, Any]:
    chosen = call("Read", file_path=f"src/module_{number}.py")
    rejected = {"role": "assistant", "content": f"I will guess what module {number} does."}
    messages = [
        {"role": "user", "content": f"Why does test {number} fail?"},
        call("Grep", pattern=f"test_{number}"),
        {"role": "tool", "tool_call_id": "call_1", "content": f"tests/test_{number}.py:3"},
    ]
    return {
        "state_id": f"state-{number}",
        "session_id": session or f"session-{number % 7}",
        "state_messages_json": json.dumps(messages),
        "tools_json": json.dumps(
            [tool("Read", file_path="string"), tool("Grep", pattern="string")]
        ),
        "chosen": "Read",
        "rejected": rejected["content"],
        "chosen_action_json": json.dumps(chosen),
        "rejected_action_json": json.dumps(rejected),
        "n_teachers_agreeing": 2,
        "n_teachers_asked": 3,
        "n_teachers_valid": 3,
        "teachers_agreeing": ["deepseek", "qwen"],
        "agreement_level": "exact",
        "margin": 1,
        "source": "consensus",
        "rejected_source": "recorded",
        "hint": "The file does not exist." if number % 2 else None,
        "outcome": "ok",
        "student_model": "student-1",
        "shares_vendor": False,
        "is_distillable": number % 3 != 0,
        "cost_usd": 0.25,
        "weight": 1.0,
        "chosen_messages_json": json.dumps([chosen]),
        "rejected_messages_json": json.dumps([rejected]),
        "stats_json": "{}",
        **others,
    }


def positive_row(number: int, *, session: str | None = None) -> dict[str, Any]:
    row = kept_row(number, session=session)
    return {
        **row,
        "state_id": f"agreed-{number}",
        "action": "Read",
        "action_json": row["chosen_action_json"],
    }


def kept_table(*rows: dict[str, Any] | int) -> pa.Table:
    found = [kept_row(row) if isinstance(row, int) else row for row in rows]
    return full_table(found, "normalized_pairs")


def positives_table(*rows: dict[str, Any] | int) -> pa.Table:
    found = [positive_row(row) if isinstance(row, int) else row for row in rows]
    return full_table(found, "positives")
