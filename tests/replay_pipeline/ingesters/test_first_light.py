import json
from pathlib import Path

import pytest

from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import ClaudeCodeIngester, ingest, open_traces, write_traces

ROWS = [
    {"type": "user", "uuid": "u1", "parentUuid": None, "message": {"content": "Fix it."}},
    {
        "type": "assistant",
        "uuid": "a1",
        "parentUuid": "u1",
        "message": {
            "id": "m1",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a"}}
            ],
            "usage": {"input_tokens": 5, "output_tokens": 2},
        },
    },
    {
        "type": "user",
        "uuid": "u2",
        "parentUuid": "a1",
        "message": {"content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x = 1"}]},
    },
    {
        "type": "assistant",
        "uuid": "a2",
        "parentUuid": "u2",
        "message": {"id": "m2", "content": [{"type": "text", "text": "Done."}]},
    },
]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps({"sessionId": "s", **row}) + "\n" for row in ROWS))
    return path


def test_a_state_is_everything_before_the_action(session: Path):
    first, second = ClaudeCodeIngester().ingest(session)
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert first["student_action"]["tool_calls"][0]["function"]["name"] == "Read"
    assert second["student_action"] == {"role": "assistant", "content": "Done."}


def test_tables_come_back_as_they_were_written(session: Path, tmp_path: Path):
    result = ingest(session)
    write_traces(result, tmp_path / "out")
    traces = open_traces(tmp_path / "out")
    assert list(traces.materialize()) == list(ClaudeCodeIngester().ingest(session))
    assert traces.states.height == result.report.n_states == 2


def test_a_missing_path_is_one_clear_line(tmp_path: Path):
    with pytest.raises(IngestError, match="no such file or folder"):
        ClaudeCodeIngester().ingest(tmp_path / "none.jsonl")
