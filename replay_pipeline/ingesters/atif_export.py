"""Export of sessions as ATIF trajectories."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.corpus import IngestResult
from replay_pipeline.ingesters.json_lines import UNREADABLE
from replay_pipeline.storage.store import written_whole

VERSION = "ATIF-v1.7"
"""The version that is written. All its fields also exist in 1.8."""


def write_trajectories(tables: IngestResult, folder: Path) -> int:
    """Write one file for each trajectory, named by its id. Returns how many.

    Raises:
        StorageError: the folder cannot be written.
    """
    n_files = 0
    for trajectory in trajectories(tables):
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in trajectory["trajectory_id"])
        with written_whole(folder / f"{name}.json") as file:
            file.write(json.dumps(trajectory, indent=1).encode() + b"\n")
        n_files += 1
    return n_files


def trajectories(tables: IngestResult) -> Iterator[dict[str, Any]]:
    """Yield ingested sessions as ATIF trajectories, one for each stretch between two compactions.

    A trajectory has no branches: where a session branches, it follows the longest branch. `notes`
    counts the others.
    """
    states = {(row["session_id"], row["turn_idx"]): row for row in tables.states.to_pylist()}
    turns: dict[str, dict[int, dict[str, Any]]] = {}
    for row in tables.turns.to_pylist():
        if row["turn_idx"] < 0:  # the same once more, as it was sent
            continue
        turns.setdefault(row["session_id"], {})[row["turn_idx"]] = row
    tools = {row["name"]: msgspec.json.decode(row["tool_json"]) for row in tables.tools.to_pylist()}
    for session in tables.sessions.to_pylist():
        own = turns.get(session["session_id"], {})
        last_by_segment = {row["segment"]: index for index, row in sorted(own.items())}
        for segment, last in sorted(last_by_segment.items()):
            path, index = [], last
            while index is not None:
                path.append(own[index])
                index = own[index]["parent_turn_idx"]
            n_others = sum(
                own[i]["segment"] == segment for i in own.keys() - {row["turn_idx"] for row in path}
            )
            steps = [
                step
                for row in reversed(path)
                if (step := _written(row, states.get((row["session_id"], row["turn_idx"]))))
            ]
            if any(step["source"] == "agent" for step in steps):
                yield _trajectory(session, segment, steps, tools, n_others)


def _trajectory(
    session: dict[str, Any],
    segment: int,
    steps: list[dict[str, Any]],
    tools: dict[str, Any],
    n_others: int,
) -> dict[str, Any]:
    called = {call["function_name"] for step in steps for call in step.get("tool_calls", ())}
    agent: dict[str, Any] = {
        "name": session["agent"],
        "version": (session["versions"] or ["unknown"])[-1],
        "tool_definitions": [tools[name] for name in sorted(called & tools.keys())],
    }
    if session["models"]:
        agent["model_name"] = session["models"][-1]
    trajectory = {
        "schema_version": VERSION,
        "session_id": session["session_id"],
        "trajectory_id": f"{session['session_id']}-{segment}",
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    }
    if n_others:
        trajectory["notes"] = f"{n_others} turns of branches that were given up are left out."
    return trajectory


def _written(row: dict[str, Any], state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a turn as a step, without its number."""
    messages = msgspec.json.decode(row["messages_json"])
    step: dict[str, Any] = {}
    if row["timestamp"] is not None:
        moment = row["timestamp"]
        if not isinstance(moment, datetime):
            moment = datetime.fromtimestamp(moment / 1000, UTC)
        step["timestamp"] = moment.isoformat()
    if row["kind"] != "assistant":
        text = "\n\n".join(message["content"] for message in messages)
        kind = {"extra": {"kind": row["kind"]}} if row["kind"] != "user" else {}
        return {**step, "source": "user", "message": text, **kind} if text else None
    if state is not None:
        action = {
            "content": state["action_text"],
            "tool_calls": msgspec.json.decode(state["action_tool_calls_json"] or b"[]"),
        }
    else:
        action, *messages = messages
        step["is_copied_context"] = True
    step |= {"source": "agent", "message": action.get("content") or ""}
    if row["model"]:
        step["model_name"] = row["model"]
    if row["thinking"]:
        step["reasoning_content"] = row["thinking"]
    if calls := [_call(call) for call in action.get("tool_calls", ())]:
        step["tool_calls"] = calls
        step["observation"] = {
            "results": [
                {"source_call_id": message["tool_call_id"], "content": message["content"]}
                for message in messages
                if message["role"] == "tool"
            ]
        }
    if row["n_input_tokens"] is not None:
        n_cached = row["n_cache_read_tokens"] or 0
        n_new = row["n_input_tokens"] + (row["n_cache_creation_tokens"] or 0)
        step["metrics"] = {
            "prompt_tokens": n_new + n_cached,
            "cached_tokens": n_cached,
            "completion_tokens": row["n_output_tokens"] or 0,
        }
    return step


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except UNREADABLE:
        arguments = function["arguments"]
    if not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {
        "tool_call_id": call["id"],
        "function_name": function["name"],
        "arguments": arguments,
    }
