"""Event logs of GitHub Copilot CLI."""

from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters.agents.copilot import Copilot
from tests.replay_pipeline.ingesters.logs import shape
from tests.replay_pipeline.ingesters.test_other_agents import lines, read


class Events:
    """Builds an event log row by row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, agent: str | None = None, **data: Any) -> None:
        row = {
            "type": kind,
            "data": data,
            "id": f"e{len(self.rows)}",
            "timestamp": f"2026-02-03T10:00:{len(self.rows) % 60:02}.000Z",
            "parentId": f"e{len(self.rows) - 1}" if self.rows else None,
        }
        self.rows.append(row | ({"agentId": agent} if agent else {}))

    def start(self) -> None:
        self.add(
            "session.start",
            sessionId="s-copilot",
            version=1,
            producer="copilot-agent",
            copilotVersion="1.0.14",
            selectedModel="claude-sonnet-4.5",
            context={"cwd": "/w/tide", "branch": "main"},
        )

    def says(self, message_id: str, text: str = "", *calls: dict[str, Any], **more: Any) -> None:
        requests = list(calls)
        self.add(
            "assistant.message", messageId=message_id, content=text, toolRequests=requests, **more
        )

    def answers(self, call_id: str, text: str, **more: Any) -> None:
        result = {"content": text, "detailedContent": f"{text} in full"}
        self.add("tool.execution_complete", toolCallId=call_id, success=True, result=result, **more)

    def fails(self, call_id: str, message: str, code: str | None = None) -> None:
        error = {"message": message} | ({"code": code} if code else {})
        self.add("tool.execution_complete", toolCallId=call_id, success=False, error=error)

    def write(self, folder: Path) -> Path:
        return lines(folder / "session-state" / "s-folder" / "events.jsonl", *self.rows)


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"toolCallId": call_id, "name": name, "arguments": arguments, "type": "function"}


def session() -> Events:
    log = Events()
    log.start()
    log.add("system.message", role="system", content="You are Copilot.")
    log.add("user.message", content="Fix it", transformedContent="<now>10:00</now> Fix it")
    log.add("assistant.turn_start", turnId="0")
    log.says("m1", "I look.", call("c1", "view", path="a.py"), call("c2", "bash", command="make"))
    log.add("tool.execution_start", toolCallId="c1", toolName="view", arguments={"path": "a.py"})
    log.fails("c2", "no rule to make target")
    log.answers("c1", "x = 1")
    log.says("m2", "Done.", reasoningText="It was the rule.", model="gpt-5")
    log.add("assistant.turn_end", turnId="0")
    return log


def test_messages_calls_and_results_become_states(tmp_path: Path):
    result, (first, second) = read(session().write(tmp_path))
    assert first["messages"][1:] == [{"role": "user", "content": "<now>10:00</now> Fix it"}]
    assert (first["outcome"], first["hint"]) == ("tool_error", "no rule to make target")
    assert shape(second["messages"][1:]) == [
        "> <now>10:00</now> Fix it",
        "I look.(c1+c2)",
        "c1=x = 1",
        "c2=no rule to make target",
    ]
    assert (second["student_model"], second["cwd"]) == ("gpt-5", "/w/tide")
    assert "It was the rule." in result.turns["thinking"].to_pylist()
    (row,) = result.sessions.to_pylist()
    assert (row["session_id"], row["agent"], row["versions"]) == (
        "s-copilot",
        "copilot",
        ["1.0.14"],
    )
    assert result.report.skipped == {"bookkeeping": 3}


def test_pieces_of_one_response_are_one_decision(tmp_path: Path):
    log = Events()
    log.start()
    log.add("user.message", content="go")
    log.says("m1", "First.", apiCallId="r1", chunkIndex=0, chunkCount=2)
    log.says("m2", "", call("c1", "bash"), apiCallId="r1", chunkIndex=1, chunkCount=2)
    log.answers("c1", "fine")
    log.says("m3", "End.", apiCallId="r2")
    _, (first, second) = read(log.write(tmp_path))
    assert first["student_action"]["content"] == "First."
    assert [c["id"] for c in first["student_action"]["tool_calls"]] == ["c1"]
    assert shape(second["messages"][1:]) == ["> go", "First.(c1)", "c1=fine"]


def test_refusals_say_who_refused_and_why(tmp_path: Path):
    log = Events()
    log.start()
    log.add("user.message", content="go")
    log.says("m1", "", call("c1", "bash", command="rm -r build"))
    refusal = {"kind": "denied-interactively-by-user", "feedback": "keep the build"}
    log.add("permission.completed", requestId="p1", toolCallId="c1", result=refusal)
    log.fails("c1", "The call was refused.")
    log.says("m2", "", call("c2", "bash", command="sudo make"))
    asked = {"kind": "shell", "toolCallId": "c2"}
    log.add("permission.requested", requestId="p2", permissionRequest=asked)
    log.add("permission.completed", requestId="p2", result={"kind": "denied-by-rules"})
    log.fails("c2", "The call was refused.")
    log.says("m3", "", call("c3", "bash", command="make"))
    log.fails("c3", "Permission denied and could not request permission from user")
    log.says("m4", "", call("c4", "bash", command="make"))
    log.fails("c4", "No.", code="rejected")
    log.says("m5", "", call("c5", "bash", command="make"))
    log.add("abort", reason="user_initiated")
    _, states = read(log.write(tmp_path))
    assert [(s["outcome"], s["hint"]) for s in states] == [
        ("user_rejected", "keep the build"),
        ("denied_by_policy", "The call was refused."),
        ("denied_by_policy", "Permission denied and could not request permission from user"),
        ("user_rejected", None),
        ("interrupted", None),
    ]


def test_a_compaction_is_a_root_and_a_failed_one_is_nothing(tmp_path: Path):
    log = session()
    log.add("session.compaction_start")
    log.add("session.compaction_complete", success=False, error="no answer")
    log.add("user.message", content="Again")
    log.says("m3", "Still here.")
    log.add("session.compaction_complete", success=True, summaryContent="So far: fixed.")
    log.says("m4", "And now?")
    log.add("session.context_cleared", messagesCleared=9, initialMessage="Anew")
    log.says("m5", "Hello.")
    _, states = read(log.write(tmp_path))
    assert shape(states[2]["messages"])[-2:] == ["Done.", "> Again"]
    assert shape(states[3]["messages"][1:]) == ["> So far: fixed."]
    assert shape(states[4]["messages"][1:]) == ["> Anew"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_subagent_is_a_session_of_its_own_and_begins_with_its_task(tmp_path: Path, is_new: bool):
    log = Events()
    log.start()
    log.add("user.message", content="go")
    log.says("m1", "", call("c1", "task", prompt="Find the rule"))
    if is_new:
        log.add("subagent.started", "agent-7", toolCallId="c1", agentName="explore")
        agent, old = "agent-7", {}
    else:
        agent, old = None, {"parentToolCallId": "c1"}
    looks = {"messageId": "m2", "content": "", "toolRequests": [call("c2", "grep")], **old}
    log.add("assistant.message", agent, **looks)
    found = {"content": "line 3"}
    log.add("tool.execution_complete", agent, toolCallId="c2", success=True, result=found, **old)
    log.add("assistant.message", agent, messageId="m3", content="It is in line 3.", **old)
    log.answers("c1", "It is in line 3.")
    log.says("m4", "Fixed.")
    result, states = read(log.write(tmp_path))
    main, inner = result.sessions.to_pylist()
    assert main["n_states"] == inner["n_states"] == 2
    assert inner["parent_session_id"] == "s-copilot"
    assert inner["agent_id"] == ("agent-7" if is_new else "c1")
    prefixes = {s["student_action"]["content"]: shape(s["messages"][1:]) for s in states}
    assert prefixes["It is in line 3."] == ["> Find the rule", "(c2)", "c2=line 3"]
    assert prefixes["Fixed."] == ["> go", "(c1)", "c1=It is in line 3."]


def test_what_no_user_typed_is_meta(tmp_path: Path):
    log = Events()
    log.start()
    log.add("user.message", content="go")
    log.says("m1", "Done.")
    log.add("user.message", content="Skill: release", source="skill-release")
    log.says("m2", "Read.")
    log.add("user.message", content="Go on", isAutopilotContinuation=True)
    log.says("m3", "Went on.")
    result, _ = read(log.write(tmp_path))
    kinds = result.turns["kind"].to_pylist()
    assert kinds == ["user", "assistant", "meta", "assistant", "meta", "assistant"]


def test_an_event_counts_once_and_what_is_unknown_is_counted(tmp_path: Path):
    log = session()
    log.rows += log.rows[2:5]
    log.add("session.brand_new", anything=[1])
    log.answers("c9", "whose?")
    log.add("odd")
    log.add("user.message", content="")
    result, states = read(log.write(tmp_path))
    assert len(states) == 2
    assert result.report.skipped == {
        "bookkeeping": 4,
        "duplicate_row": 3,
        "empty": 1,
        "orphan_result": 1,
        "unknown_type": 1,
    }


def test_a_resumed_log_without_its_head_is_known_by_its_events(tmp_path: Path):
    rows = session().rows[2:]
    path = lines(tmp_path / "session-state" / "s-folder" / "events.jsonl", *rows)
    result, states = read(path)
    assert result.sessions["session_id"].to_pylist() == ["s-folder"]
    assert len(states) == 2


def test_a_first_event_that_is_longer_than_the_head_is_known():
    head = b'{"type":"session.start","data":{"sessionId":"s","copilotVersion":"1","context":{"x":"'
    assert Copilot().sniff(head + b"y" * 70_000)
