"""Sessions of other agents, told by their content and read to the same states."""

import json
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import IngestResult, ingest
from tests.replay_pipeline.ingesters.logs import shape, states_of


def lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> tuple[IngestResult, list[dict[str, Any]]]:
    result = ingest(path, redact=False)
    report = result.report
    assert report.rows == report.rows_used + sum(report.skipped.values())
    return result, states_of(result)


def codex_items() -> list[dict[str, Any]]:
    return [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look"}]},
        {
            "type": "function_call",
            "name": "shell",
            "call_id": "c1",
            "arguments": '{"command": ["bash", "-lc", "make"]}',
        },
        {"type": "function_call", "name": "shell", "call_id": "c2", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": '{"output": "no rule", "metadata": {"exit_code": 2}}',
        },
        {"type": "function_call_output", "call_id": "c2", "output": "fine"},
        {"type": "custom_tool_call", "name": "apply_patch", "call_id": "c3", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "Success"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Fixed."}],
        },
    ]


def codex(folder: Path) -> Path:
    usage = {"input_tokens": 900, "cached_input_tokens": 600, "output_tokens": 20}
    count = {"type": "token_count", "info": {"last_token_usage": usage}}
    rows = [
        {
            "type": "session_meta",
            "payload": {"id": "s-codex", "cwd": "/w/shop", "cli_version": "0.58.0"},
        },
        {"type": "turn_context", "payload": {"cwd": "/w/shop", "model": "gpt-5-codex"}},
        *({"type": "response_item", "payload": item} for item in codex_items()[:4]),
        {"type": "event_msg", "payload": count},
        {"type": "event_msg", "payload": {"type": "agent_message", "message": "x"}},
        *({"type": "response_item", "payload": item} for item in codex_items()[4:]),
        {"type": "compacted", "payload": {"message": "So far: fixed."}},
        {
            "type": "response_item",
            "payload": {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Anything else?"}],
            },
        },
    ]
    stamped = [{"timestamp": f"2026-03-01T10:00:{i:02d}.000Z"} | r for i, r in enumerate(rows)]
    return lines(folder / "rollout-2026.jsonl", *stamped)


def test_a_codex_rollout_is_read_to_states(tmp_path: Path):
    result, states = read(codex(tmp_path))
    assert [shape([s["student_action"]])[0] for s in states] == [
        "(c1+c2)",
        "(c3)",
        "Fixed.",
        "Anything else?",
    ]
    assert shape(states[1]["messages"]) == ["> Fix it", "(c1+c2)", "c1=no rule", "c2=fine"]
    assert shape(states[3]["messages"]) == ["> So far: fixed."]
    assert (states[0]["outcome"], states[0]["n_context_tokens"]) == ("tool_error", 900)
    assert states[0]["student_model"] == "gpt-5-codex"
    (session,) = result.sessions.to_pylist()
    assert (session["session_id"], session["agent"]) == ("s-codex", "codex")
    assert result.report.skipped == {"bookkeeping": 1}


def rollout(folder: Path, *rows: tuple[str, dict[str, Any]], instructions: str = "") -> Path:
    """A rollout of a later version: one payload per row, as the agent's own protocol has them."""
    meta = {"id": "s2", "cwd": "/w/shop", "cli_version": "0.116.0", "originator": "codex_exec"}
    meta |= {"base_instructions": {"text": instructions}}
    return lines(
        folder / "rollout-2.jsonl",
        *(
            {
                "timestamp": f"2026-03-01T10:{i // 60:02d}:{i % 60:02d}.000Z",
                "type": kind,
                "payload": p,
            }
            for i, (kind, p) in enumerate([("session_meta", meta), *rows])
        ),
    )


def said(role: str, text: str) -> tuple[str, dict[str, Any]]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return "response_item", {"type": "message", "role": role, "content": content}


def ran(call_id: str, output: str | None) -> list[tuple[str, dict[str, Any]]]:
    call = {"type": "function_call", "name": "exec_command", "call_id": call_id, "arguments": "{}"}
    rows: list[tuple[str, dict[str, Any]]] = [("response_item", call)]
    if output is not None:
        answer = {"type": "function_call_output", "call_id": call_id, "output": output}
        rows.append(("response_item", answer))
    return rows


