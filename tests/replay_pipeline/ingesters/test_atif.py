"""Trajectories of ATIF, read to states."""

import json
from pathlib import Path
from typing import Any

from tests.replay_pipeline.ingesters.test_other_agents import lines, read

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def trajectory(**fields: Any) -> dict[str, Any]:
    steps = [
        {"source": "system", "message": "Be brief."},
        {"source": "user", "message": [{"type": "text", "text": "Fix it"}]},
        {
            "source": "agent",
            "timestamp": "2026-03-01T10:00:00Z",
            "message": "I look.",
            "reasoning_content": "Where?",
            "tool_calls": [
                {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "make"}}
            ],
            "observation": {"results": [{"source_call_id": "c1", "content": "no rule"}]},
            "metrics": {"prompt_tokens": 900, "cached_tokens": 600, "completion_tokens": 20},
        },
        {"source": "agent", "message": "ran a hook", "llm_call_count": 0},
        {"source": "agent", "message": "Done.", "model_name": "m-2"},
    ]
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "run-1",
        "agent": {
            "name": "terminus-2",
            "version": "2.0",
            "model_name": "m-1",
            "tool_definitions": [TOOL],
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    } | fields


def check(path: Path) -> None:
    result, (first, last) = read(path)
    assert result.sessions["agent"].to_pylist() == ["terminus-2"]
    assert [m["role"] for m in first["messages"]][-1] == "user"
    assert first["student_action"]["tool_calls"][0]["function"]["arguments"] == '{"command":"make"}'
    assert result.states["n_context_tokens"].to_pylist() == [900, None]
    assert result.states["student_model"].to_pylist() == ["m-1", "m-2"]
    assert [m["content"] for m in last["messages"]][-2:] == ["no rule", "ran a hook"]
    assert set(result.tools["name"].to_pylist()) == {"bash"}
    assert set(result.tools["source"].to_pylist()) == {"recorded"}


def test_a_trajectory_is_read_to_states(tmp_path: Path):
    document = tmp_path / "trajectory.json"
    document.write_text(json.dumps(trajectory(), indent=2))
    check(document)
    check(lines(tmp_path / "lines" / "trajectories.jsonl", trajectory()))


def test_embedded_subagents_are_conversations_of_their_own(tmp_path: Path):
    inner = trajectory(trajectory_id="inner")
    path = lines(tmp_path / "t.jsonl", trajectory(subagent_trajectories=[inner]))
    result, states = read(path)
    assert len(states) == 4
    assert result.sessions["parent_session_id"].to_pylist() == [None, "run-1"]


def test_steps_copied_for_context_are_seen_and_not_decided(tmp_path: Path):
    whole = trajectory()
    whole["steps"][2]["is_copied_context"] = True
    _, (state,) = read(lines(tmp_path / "t.jsonl", whole))
    assert [m["role"] for m in state["messages"]].count("tool") == 1
