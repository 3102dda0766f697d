"""A log of a real Qwen Code, recorded (`python -m tests.client.others` made it), and what it sent."""

import gzip
import json
from pathlib import Path

from replay_pipeline.ingesters import ingest
from tests.replay_pipeline.ingesters.logs import states_of
from tests.replay_pipeline.ingesters.test_opencode_database import plain

RECORDING = Path(__file__).parents[2] / "data" / "qwen_code.json.gz"
N_UNLOGGED = 2
"""Messages about the day and the folder, with which every request begins."""


def test_every_decision_has_the_messages_that_qwen_code_sent(tmp_path: Path):
    recording = json.loads(gzip.decompress(RECORDING.read_bytes()))
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f"{row}\n" for row in recording["rows"]), "utf-8")
    found = ingest(path, redact=False)
    assert found.sessions["agent"].to_pylist() == ["qwen_code"]
    assert found.report.rows == found.report.rows_used + sum(found.report.skipped.values())
    assert found.report.skipped.keys() == {"bookkeeping"}
    states = states_of(found)
    assert [state["outcome"] for state in states] == ["ok", "tool_error", "final_text"]
    assert [state["n_context_tokens"] for state in states] == [100, 200, 300]
    assert [plain(state["messages"]) for state in states] == [
        plain(each["messages"])[N_UNLOGGED:] for each in recording["sent"]
    ]


def test_what_is_not_known_is_told_by_name(tmp_path: Path):
    rows = json.loads(gzip.decompress(RECORDING.read_bytes()))["rows"]
    odd = json.loads(rows[0]) | {"type": "system", "subtype": "dream"}
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(f"{row}\n" for row in [*rows, json.dumps(odd)]), "utf-8")
    skipped = ingest(path).report.skipped
    assert [name for name in skipped if name.startswith("unknown")] == [
        "unknown_system_dream_of_0.15.10"
    ]
