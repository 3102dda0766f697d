"""Long files, read in parts of which one is in memory: the same rows as read whole."""

from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.ingesters import IngestResult, claude_code, columns, corpus, ingest
from replay_pipeline.ingesters.claude_code import _parts_of
from replay_pipeline.storage.tables import read_table
from tests.replay_pipeline.ingesters.cut_logs import trap_logs
from tests.replay_pipeline.ingesters.logs import Log
from tests.replay_pipeline.ingesters.random_log import RandomLog

SEEDS = (103, 104, 106, 110, 111, 112, 116, 119, 124, 130, 134, 135, 136)
"""Of logs that come apart: most have a branch that leads back over every compaction."""
LOGS = trap_logs() | {f"long_{seed}": RandomLog(seed, n_turns=60).log for seed in SEEDS}


def in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> IngestResult:
    with monkeypatch.context() as patch:
        patch.setattr(claude_code, "LONG_BYTES", 0)
        patch.setattr(corpus, "LONG_BYTES", 0)
        patch.setattr(claude_code, "_PART_BYTES", 0)
        patch.setattr(columns, "_PART_BYTES", 0)
        return ingest(path)


def rows_of(result: IngestResult, name: str) -> list[dict[str, Any]]:
    rows = result.parts[name].table().to_pylist()
    return sorted(rows, key=lambda row: (row.get("session_id"), row.get("turn_idx")))


@pytest.mark.parametrize("log", LOGS)
def test_a_file_in_parts_has_the_rows_of_the_whole(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = LOGS[log].write(tmp_path)
    whole, parts = ingest(path), in_parts(path, monkeypatch)
    for name in whole.parts:
        assert rows_of(whole, name) == rows_of(parts, name)
    assert whole.report == parts.report


def test_parts_begin_where_nothing_that_follows_names_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(claude_code, "_PART_BYTES", 0)
    log = Log()
    log.user("go")
    log.calls("m1", "t1")
    log.row("system", subtype="compact_boundary")  # its call is answered after it
    log.user("what came before", isCompactSummary=True)
    log.answers("t1", parent="session-1-u2")
    log.says("m2", "on")
    apart = log.row("system", subtype="compact_boundary")
    log.user("and again", isCompactSummary=True)
    log.says("m3", "done")
    path = log.write(tmp_path)
    session_id, cuts = _parts_of(path, len(log.bytes))
    assert session_id == "session-1"
    assert cuts == [
        0,
        log.bytes.index(f'"{apart}"'.encode(), 0) - len('{"type": "system", "uuid": '),
        len(log.bytes),
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_random_logs_come_apart(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claude_code, "_PART_BYTES", 0)
    log = LOGS[f"long_{seed}"]
    assert len(_parts_of(log.write(tmp_path), len(log.bytes))[1]) > 2


def test_parts_of_a_table_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = LOGS["long_116"].write(tmp_path)
    result = in_parts(path, monkeypatch)
    assert len(list(result.parts["turns"])) > 1
    corpus.write_traces(result, tmp_path / "out")
    assert read_table(tmp_path / "out" / "turns.parquet", "turns").equals(result.turns)
