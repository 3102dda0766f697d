"""Batches that are read by several processes come to what one process makes of them."""

import shutil
from pathlib import Path

import pytest

from replay_pipeline.settings import IngestSettings, Settings
from replay_pipeline.stages import read_ahead
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.storage.schemas import INGESTED
from tests.replay_pipeline.ingesters.random_log import RandomLog


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sessions, of which two are one and the same under two names."""
    folder = tmp_path_factory.mktemp("logs")
    for seed in range(5):
        RandomLog(seed, n_turns=12).log.write(folder / str(seed))
    first = next((folder / "0").glob("*.jsonl"))
    (folder / "z").mkdir()
    shutil.copy(first, folder / "z" / "copied.jsonl")
    return folder


def ingested(root: Path, logs: Path, n_processes: int) -> Pipeline:
    options = IngestSettings(sources=(logs,), max_batch_sessions=1, n_processes=n_processes)
    work = Pipeline(Settings(data_dir=root, ingest=options))
    assert len(work.ingest_new()) == 6
    return work


def tables_of(work: Pipeline) -> dict[str, bytes]:
    return {
        f"{name} {batch}": path.read_bytes()
        for name in INGESTED
        for batch in work.root.batches(name)
        for path in (work.root.path / name / f"trace_batch={batch}").glob("*.parquet")
    }


@pytest.mark.slow
def test_two_processes_write_the_bytes_that_one_writes(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = ingested(tmp_path / "alone", logs, 1)
    monkeypatch.setattr(read_ahead, "WORTH_BYTES", 0)
    read: list[str] = []
    result = read_ahead.ReadAhead.result

    def seen(self, batch):
        found = result(self, batch)
        read.extend([batch.key] * (found is not None))
        return found

    monkeypatch.setattr(read_ahead.ReadAhead, "result", seen)
    together = ingested(tmp_path / "together", logs, 2)
    assert read == together.batches()
    assert tables_of(together) == tables_of(alone)
    assert len(tables_of(alone)) == 6 * len(INGESTED)
    reports = [[r.report for r in w.receipts.all()] for w in (alone, together)]
    assert reports[0] == reports[1]
    assert sum(report["n_duplicate_states"] for report in reports[0]) > 0


def test_a_process_that_dies_costs_nothing_but_time(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alone = ingested(tmp_path / "alone", logs, 1)
    monkeypatch.setattr(read_ahead, "WORTH_BYTES", 0)
    monkeypatch.setattr(read_ahead, "python", lambda _: ["false"])
    assert tables_of(ingested(tmp_path / "together", logs, 2)) == tables_of(alone)
