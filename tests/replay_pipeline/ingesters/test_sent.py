"""Requests as a log holds them: hashes worked out here by what is known of the format, not by the reader."""

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import Traces, ingest, open_traces, write_traces
from tests.replay_pipeline.ingesters.logs import Log, shape, tool_use
from tests.replay_pipeline.ingesters.test_traps import by_message

SYSTEM = [{"type": "text", "text": "You are a client."}, {"type": "text", "text": "Act."}]
TOOLS = [{"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}}]
SHAPE = {"system": SYSTEM, "tools": TOOLS}
PARAMS = {"model": "claude-opus-5-5", "max_tokens": 9, "thinking": {"type": "adaptive"}}
Wire = dict[str, Any]


def name_of(value: Any) -> str:
    """SHA-256 of compact JSON with sorted keys that is not escaped to ASCII."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


def user(*texts: str) -> Wire:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def said(*blocks: Wire) -> Wire:
    return {"role": "assistant", "content": list(blocks)}


def answered(**results: str) -> Wire:
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": call_id, "content": content}
            for call_id, content in results.items()
        ],
    }


class SentLog(Log):
    """A log that holds requests."""

    def __init__(self, **common: Any) -> None:
        super().__init__(version="2.1.330", **common)
        self.row("api-request-shape", uuid=None, shapeHash=name_of(SHAPE), shape=SHAPE)

    def blob(self, message: Wire) -> str:
        name = name_of(message)
        self.row("api-request-blob", uuid=None, hash=name, message=message)
        return name

    def request(self, name: str, *tail: str, base: str | None = None, keep: int = 0) -> None:
        before = {} if base is None else {"base": base}
        self.row(
            "api-request", uuid=None, id=name, shapeHash=name_of(SHAPE), params=PARAMS, keep=keep,
            tail=list(tail), **before,
        )  # fmt: skip


REMINDER = "<system-reminder>\nIt rains é 🙂 \u2028 \x07 \"'\\\n</system-reminder>"
CALLS = [tool_use("t1", file_path="a", depth=1.5), tool_use("t2", file_path="b")]


def two_requests(*, is_met: bool = True) -> SentLog:
    """A session of two requests: reminders that only a blob holds, parallel calls, a system message."""
    log = SentLog()
    log.user("go")
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    log.request("r1", log.blob(user(REMINDER, "go")), log.blob(system))
    first = log.says(
        "m1", {"type": "thinking", "thinking": "hm", "signature": "x"}, requestRef="r1"
    )
    log.says("m1", CALLS[0] | {"caller": {"type": "direct"}}, requestRef="r1")
    log.answers("t1", "first")
    log.says("m1", CALLS[1], requestRef="r1", parent=first)
    log.answers("t2", "second")
    log.request(
        "r2",
        name_of(said({"type": "thinking", "thinking": "hm", "signature": "x"}, *CALLS)),
        name_of(answered(t1="first", t2="second")) if is_met else "0" * 64,
        base="r1",
        keep=2,
    )
    log.says("m2", "done", requestRef="r2")
    return log


def test_a_decision_is_shown_the_request_as_it_was_sent(tmp_path: Path):
    log = two_requests()
    result = ingest(log.write(tmp_path), redact=False)
    states = by_message(result, log)
    assert result.report.requests == {"exact": 2}
    assert result.report.rows == result.report.rows_used + sum(result.report.skipped.values())
    assert states["m1"]["messages"] == [
        {"role": "system", "content": "You are a client.\n\nAct."},
        {"role": "user", "content": f"{REMINDER}\n\ngo"},
        {"role": "system", "content": "Be brief."},
    ]
    assert states["m2"]["messages"][:3] == states["m1"]["messages"]
    assert shape(states["m2"]["messages"])[1:] == ["(t1+t2)", "t1=first", "t2=second"]
    for state in states.values():
        assert state["fidelity"] == "exact"
        assert state["system"] == ["You are a client.", "Act."]
        assert state["params"] == PARAMS
        (tool,) = state["tools"]
        assert tool["function"] == {
            "name": "Read", "description": "Reads.", "parameters": {"type": "object"}
        }  # fmt: skip
    assert result.states["fidelity"].to_pylist() == [1.0, 1.0]


def test_a_request_with_a_message_that_nothing_meets_is_counted_told_and_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    log = two_requests(is_met=False)
    with caplog.at_level(logging.WARNING):
        result = ingest(log.write(tmp_path), redact=False)
    states = by_message(result, log)
    assert result.report.requests == {"exact": 1, "not_met": 1}
    assert "1 decisions name a request whose messages are not all in the log" in caplog.text
    assert (states["m1"]["fidelity"], states["m2"]["fidelity"]) == ("exact", "rebuilt")
    assert shape(states["m2"]["messages"]) == ["> go", "(t1+t2)", "t1=first", "t2=second"]


def test_a_blob_that_is_not_what_its_hash_says_is_not_believed(tmp_path: Path):
    log = SentLog()
    log.user("go")
    log.request("r1", name_of(user("something else")))
    false = {"hash": name_of(user("something else")), "message": user("made up")}
    log.row("api-request-blob", uuid=None, **false)
    log.says("m1", "done", requestRef="r1")
    result = ingest(log.write(tmp_path), redact=False)
    assert result.report.requests == {"not_met": 1}
    assert shape(by_message(result, log)["m1"]["messages"]) == ["> go"]


def test_what_was_sent_is_redacted_stored_once_and_no_turn_of_the_conversation(tmp_path: Path):
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    log = SentLog()
    log.user("go")
    first = log.blob(user(f"token {secret}", "go"))
    log.request("r1", first)
    log.says("m1", "one", requestRef="r1")
    log.user("more")
    log.request("r2", first, name_of(said({"type": "text", "text": "one"})), name_of(user("more")))
    log.says("m2", "two", requestRef="r2")
    result = ingest(log.write(tmp_path))
    write_traces(result, tmp_path / "out")
    traces: Traces = open_traces(tmp_path / "out")
    kinds = traces.turns["kind"].to_list()
    assert [kinds.count(kind) for kind in ("sent", "shape", "user", "assistant")] == [3, 1, 2, 2]
    assert result.sessions["n_turns"].to_pylist() == [4]
    assert all(
        (index < 0) == (kind in ("sent", "shape"))
        for index, kind in zip(traces.turns["turn_idx"], kinds, strict=True)
    )
    told = json.dumps([*traces.materialize()], default=str)
    assert secret not in told + json.dumps(result.turns.to_pylist(), default=str)
    assert "token <SECRET:" in told
