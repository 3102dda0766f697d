"""Rollouts of Agent Lightning, as events, read to states."""

import json
from pathlib import Path
from typing import Any

from tests.replay_pipeline.ingesters.test_other_agents import lines, read

ROOMS = "get_rooms_and_availability"
CALL_ID = "call_sZkwxqiOmCx4n1iIQw5KhoQ0"
ARGUMENTS = json.dumps({"date": "2025-10-13", "time": "16:30", "duration_min": 30})
PARAMETERS = {"type": "object", "properties": {"date": {"type": "string"}}, "required": ["date"]}
FREE = '{"rooms": [{"id": "Lyra", "free": true}]}'
SYSTEM = {"role": "system", "content": "You are a scheduling assistant."}
USER = {"role": "user", "content": "Find a room."}


def event(number: int, kind: str, **data: Any) -> dict[str, Any]:
    head = {"event_type": kind, "rollout_id": "ro-1", "attempt_id": "0"}
    return head | {"timestamp": 1760000000.0 + number, "data": data}


def requested(number: int, prompt: list[Any], answer: dict[str, Any], n: int) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": ROOMS, "parameters": PARAMETERS}}
    choice = {"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": "stop"}
    model = "gpt-5-mini-2025-08-07"
    return event(
        number,
        "model_request",
        model="gpt-5-mini",
        request={"messages": prompt, "tools": [tool]},
        response={"model": model, "choices": [choice]},
        usage={"prompt_tokens": n, "completion_tokens": 5},
        status="ok",
    )


def events() -> list[dict[str, Any]]:
    """A call, its answer, a decision, and a grader's prompt of its own."""
    function = {"name": ROOMS, "arguments": ARGUMENTS}
    called = {
        "content": None,
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
    }
    tool = {"role": "tool", "content": FREE, "tool_call_id": CALL_ID}
    second = [SYSTEM, USER, {"role": "assistant", **called}, tool]
    return [
        requested(1, [SYSTEM, USER], called, 332),
        requested(2, second, {"content": "final_choice: No Room"}, 691),
        requested(3, [{"role": "user", "content": "Score it"}], {"content": "1"}, 98),
        event(4, "reward", value=1.0),
    ]


def test_events_of_a_rollout_are_read_to_states(tmp_path: Path):
    result, (first, second, grade) = read(lines(tmp_path / "events.jsonl", *events()))
    assert result.sessions["agent"].to_pylist() == ["agent_lightning"]
    (call,) = first["student_action"]["tool_calls"]
    assert call["function"] == {"name": ROOMS, "arguments": ARGUMENTS}
    assert [m["role"] for m in second["messages"][-3:]] == ["user", "assistant", "tool"]
    assert second["messages"][-1]["content"] == FREE
    assert second["student_action"]["content"] == "final_choice: No Room"
    assert "Score it" in grade["messages"][-1]["content"]
    assert len(grade["messages"]) < len(second["messages"])
    assert result.states["n_context_tokens"].to_pylist() == [332, 691, 98]
    assert set(result.states["student_model"].to_pylist()) == {"gpt-5-mini-2025-08-07"}
    assert result.tools["source"].to_pylist() == ["recorded"]
    assert result.report.skipped == {"bookkeeping": 1}


def test_attempts_are_sessions_of_their_own_and_failed_requests_are_counted(tmp_path: Path):
    failed = event(5, "model_request", model="m", request={"messages": [USER]}, response={})
    again = [{**row, "attempt_id": "1"} for row in events()]
    result, states = read(lines(tmp_path / "events.jsonl", *events(), *again, failed))
    assert len(states) == 6
    assert result.sessions.num_rows == 2
    assert result.report.skipped == {"bookkeeping": 2, "no_message": 1}
