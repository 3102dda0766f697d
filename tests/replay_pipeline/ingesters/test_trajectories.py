"""Trajectories of research harnesses, in the forms of their makers, read to states."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.replay_pipeline.ingesters.logs import shape
from tests.replay_pipeline.ingesters.test_other_agents import lines, read

SYSTEM = "You mend code. Answer with exactly one command."


def mini_swe_agent() -> list[dict[str, Any]]:
    """Messages alone, as versions before 2.0 wrote them: the command is a block of the text."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Mend the colon."},
        {"role": "assistant", "content": "I look.\n\n```mswea_bash_command\ncat a.py\n```"},
        {"role": "user", "content": "<returncode>1</returncode>\n<output>\ncat: a.py\n</output>"},
        {"role": "assistant", "content": "No command at all."},
        {"role": "user", "content": "Write exactly one command."},
        {"role": "assistant", "content": "Done.\n```bash\necho COMPLETE\n```"},
    ]


def mini_swe_agent_2() -> dict[str, Any]:
    """Since 2.0: a document, with calls, and what the provider answered beside each message."""
    usage = {"prompt_tokens": 900, "completion_tokens": 20}
    response = {
        "model": "m-1-0801",
        "usage": usage | {"prompt_tokens_details": {"cached_tokens": 600}},
    }
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls"}'},
    }
    return {
        "info": {"mini_version": "2.1.0", "config": {"model": {"model_name": "m-1"}}},
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Mend the colon."},
            {"role": "assistant", "content": "", "tool_calls": [call],
             "extra": {"response": response, "timestamp": 1772000000.5}},
            {"role": "tool", "tool_call_id": "c1", "content": '{\n  "returncode": 2,\n  "output": ""}'},
            {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
    }  # fmt: skip


def swe_agent() -> dict[str, Any]:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "open", "arguments": '{"path": "a.py"}'},
    }
    history = [
        {"role": "system", "content": SYSTEM, "agent": "main", "message_type": "system_prompt"},
        {"role": "user", "content": "A demonstration.", "agent": "main", "is_demo": True},
        {"role": "user", "content": "Mend the colon.", "agent": "main", "message_type": "observation"},
        {"role": "assistant", "content": "I look.\n```\nls\n```", "thought": "I look.", "action": "ls\n",
         "agent": "main", "message_type": "action"},
        {"role": "user", "content": "a.py\n(Open file: n/a)\nbash-$", "agent": "main"},
        {"role": "assistant", "content": "I open it.", "thought": "I open it.", "action": "open a.py",
         "tool_calls": [call], "agent": "main", "message_type": "action"},
        {"role": "tool", "content": "[File: a.py]", "agent": "main", "tool_call_ids": ["c1"]},
        {"role": "assistant", "content": "Is it right?", "agent": "reviewer"},
    ]  # fmt: skip
    step = {"action": "ls\n", "observation": "a.py", "response": "I look.", "thought": "I look."}
    model = json.dumps({"agent": {"model": {"name": "m-1"}}})
    return {"environment": "e", "trajectory": [step], "history": history, "replay_config": model}


def openhands() -> list[dict[str, Any]]:
    def event(number: int, kind: str, source: str, **fields: Any) -> dict[str, Any]:
        at = f"2026-06-16T05:39:{number:02}.8"
        return {"id": f"e{number}", "timestamp": at, "source": source, **fields, "kind": kind}

    def said(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    def called(number: int, call_id: str, answer: str, thought: str = "") -> dict[str, Any]:
        call = {"id": call_id, "name": "terminal", "arguments": '{"command": "ls"}'}
        return event(
            number, "ActionEvent", "agent", thought=[{"type": "text", "text": thought}],
            reasoning_content="Where?", tool_name="terminal", tool_call_id=call_id, tool_call=call,
            llm_response_id=answer,
        )  # fmt: skip

    def counted(number: int, n_prompt: int, n_output: int, n_cached: int) -> dict[str, Any]:
        used = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "cache_read_tokens": n_cached,
        }
        stats = {
            "usage_to_metrics": {"default": {"model_name": "m-1", "accumulated_token_usage": used}}
        }
        return event(
            number, "ConversationStateUpdateEvent", "environment", key="stats", value=stats
        )

    def observed(number: int, call_id: str, text: str) -> dict[str, Any]:
        content = {"content": [{"type": "text", "text": text}], "is_error": text == "no"}
        return event(
            number, "ObservationEvent", "environment", tool_call_id=call_id, observation=content
        )

    tools = [{"type": "function", "function": {"name": "terminal", "parameters": {}}}]
    prompt = {"type": "text", "text": SYSTEM}
    return [
        event(0, "SystemPromptEvent", "agent", system_prompt=prompt, tools=tools),
        event(1, "MessageEvent", "user", llm_message=said("Mend the colon.")),
        counted(2, 900, 20, 600),
        called(3, "c1", "r1", "I look."),
        called(4, "c2", "r1"),
        observed(5, "c1", "a.py"),
        observed(6, "c2", "no"),
        counted(7, 2000, 50, 1500),
        called(8, "c3", "r2"),
        event(
            9, "UserRejectObservation", "environment", tool_call_id="c3", rejection_reason="Not so."
        ),
        event(10, "Condensation", "agent", forgotten_event_ids=["e3", "e4"], summary="It looked."),
        event(11, "MessageEvent", "agent", llm_message=said("Done."), llm_response_id="r3"),
    ]


