"""Rollouts of Agent Lightning, as spans and as events, read to states.

The spans have the attributes of its own test of how they become messages.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.replay_pipeline.ingesters.test_other_agents import check_damaged, lines, read

ROOMS = "get_rooms_and_availability"
CALL_ID = "call_sZkwxqiOmCx4n1iIQw5KhoQ0"
ARGUMENTS = json.dumps({"date": "2025-10-13", "time": "16:30", "duration_min": 30})
PARAMETERS = {"type": "object", "properties": {"date": {"type": "string"}}, "required": ["date"]}
FREE = '{"rooms": [{"id": "Lyra", "free": true}]}'
SYSTEM = {"role": "system", "content": "You are a scheduling assistant."}
USER = {"role": "user", "content": "Find a room."}


def span(number: int, name: str, attributes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": number,
        "trace_id": f"trace-{number}",
        "span_id": f"span-{number}",
        "parent_id": None,
        "name": name,
        "status": {"status_code": "OK", "description": None},
        "attributes": attributes,
        "events": [],
        "links": [],
        "start_time": 1760000000.0 + number,
        "end_time": None,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    } | fields


def flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, item in value.items() for k, v in flat(f"{prefix}.{key}", item).items()}


def asked(number: int, prompt: list[Any], answer: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    function = {"name": ROOMS, "description": "Rooms.", "parameters": json.dumps(PARAMETERS)}
    more = {
        "gen_ai.response.model": "gpt-5-mini-2025-08-07",
        "gen_ai.usage.prompt_tokens": n_tokens,
        "gen_ai.usage.completion_tokens": 59,
    }
    asked = {"model": "gpt-5-mini", "functions": [function]}
    attributes = flat("gen_ai.prompt", prompt) | flat("gen_ai.completion", [answer])
    attributes |= flat("gen_ai.request", asked)
    return span(number, "openai.chat.completion", attributes | more)


def spans(*, names_the_caller: bool, is_in_span: bool) -> list[dict[str, Any]]:
    """A call, its answer, a decision, and a grader's prompt of its own.

    Args:
        names_the_caller: whether the second prompt holds the message that called.
        is_in_span: whether the call is in the span of its message, else in one below.
    """
    call = {"id": CALL_ID, "name": ROOMS, "arguments": ARGUMENTS}
    caller = {"role": "assistant", "tool_calls": [call]}
    tool = {"role": "tool", "content": FREE, "tool_call_id": CALL_ID}
    below = {"tool.name": ROOMS, "tool.parameters": ARGUMENTS, "tool.call.id": CALL_ID}
    decision = {"role": "assistant", "content": "final_choice: No Room", "finish_reason": "stop"}
    grader = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Score it"}]
    return [
        span(0, f"tool_call.{ROOMS}", {} if is_in_span else below, parent_id="span-1"),
        asked(
            1,
            [SYSTEM, USER],
            {"finish_reason": "tool_calls", **(caller if is_in_span else {"role": "assistant"})},
            332,
        ),
        asked(2, [SYSTEM, USER, *([caller] if names_the_caller else []), tool], decision, 691),
        asked(3, grader, {"role": "assistant", "content": '{"score": 1}'}, 98),
    ]


def check(path: Path) -> None:
    result, (first, second, grade) = read(path)
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


@pytest.mark.parametrize("names_the_caller", [True, False])
@pytest.mark.parametrize("is_in_span", [True, False])
def test_spans_of_a_rollout_are_read_to_states(
    tmp_path: Path, names_the_caller: bool, is_in_span: bool
):
    rows = spans(names_the_caller=names_the_caller, is_in_span=is_in_span)
    check(lines(tmp_path / "spans.jsonl", *rows))


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


def test_events_of_a_rollout_are_read_to_states(tmp_path: Path):
    call = {
        "id": CALL_ID,
        "type": "function",
        "function": {"name": ROOMS, "arguments": ARGUMENTS},
    }
    tool = {"role": "tool", "content": FREE, "tool_call_id": CALL_ID}
    called = {"content": None, "tool_calls": [call]}
    rows = [
        requested(1, [SYSTEM, USER], called, 332),
        requested(
            2,
            [SYSTEM, USER, {"role": "assistant", **called}, tool],
            {"content": "final_choice: No Room"},
            691,
        ),
        requested(3, [{"role": "user", "content": "Score it"}], {"content": "1"}, 98),
        event(4, "reward", value=1.0),
    ]
    check(lines(tmp_path / "events.jsonl", *rows))


def test_attempts_are_sessions_of_their_own_and_failed_requests_are_counted(tmp_path: Path):
    rows = spans(names_the_caller=True, is_in_span=True)
    failed = event(5, "model_request", model="m", request={"messages": [USER]}, response={})
    again = [{**row, "attempt_id": "0"} for row in rows]
    result, states = read(lines(tmp_path / "spans.jsonl", *rows, *again, failed))
    assert len(states) == 6
    assert result.sessions.num_rows == 2
    assert result.report.skipped == {"bookkeeping": 2, "no_message": 1}


def test_damage_to_a_rollout_is_no_exception(tmp_path: Path):
    rows = spans(names_the_caller=True, is_in_span=False)
    check_damaged([json.dumps(row).encode() + b"\n" for row in rows], tmp_path / "spans.jsonl")
