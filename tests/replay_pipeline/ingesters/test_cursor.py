"""Runs of Cursor's command line agent, by the events of its documentation, read to states."""

import json
from pathlib import Path
from typing import Any

from tests.replay_pipeline.ingesters.test_other_agents import lines, read

SESSION = "c6b62c6f-7ead-4fd6-9922-e952131177ff"


def event(kind: str, subtype: str | None = None, **fields: Any) -> dict[str, Any]:
    head = {"type": kind} | ({"subtype": subtype} if subtype else {})
    return head | fields | {"session_id": SESSION}


def said(role: str, text: str) -> dict[str, Any]:
    return event(role, message={"role": role, "content": [{"type": "text", "text": text}]})


def tool(subtype: str, call_id: str, key: str, **call: Any) -> dict[str, Any]:
    return event("tool_call", subtype, call_id=call_id, tool_call={key: call})


def run() -> list[dict[str, Any]]:
    read_args, write_args = {"path": "README.md"}, {"path": "summary.txt", "fileText": "# Tide"}
    content = {"content": "# Tide", "isEmpty": False, "totalLines": 1, "totalChars": 6}
    written = {"path": "/srv/tide/summary.txt", "linesCreated": 1, "fileSize": 6}
    return [
        event(
            "system",
            "init",
            apiKeySource="login",
            cwd="/srv/tide",
            model="Claude 4 Sonnet",
            permissionMode="default",
        ),
        said("user", "Read README.md and create a summary"),
        said("assistant", "I'll read the README.md file"),
        tool("started", "call_1", "readToolCall", args=read_args),
        tool("completed", "call_1", "readToolCall", args=read_args, result={"success": content}),
        said("assistant", "Based on the README, I'll create a summary"),
        tool("started", "call_2", "writeToolCall", args=write_args),
        tool("completed", "call_2", "writeToolCall", args=write_args, result={"success": written}),
        said("assistant", "Done!"),
        event("result", "success", duration_ms=5234, is_error=False, result="Done!"),
    ]


def test_a_run_of_cursor_is_read_to_states(tmp_path: Path):
    result, states = read(lines(tmp_path / "run.jsonl", *run()))
    assert result.sessions["agent"].to_pylist() == ["cursor"]
    assert result.sessions["session_id"].to_pylist() == [SESSION]
    assert set(result.states["student_model"].to_pylist()) == {"Claude 4 Sonnet"}
    assert [state["outcome"] for state in states] == ["ok", "ok", "final_text"]
    calls = [call["function"] for s in states for call in s["student_action"].get("tool_calls", ())]
    assert [call["name"] for call in calls] == ["read", "write"]
    assert json.loads(calls[0]["arguments"]) == {"path": "README.md"}
    answers = [m["content"] for m in states[-1]["messages"] if m["role"] == "tool"]
    assert answers[0] == "# Tide"
    assert json.loads(answers[1])["linesCreated"] == 1
    assert result.report.skipped == {"bookkeeping": 1}


def test_other_tools_failures_refusals_and_lost_starts_are_read(tmp_path: Path):
    function = {"name": "mcp_search", "arguments": '{"q": "tide"}'}
    rows = [
        *run()[:2],
        tool("started", "c1", "function", **function),
        tool("completed", "c1", "function", **function, result={"error": {"content": "no server"}}),
        tool("completed", "c2", "shellToolCall", args={"command": "rm x"}, result={"rejected": {}}),
        event("tool_call", "started", call_id="c3", tool_call={}),
    ]
    result, (first, second) = read(lines(tmp_path / "run.jsonl", *rows))
    assert (first["outcome"], first["hint"]) == ("tool_error", "no server")
    (call,) = first["student_action"]["tool_calls"]
    assert call["function"] == {"name": "mcp_search", "arguments": '{"q": "tide"}'}
    assert second["outcome"] == "user_rejected"
    assert result.report.skipped == {"no_message": 1}
