"""Sessions of Pi, of all versions of its format, read to states."""

from pathlib import Path
from typing import Any

import pytest

from tests.replay_pipeline.ingesters.test_other_agents import lines, read

HEADER = {"type": "session", "id": "s1", "timestamp": "2026-03-01T10:00:00.000Z", "cwd": "/srv/app"}
USAGE = {"input": 10, "output": 20, "cacheRead": 900, "cacheWrite": 90, "totalTokens": 1020}


class Entries:
    """Entries of a session, each below the last one or the one that is named."""

    def __init__(self, *, is_tree: bool = True) -> None:
        self.rows: list[dict[str, Any]] = [{**HEADER, "version": 3} if is_tree else HEADER]
        self.is_tree = is_tree
        self.last: str | None = None

    def add(self, kind: str, *, below: str | None = "", **fields: Any) -> str:
        name = f"e{len(self.rows)}"
        links = {"id": name, "parentId": self.last if below == "" else below}
        self.rows.append({"type": kind, **(links if self.is_tree else {}), **fields})
        self.last = name
        return name

    def said(self, role: str, content: Any, *, below: str | None = "", **fields: Any) -> str:
        return self.add("message", below=below, message={"role": role, "content": content} | fields)

    def called(self, call_id: str, command: str, **fields: Any) -> str:
        call = {
            "type": "toolCall",
            "id": call_id,
            "name": "bash",
            "arguments": {"command": command},
        }
        content = [
            {"type": "thinking", "thinking": "I look."},
            {"type": "text", "text": "Now"},
            call,
        ]
        more = {"model": "m-1", "usage": USAGE, "stopReason": "toolUse", **fields}
        return self.said("assistant", content, **more)

    def answered(self, call_id: str, text: str, *, is_error: bool = False) -> str:
        content = [{"type": "text", "text": text}]
        return self.said("toolResult", content, toolCallId=call_id, isError=is_error)


def session(entries: Entries) -> Entries:
    entries.said("user", [{"type": "text", "text": "Fix it"}])
    entries.add("thinking_level_change", thinkingLevel="high")
    entries.called("t1", "make")
    entries.answered("t1", "Command exited with code 2", is_error=True)
    entries.said("bashExecution", None, command="ls", output="a b", exitCode=1)
    entries.said("assistant", [{"type": "text", "text": "Done."}], model="m-1", usage=USAGE)
    return entries


@pytest.mark.parametrize("is_tree", [True, False])
def test_a_pi_session_is_read_to_states(tmp_path: Path, is_tree: bool):
    path = lines(tmp_path / "1_s1.jsonl", *session(Entries(is_tree=is_tree)).rows)
    result, (first, second) = read(path)
    assert result.sessions["agent"].to_pylist() == ["pi"]
    assert (first["outcome"], second["outcome"]) == ("tool_error", "final_text")
    assert first["hint"] == "Command exited with code 2"
    assert result.states["n_context_tokens"].to_pylist() == [1000, 1000]
    roles = [m["role"] for m in second["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert second["messages"][-1]["content"] == (
        "Ran `ls`\n```\na b\n```\n\nCommand exited with code 1"
    )
    assert result.report.skipped == {"bookkeeping": 1}


def test_a_branch_of_a_pi_session_has_its_own_history(tmp_path: Path):
    entries = Entries()
    top = entries.said("user", "Fix it")
    entries.called("t1", "make")
    entries.answered("t1", "fine")
    entries.add("branch_summary", below=top, fromId=entries.last, summary="make was fine")
    entries.said("assistant", [{"type": "text", "text": "Other way"}])
    _, (first, second) = read(lines(tmp_path / "s.jsonl", *entries.rows))
    assert len(first["messages"]) == 2
    said = " ".join(m["content"] for m in second["messages"][1:])
    assert said.startswith("Fix it")
    assert "make was fine</summary>" in said


@pytest.mark.parametrize("is_tree", [True, False])
def test_a_compacted_pi_session_goes_on_from_summary_and_kept_messages(
    tmp_path: Path, is_tree: bool
):
    entries = Entries(is_tree=is_tree)
    entries.said("user", "First")
    entries.called("t1", "make")
    entries.answered("t1", "long ago")
    kept = entries.called("t2", "make test")
    entries.answered("t2", "kept")
    where = {"firstKeptEntryId": kept} if is_tree else {"firstKeptEntryIndex": int(kept[1:])}
    entries.add("compaction", summary="We began.", tokensBefore=9, **where)
    entries.said("assistant", [{"type": "text", "text": "On."}])
    result, states = read(lines(tmp_path / "s.jsonl", *entries.rows))
    assert len(states) == 3
    *_, summary, action, answer = states[-1]["messages"]
    assert "We began." in summary["content"]
    assert action["tool_calls"][0]["function"]["arguments"] == '{"command":"make test"}'
    assert answer["content"] == "kept"
    assert not any("long ago" in str(m) for m in states[-1]["messages"])
    assert result.states["segment"].to_pylist() == [0, 0, 1]


def test_what_the_model_of_a_pi_session_was_not_shown_is_left_out(tmp_path: Path):
    entries = Entries()
    entries.said("user", "Go")
    entries.said("bashExecution", None, command="env", output="PRIVATE", excludeFromContext=True)
    entries.said("assistant", [], stopReason="error", errorMessage="overloaded")
    entries.called("t1", "make", stopReason="aborted")
    result, (state,) = read(lines(tmp_path / "s.jsonl", *entries.rows))
    assert "PRIVATE" not in str(state["messages"])
    assert state["outcome"] == "interrupted"
    assert result.report.skipped == {"transcript_only": 1, "synthetic": 1}
