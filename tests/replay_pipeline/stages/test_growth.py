"""What is read of old batches when new ones come: what has changed, and nothing twice."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replay_pipeline.stages.views import page
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.stages.views.summary import summary_of
from replay_pipeline.storage.store import json_files
from tests.roots import PROJECT, Pipeline, pipeline_at, project_root, sample_root
from tests.support.pages import data_of


@pytest.fixture(scope="module")
def work(published, tmp_path_factory) -> Pipeline:
    return pipeline_at(shutil.copytree(published, tmp_path_factory.mktemp("growth") / "data"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_what_was_published_night_by_night_is_what_is_published_at_once(work, tmp_path):
    again = project_root(tmp_path / "data")
    brought = []
    for batch in again.ingest_new():
        for stage in (again.replay, again.pairs, again.normalize):
            stage(batch)
        brought.append(again.publish().report["batches"])
    assert brought == [[batch] for batch in again.batches()]
    assert len(brought) > 1
    theirs, ours = contents(work.root.path / "dataset"), contents(again.root.path / "dataset")
    assert [name for name in ours if name.startswith("data/")] == [
        name for name in theirs if name.startswith("data/")
    ]
    assert again.publish().is_reused


@pytest.mark.slow
def test_only_a_batch_that_has_changed_is_published_again(work):
    batch = work.batches()[1]
    receipt = work.receipts.read("normalize", batch)
    assert receipt is not None
    changed = {**receipt.report, "n_kept": receipt.report["n_kept"] + 1}
    work.receipts.path("normalize", batch).unlink()
    try:
        work.receipts.write(replace(receipt, report=changed))
        assert work.publish().report["batches"] == [batch]
    finally:
        work.receipts.write(receipt)
    assert work.publish().report["batches"] == [batch]


def test_a_session_that_grew_into_a_second_batch_counts_once(tmp_path):
    rows = next(PROJECT.glob("*.jsonl")).read_bytes().splitlines(keepends=True)
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    work = sample_root(tmp_path / "data", sessions=sessions)
    for part in (rows[: len(rows) // 2], rows):
        (sessions / "one.jsonl").write_bytes(b"".join(part))
        work.ingest_new()
    summary = summary_of(work, since="")
    assert (summary["batches"], summary["sessions"]) == (2, 1)


def test_files_that_others_write_and_delete_are_read_again(tmp_path):
    folder = tmp_path / "batches"
    folder.mkdir()
    (folder / "a.json").write_text("1")
    assert json_files(tmp_path, "batches") == [("a.json", b"1")]
    (folder / "b.json").write_text("2")
    (folder / "a.json").write_text("11")
    assert json_files(tmp_path, "batches") == [("a.json", b"11"), ("b.json", b"2")]
    (folder / "a.json").unlink()
    assert json_files(tmp_path, "batches") == [("b.json", b"2")]


def test_a_page_shows_every_pair_once_in_portions_and_forty_to_mark(work, monkeypatch, tmp_path):
    monkeypatch.setattr(page, "_PAIRS_A_PORTION", 15)
    write_page_of(work, tmp_path / "look")
    data = data_of(tmp_path / "look")
    to_mark, *portions = (data[f"pairs-{n}"] for n in range(len(data["pairs"])))
    assert len(portions) > 1
    ids = [
        one
        for batch in work.batches()
        for one in pq.ParquetFile(work.root.part("dpo_pairs", batch)).read()["pair_id"].to_pylist()
    ]
    shown = [item["pair"] for each in portions for item in each["items"] if "pair" in item]
    assert sorted(shown) == sorted(ids) != []
    assert work.batches()[-1] in portions[0]["title"]
    assert len(to_mark["items"]) == min(40, len(ids))
    assert set(to_mark["chances"]) == {item["pair"] for item in to_mark["items"]}