def test_a_compacted_codex_session_goes_on_from_the_history_it_was_left_with(tmp_path: Path):
    history = [
        said("user", "Fix it")[1],
        said("assistant", "Half done.")[1],
        {"type": "compaction", "encrypted_content": "opaque"},
    ]
    path = rollout(
        tmp_path,
        said("user", "Fix it"),
        said("assistant", "I look."),
        ("compacted", {"message": "", "replacement_history": history}),
        said("assistant", "Done."),
        instructions="Be brief.",
    )
    _, states = read(path)
    assert [s["student_action"]["content"] for s in states] == ["I look.", "Done."]
    assert [state["system"] for state in states] == [["Be brief."]] * 2
    assert shape(states[0]["messages"]) == ["> Fix it"]
    assert shape(states[1]["messages"]) == [
        "> Fix it",
        "Half done.",
        "> [compaction]",
    ]


def test_a_codex_rollout_has_its_own_system_prompt_and_the_roles_as_they_were_sent(tmp_path: Path):
    rows = (
        said("developer", "<skills_instructions>None."),
        ("world_state", {"full": True}),
        said("user", "Fix it"),
        said("assistant", "Done."),
        ("token_usage_record", {"usage": {}}),
        ("brand_new", {"x": 1}),
        ("response_item", {"type": "brand_new_item"}),
    )
    result, (state,) = read(rollout(tmp_path, *rows, instructions="Be brief."))
    assert state["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "<skills_instructions>None."},
        {"role": "user", "content": "Fix it"},
    ]
    assert result.report.skipped == {
        "bookkeeping": 2,
        "unknown_row_brand_new_of_0.116.0": 1,
        "unknown_row_brand_new_item_of_0.116.0": 1,
    }


@pytest.mark.parametrize(("output", "outcome"), [("fine", "ok"), (None, "interrupted")])
def test_an_aborted_codex_turn_interrupts_what_was_not_answered(
    output: str | None, outcome: str, tmp_path: Path
):
    aborted = ("event_msg", {"type": "turn_aborted", "reason": "interrupted"})
    _, states = read(rollout(tmp_path, said("user", "go"), *ran("c1", output), aborted))
    assert [s["outcome"] for s in states] == [outcome]


def test_a_rollout_of_the_first_versions_has_no_envelope(tmp_path: Path):
    head = {"id": "old", "timestamp": "2025-05-01T00:00:00Z", "instructions": None, "git": {}}
    result, states = read(lines(tmp_path / "rollout.jsonl", head, *codex_items()))
    assert len(states) == 3
    assert result.sessions["session_id"].to_pylist() == ["old"]


def gemini() -> dict[str, Any]:
    return {
        "sessionId": "s-gemini",
        "projectHash": "ab",
        "messages": [
            {"id": "1", "type": "user", "content": "Find it", "timestamp": "2026-03-01T10:00:00Z"},
            {"id": "2", "type": "info", "content": "update available"},
            {
                "id": "3",
                "type": "gemini",
                "model": "gemini-3-pro",
                "content": "",
                "thoughts": [{"subject": "Search", "description": "grep first"}],
                "tokens": {"input": 700, "cached": 200, "output": 9},
                "toolCalls": [
                    {
                        "id": "g1",
                        "name": "search",
                        "args": {"pattern": "x"},
                        "status": "error",
                        "result": [
                            {"functionResponse": {"id": "g1", "response": {"error": "no such dir"}}}
                        ],
                    }
                ],
            },
            {"id": "4", "type": "gemini", "content": [{"text": "It is gone."}]},
        ],
    }


def test_a_gemini_chat_is_read_to_states_though_it_is_one_document(tmp_path: Path):
    path = tmp_path / "session-1.json"
    path.write_text(json.dumps(gemini(), indent=2))
    result, states = read(path)
    assert shape(states[1]["messages"]) == ["> Find it", "(g1)", "g1=no such dir"]
    assert (states[0]["outcome"], states[0]["n_context_tokens"]) == ("tool_error", 700)
    assert states[1]["student_action"]["content"] == "It is gone."
    assert result.sessions["agent"].to_pylist() == ["gemini_cli"]
    assert result.turns["thinking"].to_pylist()[1] == "Search\ngrep first"


def test_a_gemini_chat_with_one_row_per_line(tmp_path: Path):
    chat = gemini()
    messages = chat.pop("messages")
    _, states = read(lines(tmp_path / "session-1.jsonl", chat, *messages))
    assert shape(states[1]["messages"]) == ["> Find it", "(g1)", "g1=no such dir"]


