"""What Claude Code prints without a screen, in every form in which it is kept, and results beside it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import ingest
from replay_pipeline.stages.pages.compare import Comparison
from replay_pipeline.stages.pages.overview import SessionTotals
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.ingesters.logs import shape, states_of, tool_use

Rows = list[dict[str, Any]]


def said(n: int, message_id: str, *blocks: Any, agent: str | None = None) -> dict[str, Any]:
    message = {"id": message_id, "role": "assistant", "model": "m", "content": list(blocks),
               "usage": {"input_tokens": 10, "output_tokens": 3}, "stop_reason": None}  # fmt: skip
    return {"type": "assistant", "message": message, "parent_tool_use_id": agent,
            "session_id": "s1", "uuid": f"u{n}"}  # fmt: skip


def told(n: int, *blocks: Any, agent: str | None = None) -> dict[str, Any]:
    message = {"role": "user", "content": list(blocks)}
    return {"type": "user", "message": message, "parent_tool_use_id": agent,
            "session_id": "s1", "uuid": f"u{n}"}  # fmt: skip


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def run() -> Rows:
    init = {"type": "system", "subtype": "init", "cwd": "/app", "session_id": "s1", "model": "m",
            "tools": ["Task", "Bash", "Read"], "claude_code_version": "2.0.29", "uuid": "u0"}  # fmt: skip
    return [
        init,
        said(1, "m1", text("I look.")),
        said(1, "m1", tool_use("t1", "Bash", command="ls")),  # some clients repeat a `uuid`
        told(2, result("t1", "a.py")),
        said(3, "m2", tool_use("t2", "Task", prompt="Find it.")),
        told(4, text("Find it."), agent="t2"),
        said(5, "m3", tool_use("t3", "Read", file_path="/app/a.py"), agent="t2"),
        told(6, result("t3", "x = 1"), agent="t2"),
        said(7, "m4", text("It is 1."), agent="t2"),
        told(8, result("t2", "It is 1.")),
        said(9, "m5", tool_use("t4", "Bash", command="broken off")),
        said(10, "m6", tool_use("t4", "Bash", command="true")),
        told(11, result("t4", "")),
        said(12, "m7", text("Done.")),
        {"type": "result", "subtype": "success", "is_error": False, "total_cost_usd": 0.5,
         "modelUsage": {"m": {"costUSD": 0.5}},
         "session_id": "s1", "uuid": "u13"},
    ]  # fmt: skip


def lines(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_pieces(rows: Rows) -> str:
    piece = {"type": "stream_event", "event": {"type": "message_stop"}, "session_id": "s1"}
    return lines([each for n, row in enumerate(rows) for each in (row, piece | {"uuid": f"p{n}"})])


def recorded(rows: Rows) -> str:
    """As a terminal shows it: in pieces, with escape sequences, among other lines."""
    shown = "\x1b[?2004h$ claude -p\r\n" + lines(rows).replace("\n", "\r\n") + "\x1b[0m$ "
    pieces = [shown[i : i + 50] for i in range(0, len(shown), 50)]
    head = {"version": 2, "width": 160, "height": 40}
    return "\n".join(map(json.dumps, [head, *([0.1, "o", piece] for piece in pieces)]))


FORMS: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "lines": ("out.jsonl", lines),
    "array": ("out.json", lambda rows: json.dumps(rows, indent=2)),
    "pieces": ("out.jsonl", with_pieces),
    "recording": ("agent.cast", recorded),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_output_gives_the_same_decisions(form: str, tmp_path: Path):
    name, write = FORMS[form]
    (tmp_path / name).write_text(write(run()))
    found = ingest(tmp_path, redact=False)
    main, helper = sorted(found.sessions.to_pylist(), key=lambda row: row["n_states"])[::-1]
    assert (main["n_states"], helper["n_states"], helper["agent_id"]) == (5, 2, "t2")
    assert (main["client_usd_json"], main["ended"], main["agent"]) == (
        '{"m": 0.5}',
        "success",
        "claude_code",
    )
    states = states_of(found)
    (last,) = [s for s in states if s["student_action"]["content"] == "Done."]
    assert shape(last["messages"])[1:] == [
        "I look.(t1)", "t1=a.py", "(t2)", "t2=It is 1.", "(t4~1)", "t4~1=",
    ]  # fmt: skip
    assert [s["outcome"] for s in states].count("retracted") == 1
    assert not any(s.get("alternatives") for s in states), "what a broken stream took back is none"
    (inner,) = [s for s in states if s["student_action"]["content"] == "It is 1."]
    assert shape(inner["messages"]) == ["> Find it.", "(t3)", "t3=x = 1"]
    names = {tool["function"]["name"] for tool in last["tools"]}
    assert names <= {"Task", "Bash", "Read"}
    assert "Bash" in names
    assert found.report.rows == found.report.rows_used + sum(found.report.skipped.values())


def test_a_state_says_that_nothing_told_what_was_asked(tmp_path: Path):
    (tmp_path / "out.jsonl").write_text(lines(run()))
    lacks = ingest(tmp_path, redact=False).states.to_pylist()
    assert {tuple(row["lacks"]) for row in lacks if row["session_id"] == "s1"} == {("request",)}


@pytest.mark.parametrize("is_solved", [True, False])
@pytest.mark.parametrize("maker", ["harbor", "terminal-bench"])
def test_a_trial_gives_its_outcome_and_what_was_asked(maker: str, is_solved: bool, tmp_path: Path):
    if maker == "harbor":
        agent = tmp_path / "trial" / "agent"
        agent.mkdir(parents=True)
        (agent / "claude-code.txt").write_text(lines(run()))
        steps = [{"step_id": 1, "source": "user", "message": "Solve it."},
                 {"step_id": 2, "source": "agent", "message": "Done."}]  # fmt: skip
        trajectory = {"schema_version": "ATIF-v1.2", "session_id": "s1", "steps": steps}
        (agent / "trajectory.json").write_text(json.dumps(trajectory))
        (tmp_path / "trial" / "verifier").mkdir()
        (tmp_path / "trial" / "verifier" / "reward.txt").write_text(f"{int(is_solved)}\n")
    else:
        (tmp_path / "run" / "sessions").mkdir(parents=True)
        (tmp_path / "run" / "sessions" / "agent.cast").write_text(recorded(run()))
        told = {"instruction": "Solve it.", "is_resolved": is_solved}
        (tmp_path / "run" / "results.json").write_text(json.dumps(told))
    found = ingest(tmp_path, redact=False)
    assert found.report.n_states == 7
    assert found.report.skipped_files.get("told_twice", 0) == (maker == "harbor")
    assert set(found.states["is_resolved"].to_pylist()) == {is_solved}
    assert set(found.sessions["is_resolved"].to_pylist()) == {is_solved}
    main = [s for s in states_of(found) if s["session_id"] == "s1"]
    assert {shape(state["messages"])[0] for state in main} == {"> Solve it."}
    assert not any(found.states["lacks"].to_pylist())
    compared, totals = Comparison(), SessionTotals()
    for session in found.sessions.to_pylist():
        turns, states = (
            [row for row in rows.to_pylist() if row["session_id"] == session["session_id"]]
            for rows in (found.turns, found.states)
        )
        facts = totals.add(session, turns, states)
        assert facts["result"] == ("tests passed" if is_solved else "tests failed")
        action = {"role": "assistant", "content": "Done."}
        answers = {
            s["state_id"]: [TeacherAction(state_id="s", teacher="t", action=action)] for s in states
        }
        compared.add(facts, turns, states, answers)
    [row] = (compared.figures() or {})["by_result"]
    assert (row["name"], row["teachers"]["t"]["n"]) == (facts["result"], 7)