def openhands_history() -> dict[str, Any]:
    """A row of an evaluation: one answer with two calls, each an action and what came of it."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "execute_bash", "arguments": "{}"}}
        for n in (1, 2)
    ]
    message = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    usage = {"prompt_tokens": 900, "completion_tokens": 20, "prompt_tokens_details": None}
    response = {"id": "gen-1", "model": "m-1", "choices": [{"message": message}], "usage": usage}

    def event(number: int, source: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": number,
            "timestamp": f"2025-04-30T16:32:{number:02}",
            "source": source,
            **fields,
        }

    def of_call(number: int) -> dict[str, Any]:
        meta = {
            "function_name": "execute_bash",
            "tool_call_id": f"c{number}",
            "model_response": response,
        }
        return {"tool_call_metadata": meta}

    def observed(number: int, call: int, code: int) -> dict[str, Any]:
        extras = {"metadata": {"exit_code": code}}
        more = {
            "observation": "run",
            "content": f"out {call}",
            "extras": extras,
            "cause": number - 1,
        }
        return event(number, "agent", **more, **of_call(call))

    tools = [{"type": "function", "function": {"name": "execute_bash", "parameters": {}}}]
    history = [
        event(0, "agent", action="system", args={"content": SYSTEM, "tools": tools}),
        event(1, "user", action="message", args={"content": "Mend the colon."}),
        event(2, "user", action="recall", args={"query": "Mend"}),
        event(3, "agent", action="run", args={"command": "ls"}, **of_call(1)),
        observed(4, 1, 0),
        event(5, "agent", action="run", args={"command": "ls x"}, **of_call(2)),
        observed(6, 2, 2),
        event(7, "agent", action="finish", args={"thought": "Done."}),
    ]
    report = {"report": {"resolved": True}}
    return {"instance_id": "shop-1", "test_result": report, "history": history}


def adp() -> list[dict[str, Any]]:
    return [{
        "schema_version": "1.5.0", "id": "t-1", "details": {},
        "content": [
            {"class_": "text_observation", "content": "Count the files.", "name": None, "source": "user"},
            {"class_": "code_action", "language": "bash", "content": "ls", "description": "I list them.",
             "tool_call_id": "c1", "reasoning_content": "Where?"},
            {"class_": "text_observation", "content": "a b", "source": "environment", "tool_call_id": "c1"},
            {"class_": "api_action", "function": "view", "kwargs": {"path": "a"}, "description": None},
            {"class_": "web_observation", "html": None, "axtree": "[1] root", "image_observation": {}},
            {"class_": "message_action", "content": "Two.", "description": None},
        ],
    }]  # fmt: skip


def session_trace() -> list[dict[str, Any]]:
    call = {"id": "c1", "function": {"name": "count", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "toolCalls": [call], "model": "m-1", "reasoningContent": "Hm."},
        {"role": "tool", "toolCallId": "c1", "content": "2", "timestamp": 1772000000000},
        {"role": "assistant", "content": "Two."},
    ]  # fmt: skip
    head = {"type": "session", "harness": "my-agent", "id": "b1a2c3", "name": "Counting"}
    return [head, *({"type": "message", "message": message} for message in messages)]


def document(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=2))
    return path


def test_a_command_in_the_text_of_mini_swe_agent_is_a_call_with_its_result(tmp_path: Path):
    result, states = read(document(tmp_path / "a.traj.json", mini_swe_agent()))
    first, second, third = (s["student_action"] for s in states)
    assert first["content"] == "I look."
    assert first["tool_calls"][0]["function"] == {
        "name": "bash",
        "arguments": '{"command":"cat a.py"}',
    }
    assert (second["content"], third["content"]) == ("No command at all.", "Done.")
    assert [s["outcome"] for s in states] == ["tool_error", "final_text", "no_result"]
    assert [m["role"] for m in states[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert states[2]["messages"][-1] == {"role": "user", "content": "Write exactly one command."}
    assert result.sessions["agent"].to_pylist() == ["mini_swe_agent"]
    assert states[0]["tools"][0]["function"]["name"] == "bash"


def test_calls_of_a_newer_mini_swe_agent_have_their_tokens(tmp_path: Path):
    result, (state,) = read(document(tmp_path / "a.traj.json", mini_swe_agent_2()))
    assert (state["outcome"], state["n_context_tokens"]) == ("tool_error", 900)
    assert state["student_model"] == "m-1-0801"
    assert result.report.skipped == {"bookkeeping": 1}
    assert result.sessions["versions"].to_pylist() == [["2.1.0"]]


def test_swe_agent_is_read_with_and_without_calls(tmp_path: Path):
    result, (first, second) = read(document(tmp_path / "a.traj", swe_agent()))
    assert first["student_action"]["tool_calls"][0]["function"]["arguments"] == '{"command":"ls"}'
    assert second["student_action"]["tool_calls"][0]["function"]["name"] == "open"
    assert shape(second["messages"])[-1].endswith("=a.py\n(Open file: n/a)\nbash-$")
    assert (first["student_model"], second["outcome"]) == ("m-1", "ok")
    assert result.report.skipped == {"transcript_only": 1}


def test_events_of_openhands_are_read_with_parallel_calls_refusals_and_summaries(tmp_path: Path):
    result, (first, second, last) = read(lines(tmp_path / "events.jsonl", *openhands()))
    assert shape([first["student_action"]]) == ["I look.(c1+c2)"]
    assert shape(second["messages"]) == ["> Mend the colon.", "I look.(c1+c2)", "c1=a.py", "c2=no"]
    assert [s["n_context_tokens"] for s in (first, second)] == [900, 1100]
    assert [s["outcome"] for s in (first, second, last)] == [
        "tool_error",
        "user_rejected",
        "final_text",
    ]
    assert second["hint"] == "Not so."
    assert shape(last["messages"])[:2] == ["> Mend the colon.\n\nIt looked.", "(c3)"]
    assert result.sessions["session_id"].to_pylist() == ["e0"]
    assert result.report.skipped == {"bookkeeping": 2}


def test_an_evaluation_of_openhands_has_its_calls_and_its_verdict(tmp_path: Path):
    result, (first, last) = read(lines(tmp_path / "output.jsonl", openhands_history()))
    assert shape([first["student_action"]]) == ["I look.(c1+c2)"]
    assert shape(last["messages"]) == [
        "> Mend the colon.",
        "I look.(c1+c2)",
        "c1=out 1",
        "c2=out 2",
    ]
    assert (first["outcome"], first["n_context_tokens"]) == ("tool_error", 900)
    assert last["student_action"]["content"] == "Done."
    assert result.sessions["is_resolved"].to_pylist() == [True]
    events = openhands_history()["history"]
    assert len(read(document(tmp_path / "trajectory.json", events))[1]) == 2


@pytest.mark.parametrize("is_document", [True, False])
def test_what_an_adp_trajectory_does_between_observations_is_a_decision(
    is_document: bool, tmp_path: Path
):
    path = tmp_path / "a.json"
    (document if is_document else lambda path, value: lines(path, *value))(path, adp())
    result, (first, second, last) = read(path)
    assert first["student_action"]["tool_calls"][0]["function"]["name"] == "bash"
    assert shape(second["messages"]) == ["> Count the files.", "I list them.(c1)", "c1=a b"]
    assert second["student_action"]["tool_calls"][0]["function"]["arguments"] == '{"path":"a"}'
    assert last["messages"][-1]["content"] == "[1] root"
    assert last["student_action"]["content"] == "Two."
    assert result.sessions["session_id"].to_pylist() == ["t-1"]


def test_a_session_trace_of_the_hub_has_the_name_of_its_harness(tmp_path: Path):
    result, (first, last) = read(lines(tmp_path / "a.jsonl", *session_trace()))
    (session,) = result.sessions.to_pylist()
    assert (session["agent"], session["title"]) == ("my-agent", "Counting")
    assert (first["student_model"], last["student_model"]) == ("m-1", "m-1")
    assert shape(last["messages"]) == ["> How many?", "(c1)", "c1=2"]