def opencode() -> dict[str, Any]:
    return {
        "info": {"id": "ses_1", "directory": "/w/shop", "version": "1.0.1", "projectID": "p"},
        "messages": [
            {
                "info": {"id": "msg_1", "role": "user", "time": {"created": 1772000000000}},
                "parts": [{"type": "text", "text": "Fix it"}],
            },
            {
                "info": {"id": "msg_2", "role": "assistant", "modelID": "kimi-k2"},
                "parts": [
                    {"type": "step-start"},
                    {"type": "reasoning", "text": "hm"},
                    {
                        "type": "tool",
                        "tool": "read",
                        "callID": "o1",
                        "state": {"status": "completed", "input": {"filePath": "a"}, "output": "A"},
                    },
                    {
                        "type": "step-finish",
                        "tokens": {"input": 5, "output": 2, "cache": {"read": 8}},
                    },
                    {"type": "step-start"},
                    {"type": "text", "text": "Fixed."},
                    {"type": "step-finish", "tokens": {"input": 9, "output": 1}},
                ],
            },
        ],
    }


def test_an_opencode_export_has_one_state_per_step(tmp_path: Path):
    path = tmp_path / "export.json"
    path.write_text(json.dumps(opencode(), indent=1))
    result, states = read(path)
    assert [shape([s["student_action"]])[0] for s in states] == ["(o1)", "Fixed."]
    assert shape(states[1]["messages"]) == ["> Fix it", "(o1)", "o1=A"]
    assert [s["n_context_tokens"] for s in states] == [13, 9]
    assert result.sessions["agent"].to_pylist() == ["opencode"]


