"""Long files: the same rows as of short ones, with little in memory."""

from pathlib import Path

import pyarrow as pa
import pytest

from replay_pipeline.ingesters import claude_code, corpus, ingest
from replay_pipeline.storage.tables import read_table
from tests.replay_pipeline.ingesters.cut_logs import trap_logs
from tests.replay_pipeline.ingesters.random_log import RandomLog

LOGS = trap_logs() | {
    f"long_{seed}": RandomLog(seed, n_turns=60).log for seed in (103, 116, 130, 136)
}


@pytest.mark.parametrize("log", LOGS)
def test_a_long_file_has_the_rows_of_a_short_one(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = LOGS[log].write(tmp_path)
    short = ingest(path)
    for module in (claude_code, corpus):
        monkeypatch.setattr(module, "LONG_BYTES", 0)
    monkeypatch.setattr(corpus, "_PART_BYTES", 0)
    long = ingest(path)
    for name in short.parts:
        assert pa.concat_tables(long.parts[name]).equals(pa.concat_tables(short.parts[name]))
    assert long.report == short.report


def test_parts_of_a_table_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "_PART_BYTES", 0)
    folder = tmp_path / "logs"
    for name in ("long_116", "long_130"):
        LOGS[name].write(folder)
    result = ingest(folder)
    assert len(list(result.parts["turns"])) > 1
    corpus.write_traces(result, tmp_path / "out")
    assert read_table(tmp_path / "out" / "turns.parquet", "turns").equals(result.turns)
