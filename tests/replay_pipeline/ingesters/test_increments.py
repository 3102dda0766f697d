"""A log that is read while it grows, changes or goes away comes to what one full parse finds."""

import json
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import IngestError
from replay_pipeline.ingesters import claude_code
from replay_pipeline.settings import IngestSettings, Settings
from replay_pipeline.stages.pipeline import Pipeline
from tests.replay_pipeline.ingesters.cut_logs import (
    cuts_of,
    read_in_steps,
    read_whole,
    trap_logs,
)
from tests.replay_pipeline.ingesters.logs import Log

CASES = trap_logs()
INGESTED = ("sessions", "turns", "states", "tools")
N_SEQUENCES = 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(N_SEQUENCES))
def test_a_log_that_is_read_in_steps_comes_to_one_full_parse(seed: int, tmp_path: Path):
    random = Random(seed)
    log = CASES[sorted(CASES)[random.randrange(len(CASES))]]
    cuts = cuts_of(random, len(log.bytes))
    assert read_in_steps(log, cuts, tmp_path / "steps") == read_whole(log, tmp_path / "whole")


def pipeline(tmp_path: Path, **options: bool) -> Pipeline:
    ingest = IngestSettings(sources=(tmp_path / "logs",), **options)
    return Pipeline(Settings(data_dir=tmp_path / "root", ingest=ingest))


def states(work: Pipeline) -> dict[str, list[tuple[str, str]]]:
    """Action and outcome of every state, by batch."""
    return {
        batch: [
            (row["action_text"] or str(row["action_tool_calls_json"]), row["outcome"])
            for row in work.root.read("states", batch).to_pylist()
        ]
        for batch in work.root.batches("states")
    }


def half_written() -> Log:
    log = Log()
    log.user("go")
    log.says("m1", "First I look.")
    log.calls("m2", "t2", file_path="a")
    return log


def test_a_decision_that_was_read_half_written_moves_to_the_batch_that_has_it_whole(
    tmp_path: Path,
):
    log = half_written()
    log.write(tmp_path / "logs")
    (first,) = pipeline(tmp_path).ingest_new()
    log.answers("t2")
    log.says("m3", "done")
    log.write(tmp_path / "logs")
    work = pipeline(tmp_path)
    _, second = work.ingest_new()
    assert [text for text, _ in states(work)[first]] == ["First I look."]
    assert [outcome for _, outcome in states(work)[second]] == ["ok", "final_text"]
    report = work.receipts.read("ingest", first).report
    assert (report["n_states"], report["n_superseded"]) == (1, 1)


def test_a_batch_read_again_has_the_bytes_it_was_left_with(tmp_path: Path):
    log = half_written()
    log.write(tmp_path / "logs")
    pipeline(tmp_path).ingest_new()
    log.answers("t2")
    log.write(tmp_path / "logs")
    work = pipeline(tmp_path)
    first, _ = work.ingest_new()
    left = {name: work.root.read(name, first).to_pylist() for name in INGESTED}
    digests = work.digests(first, INGESTED)
    (tmp_path / "root" / "receipts" / "ingest" / f"{first}.json").unlink()
    work = pipeline(tmp_path)
    assert not work.ingest(first).is_reused
    assert left == {name: work.root.read(name, first).to_pylist() for name in INGESTED}
    assert digests == work.digests(first, INGESTED)


def test_a_source_that_is_gone_is_read_from_the_bytes_that_were_kept(tmp_path: Path):
    log = half_written()
    path = log.write(tmp_path / "logs")
    pipeline(tmp_path).ingest_new()
    log.answers("t2")
    log.write(tmp_path / "logs")
    work = pipeline(tmp_path)
    keys = work.ingest_new()
    found = states(work)
    tables = [work.digests(key, INGESTED) for key in keys]
    path.unlink()
    for receipt in (tmp_path / "root" / "receipts" / "ingest").iterdir():
        receipt.unlink()
    work = pipeline(tmp_path)
    assert work.ingest_new() == keys
    assert states(work) == found
    assert [work.digests(key, INGESTED) for key in keys] == tables


def test_kept_bytes_are_for_their_owner_alone(tmp_path: Path):
    half_written().write(tmp_path / "logs")
    pipeline(tmp_path).ingest_new()
    kept = [path for path in (tmp_path / "root" / "sources").rglob("*") if path.is_file()]
    assert [path.stat().st_mode & 0o077 for path in kept] == [0]


@pytest.mark.parametrize("keeps_bytes", [True, False])
def test_a_source_that_is_gone_never_ends_a_run(keeps_bytes: bool, tmp_path: Path):
    path = half_written().write(tmp_path / "logs")
    work = pipeline(tmp_path, keeps_bytes=keeps_bytes)
    work.find_batches()
    path.unlink()
    other = Log("other")
    other.user("go")
    other.says("m9", "here")
    other.write(tmp_path / "logs")
    done = CliRunner().invoke(
        app,
        ["ingest", str(tmp_path / "logs"), "--data", str(tmp_path / "root"), "--json"],
        env={"REPLAY_INGEST__KEEPS_BYTES": str(keeps_bytes)},
    )
    assert done.exit_code == 0, done.output
    reports = [work.receipts.read("ingest", key).report for key in pipeline(tmp_path).batches()]
    assert [report["n_states"] for report in reports] == [2 if keeps_bytes else 0, 1]
    gone = reports[0]["skipped_files"]
    assert gone == ({} if keeps_bytes else {"gone": 1})


def test_a_source_that_came_back_is_read_after_all(tmp_path: Path):
    log = half_written()
    path = log.write(tmp_path / "logs")
    work = pipeline(tmp_path, keeps_bytes=False)
    work.find_batches()
    path.rename(tmp_path / "away")
    work.ingest_new()
    (tmp_path / "away").rename(path)
    work.ingest_new()
    assert [len(rows) for rows in states(work).values()] == [2]


def test_a_batch_that_fails_holds_up_no_other_and_is_told(tmp_path: Path, monkeypatch):
    half_written().write(tmp_path / "logs")
    work = pipeline(tmp_path)
    work.find_batches()
    other = Log("other")
    other.user("go")
    other.says("m9", "here")
    other.write(tmp_path / "logs")
    read = claude_code.ClaudeCode.read

    def breaks(self, path: Path, *args):
        if path.stem == "session-1":
            raise IngestError("this one breaks")
        return read(self, path, *args)

    monkeypatch.setattr(claude_code.ClaudeCode, "read", breaks)
    words = ["ingest", str(tmp_path / "logs"), "--data", str(tmp_path / "root"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert list(json.loads(done.stdout)["failed_batches"].values()) == ["this one breaks"]
    assert [len(rows) for rows in states(pipeline(tmp_path)).values()] == [1]
