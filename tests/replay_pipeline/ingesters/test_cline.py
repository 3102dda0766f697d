"""Tasks of Cline, in both forms in which it keeps them, read to states."""

import json
from pathlib import Path
from typing import Any

from tests.replay_pipeline.ingesters.test_other_agents import read

MODEL = {"modelId": "claude-sonnet-4-6", "providerId": "anthropic", "mode": "act"}
TOKENS = {"tokens": {"prompt": 1000, "completion": 20, "cached": 900}, "cost": 0.01}
METRICS = {"inputTokens": 1000, "outputTokens": 20, "cacheReadTokens": 800, "cacheWriteTokens": 100}


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "read_file", "input": arguments}


def answer(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def task(model: dict[str, Any], metrics: dict[str, Any]) -> list[dict[str, Any]]:
    by_model = {"role": "assistant", "modelInfo": model, "metrics": metrics}
    return [
        {"role": "user", "content": [text("<task>\nFix it\n</task>")], "ts": 1773683224000},
        {
            **by_model,
            "content": [
                {"type": "thinking", "thinking": "Where?", "signature": "c2ln"},
                text("I look."),
                call("toolu_1", path="a.ts"),
                call("toolu_2", path="b.ts"),
            ],
        },
        # The SDK keeps each result of parallel calls as a message of its own.
        {"role": "user", "content": [answer("toolu_1", "const a = 1")]},
        {"role": "user", "content": [answer("toolu_2", [text("no such file")], is_error=True)]},
        {"role": "user", "content": [text("Leave b out.")]},
        {**by_model, "content": [text("Done.")], "ts": 1773683230000},
    ]


def check(path: Path) -> list[dict[str, Any]]:
    result, (first, second) = read(path)
    assert result.sessions["agent"].to_pylist() == ["cline"]
    assert (first["outcome"], second["outcome"]) == ("tool_error", "final_text")
    assert first["hint"] == "no such file"
    assert result.states["n_context_tokens"].to_pylist() == [1000, 1000]
    assert set(result.states["student_model"].to_pylist()) == {"claude-sonnet-4-6"}
    names = [c["function"]["arguments"] for c in first["student_action"]["tool_calls"]]
    assert names == ['{"path":"a.ts"}', '{"path":"b.ts"}']
    assert [m["content"] for m in second["messages"][-3:]] == [
        "const a = 1", "no such file", "Leave b out."
    ]  # fmt: skip
    assert result.report.skipped == {}
    return second["messages"]


def test_a_task_of_the_extension_is_read_to_states(tmp_path: Path):
    path = tmp_path / "1773683224000" / "api_conversation_history.json"
    path.parent.mkdir()
    path.write_text(json.dumps(task(MODEL, TOKENS)))
    check(path)


def session(**fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "updated_at": "2026-04-10T19:00:02.000Z",
        "agent": "lead",
        "sessionId": "1773683224000_x1y2z",
        "origin": {"source": "cli", "version": "3.99.0"},
        "messages": task({"id": "claude-sonnet-4-6", "provider": "anthropic"}, METRICS),
        "system_prompt": "You are Cline.",
    } | fields


def test_a_session_of_the_sdk_is_read_with_its_system_prompt(tmp_path: Path):
    path = tmp_path / "1773683224000_x1y2z.messages.json"
    path.write_text(json.dumps(session(), indent=2))
    assert [m["content"] for m in check(path)[:2]] == ["You are Cline.", "<task>\nFix it\n</task>"]


def test_a_teammate_of_a_session_is_told_from_it(tmp_path: Path):
    origin = {"source": "cli", "parentThreadId": "lead-1", "subagent": "haiku", "version": "3.99.0"}
    path = tmp_path / "haiku__1.messages.json"
    path.write_text(json.dumps(session(agent="teammate", sessionId="team-1", origin=origin)))
    row = read(path)[0].sessions.to_pylist()[0]
    assert (row["parent_session_id"], row["agent_id"]) == ("lead-1", "team-1")


def test_what_a_tool_gave_that_is_no_text_is_shown_as_it_was_kept(tmp_path: Path):
    kept = [{"query": "a.ts", "result": "42", "success": True}]
    messages = task(MODEL, TOKENS)
    messages[2]["content"] = [answer("toolu_1", kept)]
    path = tmp_path / "a.messages.json"
    path.write_text(json.dumps(session(messages=messages)))
    _, (_, second) = read(path)
    assert second["messages"][-3]["content"] == '{"query":"a.ts","result":"42","success":true}'


def test_what_the_extension_keeps_beside_a_task_is_no_session(tmp_path: Path):
    path = tmp_path / "api_conversation_history.json"
    path.write_text(json.dumps(task(MODEL, TOKENS)))
    shown = [{"ts": 1773683224000, "type": "say", "say": "text", "text": '{"role": "content"}'}]
    (tmp_path / "ui_messages.json").write_text(json.dumps(shown))
    (tmp_path / "task_metadata.json").write_text('{"files_in_context": [], "model_usage": []}')
    result, states = read(tmp_path)
    assert len(states) == 2
    assert result.report.skipped_files == {"foreign": 2}
