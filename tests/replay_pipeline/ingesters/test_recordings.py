"""Logs of real clients beside what they sent (`python -m tests.client.recordings` made them)."""

import gzip
import json
from pathlib import Path

import pytest

from tests.client.comparison import compared

RECORDINGS = sorted((Path(__file__).parents[2] / "data" / "clients").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_every_decision_of_a_recorded_client_is_the_request_that_it_sent(
    path: Path, tmp_path: Path
):
    recording = json.loads(gzip.decompress(path.read_bytes()))
    for name, rows in recording["logs"].items():
        lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        (tmp_path / name).write_text(lines, "utf-8")
    requests = [
        (sent["id"], {**sent, "system": [{"text": text} for text in sent["system"]]})
        for sent in recording["sent"]
    ]
    decisions, report = compared(tmp_path, requests)
    assert len(decisions) >= 3
    assert all(decision.is_equal and decision.is_exact for decision in decisions)
    assert report.requests == {"exact": report.n_states}
    assert not [reason for reason in report.skipped if reason.startswith("unknown")]
