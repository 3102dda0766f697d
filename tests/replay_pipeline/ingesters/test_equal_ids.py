"""Ids are hints: order and content decide what is a decision, a copy, and the answer of a call."""

from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import ingest
from tests.replay_pipeline.ingesters.logs import Log, shape, states_of, tool_use
from tests.roots import sample_root

SIGNS: dict[str, Any] = {
    "requests": lambda n: {"requestRef": f"r{n}"},
    "blocks": lambda n: {"apiBlockIndex": 0},
    "tokens": lambda n: {"message": {"usage": {"input_tokens": 100 + n, "output_tokens": 1}}},
    "answered calls": lambda n: {"message": {"id": "msg" if n < 3 else "last"}},
}


def of_one_name(sign: str, words: str = "one", session: str = "session-1") -> Log:
    """A session in which every message and every call has the same id."""
    log = Log(session)
    log.user(f"go {words}")
    for n in range(3):
        log.says("msg", tool_use("call_0", "Bash", command=f"{words} {n}"), **SIGNS[sign](n))
        log.answers("call_0", f"result {n}")
    log.says("msg", f"{words} is done", **SIGNS[sign](3))
    return log


@pytest.mark.parametrize("sign", SIGNS)
def test_messages_and_calls_of_one_id_are_told_apart_by_their_place(sign: str, tmp_path: Path):
    log = of_one_name(sign)
    found = states_of(ingest(log.write(tmp_path), redact=False))
    assert len(found) == len({state["state_id"] for state in found}) == 4
    assert shape(found[-1]["messages"])[1:] == [
        "(call_0)", "call_0=result 0", "(call_0~1)", "call_0~1=result 1",
        "(call_0~2)", "call_0~2=result 2",
    ]  # fmt: skip
    assert {state["outcome"] for state in found} == {"ok", "final_text"}


def test_parallel_calls_of_one_id_are_answered_in_order(tmp_path: Path):
    log = Log()
    log.user("go")
    log.says("m1", *(tool_use("REDACTED", "Bash", command=str(n)) for n in range(3)))
    for n in range(3):
        log.answers("REDACTED", f"result {n}")
    log.says("m2", "done")
    *_, last = states_of(ingest(log.write(tmp_path), redact=False))
    assert shape(last["messages"])[2:] == [
        "REDACTED=result 0", "REDACTED~1=result 1", "REDACTED~2=result 2"
    ]  # fmt: skip


@pytest.mark.parametrize("session", ["session-1", "session-2"])
@pytest.mark.parametrize("is_later", [False, True])
def test_two_sessions_with_the_same_ids_are_two(session: str, is_later: bool, tmp_path: Path):
    """Whether one is read with the other or after it; a copy of either adds nothing."""
    one, two = of_one_name("tokens"), of_one_name("tokens", "two", session)
    logs = [(one, "a/one.jsonl"), (two, "b/two.jsonl"), (one, "c/one.jsonl"), (two, "d/two.jsonl")]
    root, folder = tmp_path / "data", tmp_path / "logs"
    for log, name in logs:
        log.write(folder, name)
        if is_later:
            sample_root(root, sessions=folder).ingest_new()
    work = sample_root(root, sessions=folder)
    work.ingest_new()
    states = [row for key in work.batches() for row in work.root.read("states", key).to_pylist()]
    texts = [(row["action_text"], row["action_tool_calls_json"]) for row in states]
    assert len(states) == len(set(texts)) == len({row["state_id"] for row in states}) == 8
    assert len({row["conversation"] for row in states}) == 2