def agent_trace() -> dict[str, Any]:
    call = {"id": "d1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    return {
        "harness": "pi",
        "session_id": "s-row",
        "messages": [
            {"role": "system", "content": "You are pi."},
            {"role": "user", "content": [{"type": "text", "text": "List"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "a.py"},
            {"role": "assistant", "content": "a.py"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
        ],
    }


def test_agent_trace_rows_are_one_session_each_with_their_own_tools(tmp_path: Path):
    other = agent_trace() | {"session_id": "s-2"}
    result, states = read(lines(tmp_path / "rows.jsonl", agent_trace(), other))
    assert len(states) == 4
    assert states[1]["system"] == ["You are pi."]
    assert shape(states[1]["messages"]) == ["> List", "(d1)", "d1=a.py"]
    assert result.sessions["agent"].to_pylist() == ["pi", "pi"]
    (tool,) = result.tools.to_pylist()
    assert tool["source"] == "recorded"


def node(role: str, content: str | None, parent: int | None, **more: Any) -> dict[str, Any]:
    message = {"role": role, "content": content}
    for name in ("tool_calls", "tool_call_id", "reasoning_content"):
        if name in more:
            message[name] = more.pop(name)
    return {"parent": parent, "message": message, "timestamp": 1772000000.5, **more}


def flat_call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "name": name, "arguments": '{"path": "a"}'}


def episode() -> dict[str, Any]:
    """A recorded call in the prompt, two calls of the model, and a branch with a cut result."""
    tools = [{"type": "function", "name": "read", "parameters": {"type": "object"}}]
    nodes = [
        node("system", "You fix.", None, tools=tools),
        node("user", "Fix it", 0),
        node("assistant", None, 1, tool_calls=[flat_call("read", "p1")]),
        node("tool", "no such file", 2, tool_call_id="p1"),
        node("assistant", None, 3, tool_calls=[flat_call("read", "v1")], sampled=True),
        node("tool", "A long file", 4, tool_call_id="v1"),
        node("assistant", "Fixed.", 5, sampled=True, reasoning_content="hm"),
        node("tool", "[cut]", 4, tool_call_id="v1"),
        node("user", "Go on", 7),
        node("assistant", "Done.", 8, sampled=True),
        node("user", "Without reading", 4),
        node("assistant", "Really done.", 10, sampled=True),
    ]
    usage = {"prompt_tokens": 100, "cached_input_tokens": 20, "completion_tokens": 7}
    call = {"node": 4, "model": "m/other", "finish_reason": "tool_calls", "usage": usage}
    config = {"model": "m/one", "harness": {"id": "claude_code"}}
    trace = {"version": 1, "id": "t" * 32, "verifiers": {"version": "0.4.0"}, "task": {}}
    trace |= {"agent": {"config": config}, "nodes": nodes, "calls": [call], "ok": True}
    return {"id": "0" * 32, "env": {"id": "x"}, "task": {"type": "T"}, "traces": [trace]}


def check_verifiers(path: Path) -> IngestResult:
    result, states = read(path)
    assert [shape([s["student_action"]])[0] for s in states] == [
        "(v1)",
        "Fixed.",
        "Done.",
        "Really done.",
    ]
    start = ["> Fix it", "(p1)", "p1=no such file"]
    assert shape(states[0]["messages"]) == start
    assert shape(states[1]["messages"]) == [*start, "(v1)", "v1=A long file"]
    assert shape(states[2]["messages"]) == [*start, "(v1)", "v1=[cut]", "> Go on"]
    assert shape(states[3]["messages"])[-1] == "> Without reading"
    assert "A long file" not in json.dumps(states[3]["messages"])
    assert [s["student_model"] for s in states] == ["m/other", "m/one", "m/one", "m/one"]
    assert states[0]["n_context_tokens"] == 120
    (session,) = result.sessions.to_pylist()
    assert (session["session_id"], session["agent"]) == ("t" * 32, "claude_code")
    return result


def test_a_verifiers_episode_has_a_state_wherever_the_model_was_called(tmp_path: Path):
    result = check_verifiers(lines(tmp_path / "traces.jsonl", episode()))
    (tool,) = result.tools.to_pylist()
    assert (tool["name"], tool["source"]) == ("read", "recorded")


def test_a_verifiers_file_is_told_by_the_head_of_a_long_first_line(tmp_path: Path):
    check_verifiers(lines(tmp_path / "short.jsonl", *episode()["traces"]))
    long = episode()
    long["task"]["data"] = {"prompt": "x" * 200_000, "messages": [{"role": "user"}]}
    check_verifiers(lines(tmp_path / "traces.jsonl", long))


def test_an_episode_that_failed_before_any_message_is_counted(tmp_path: Path):
    failed = episode() | {"id": "1" * 32}
    failed["traces"] = [episode()["traces"][0] | {"nodes": [], "ok": False}]
    for number, rows in enumerate([(episode(), failed), (failed, episode())]):
        result, _ = read(lines(tmp_path / f"{number}.jsonl", *rows))
        assert result.report.skipped == {"no_message": 1}


def redacted_export(asked: str) -> dict[str, Any]:
    """An export in which every id is the same word, as some publish theirs."""
    tool = {"type": "tool", "tool": "read", "callID": "REDACTED"}
    messages: list[dict[str, Any]] = [
        {"info": {"id": "REDACTED", "role": "user"}, "parts": [{"type": "text", "text": asked}]}
    ]
    for number in range(4):
        tokens = {"input": 100 + number, "output": 2}
        state = {
            "status": "completed",
            "input": {"filePath": f"{number}"},
            "output": f"out {number}",
        }
        parts = [
            {"type": "step-start"},
            tool | {"state": state},
            {"type": "step-finish", "tokens": tokens},
        ]
        info = {"id": "REDACTED", "role": "assistant", "parentID": "REDACTED", "modelID": "kimi-k2"}
        messages.append({"info": info, "parts": parts})
    said = '{"type": "user", "uuid": "1", "sessionId": "s", "parentUuid": null}'
    messages[0]["parts"].append({"type": "text", "text": said})
    return {"info": {"id": "REDACTED", "directory": "/w"}, "messages": messages}


def test_every_answer_of_exports_with_redacted_ids_is_a_state(tmp_path: Path):
    for number, asked in enumerate(("Fix it", "Fix that", "Fix it")):
        path = tmp_path / str(number) / "export.json"
        path.parent.mkdir()
        path.write_text(json.dumps(redacted_export(asked), indent=1))
    result, states = read(tmp_path)
    assert result.report.skipped == {}
    assert result.sessions["agent"].to_pylist() == ["opencode"] * 2
    # The third is a copy of the first, word for word.
    assert (len(states), result.report.n_duplicate_states) == (8, 4)
    assert [s["n_context_tokens"] for s in states] == [100, 101, 102, 103] * 2
    for number, state in enumerate(states):
        outs = [m["content"] for m in state["messages"] if m["role"] == "tool"]
        assert outs == [f"out {n}" for n in range(number % 4)]
    assert len(set(result.sessions["conversation"].to_pylist())) == 2


def test_a_cleared_result_is_told_by_its_place_where_ids_are_redacted(tmp_path: Path):
    export = redacted_export("Fix it")
    for number, message in enumerate(export["messages"]):
        message["info"]["time"] = {"created": 1_000 + number}
    # The tool parts of two messages: the second result was cleared after the third.
    export["messages"] = json.loads(json.dumps(export["messages"]))
    export["messages"][2]["parts"][1]["state"]["time"] = {"compacted": 1_003}
    path = tmp_path / "export.json"
    path.write_text(json.dumps(export))
    _, (*_, last) = read(path)
    outs = [m["content"] for m in last["messages"] if m["role"] == "tool"]
    assert outs == ["out 0", "[Old tool result content cleared]", "out 2"]


def test_calls_of_one_id_are_as_many_decisions_in_codex(tmp_path: Path):
    rows = [said("user", "go")]
    for number in range(5):
        rows += ran("call_0", f"out {number}")
        usage = {"input_tokens": 100, "cached_input_tokens": 0, "output_tokens": 1}
        rows.append(("event_msg", {"type": "token_count", "info": {"last_token_usage": usage}}))
    result, states = read(rollout(tmp_path, *rows))
    assert [s["n_context_tokens"] for s in states] == [100] * 5
    answered = [m["content"] for m in states[-1]["messages"] if m["role"] == "tool"]
    assert answered == [f"out {n}" for n in range(4)]
    assert result.report.usage["input_tokens"] == 500


def test_a_tool_that_codex_refused_is_not_offered(tmp_path: Path):
    call = {"type": "function_call", "name": "report", "namespace": "mcp__desk", "arguments": "{}"}
    path = rollout(
        tmp_path,
        said("user", "go"),
        *ran("c1", "unsupported call: exec_command"),
        ("response_item", call | {"call_id": "c2"}),
        ("response_item", {"type": "function_call_output", "call_id": "c2", "output": "fine"}),
    )
    result, (first, second) = read(path)
    assert (first["outcome"], first["error_kind"]) == ("tool_error", "no_such_tool")
    assert [tool["function"]["name"] for tool in second["tools"]] == ["mcp__desk__report"]
    assert result.tools["name"].to_pylist() == ["mcp__desk__report"]


def test_what_a_prompt_lacks_is_told(tmp_path: Path):
    picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    text = {"type": "input_text", "text": "This:"}
    asked = {"type": "message", "role": "user", "content": [text, picture]}
    result, _ = read(rollout(
        tmp_path, said("user", "go"), said("assistant", "Show me."), ("response_item", asked),
        ("response_item", {"type": "web_search_call", "status": "completed"}), *ran("c1", "fine"),
        said("assistant", "Done."),
    ))  # fmt: skip
    assert result.states["lacks"].to_pylist() == [[], ["image"], ["image", "web_search_call"]]


def test_a_picture_of_gemini_and_a_search_by_clines_provider_are_lacking(tmp_path: Path):
    chat = gemini()
    result = chat["messages"][2]["toolCalls"][0]["result"]
    result.append({"inlineData": {"mimeType": "image/png", "data": "aaaa"}})
    assert read(lines(tmp_path / "a.json", chat))[0].states["lacks"].to_pylist() == [[], ["image"]]
    said = [{"role": "assistant", "content": [{"type": "web_search_tool_result", "content": []}]}]
    (tmp_path / "b.json").write_text(
        json.dumps([{"role": "user", "content": "Who?"}, *said, *said])
    )
    found = read(tmp_path / "b.json")[0].states["lacks"].to_pylist()
    assert found == [[], ["web_search_tool_result"]]


def test_a_gemini_message_that_is_written_again_is_one_and_a_rewind_is_a_branch(tmp_path: Path):
    chat = gemini()
    asked, _, called, answer = chat.pop("messages")
    begun = {k: v for k, v in called.items() if k not in ("toolCalls", "tokens")}
    rows = [
        chat, asked, begun, called, {"$set": {"lastUpdated": "2026-03-01T10:00:09Z"}}, answer,
        {"$rewindTo": answer["id"]}, answer | {"id": "5", "content": "Elsewhere."},
    ]  # fmt: skip
    result, states = read(lines(tmp_path / "session-1.jsonl", *rows))
    said = [s["student_action"].get("content") for s in states]
    assert said == ["", "It is gone.", "Elsewhere."]
    assert states[1]["messages"] == states[2]["messages"]
    assert shape(states[2]["messages"]) == ["> Find it", "(g1)", "g1=no such dir"]
    assert result.report.skipped == {"bookkeeping": 3, "duplicate_row": 1}
