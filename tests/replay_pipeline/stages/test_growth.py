"""What is read of old batches when new ones come: the index, and nothing twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replay_pipeline.stages.ingest import owners_of
from replay_pipeline.stages.views import page
from replay_pipeline.stages.views.page import write_page_of
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.summary import summary_of
from replay_pipeline.storage import folds
from replay_pipeline.storage.folds import Fold, Kept
from replay_pipeline.storage.root_index import FILE, RootIndex
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
    assert len(brought) > 2
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


def test_receipts_read_from_the_index_are_those_of_the_files(work):
    found = list(work.receipts.all())
    assert {(r.stage, r.batch) for r in found} == {
        (path.parent.name, path.stem) for path in (work.root.path / "receipts").rglob("*.json")
    }
    for receipt in found:
        assert work.receipts.read(receipt.stage, receipt.batch) == replace(receipt, is_reused=True)


def test_the_index_follows_files_that_others_write_and_delete(work, tmp_path):
    folder = tmp_path / "batches"
    folder.mkdir()
    index = RootIndex(tmp_path, tmp_path / FILE)
    (folder / "a.json").write_text("1")
    assert index.files("batches") == [("a.json", b"1")]
    (folder / "b.json").write_text("2")
    (folder / "a.json").write_text("11")
    assert index.files("batches") == [("a.json", b"11"), ("b.json", b"2")]
    (folder / "a.json").unlink()
    assert index.files("batches") == [("b.json", b"2")]


def test_states_are_found_by_their_batch_and_only_changed_tables_are_read(work):
    read = []

    def ids(batch: str) -> list[str]:
        read.append(batch)
        return [f"{batch}-{n}" for n in range(3)]

    index = RootIndex(work.root.path, None)
    index.bring_ids({"a": "1", "b": "1"}, ids)
    index.bring_ids({"a": "1", "b": "2"}, ids)
    assert read == ["a", "b", "b"]
    assert (index.batch_of("a-1"), index.batch_of("c-1")) == ("a", None)
    index.bring_ids({"b": "2"}, ids)
    assert index.batch_of("a-1") is None
    table = work.root.read("states", work.batches()[0], columns=["state_id"])
    assert owners_of(work).get(table["state_id"][0].as_py()) == work.batches()[0]


def test_a_fold_goes_on_where_another_process_has_left_it(monkeypatch):
    monkeypatch.setattr(folds, "_WORTH_KEEPING", 2)
    keys, versions, added = [f"{n:02d}" for n in range(9)], {}, []
    index = RootIndex(Path(), None)

    def add(value: list[str], key: str) -> list[str]:
        added.append(key)
        return [*value, key]

    def fold() -> Fold[list[str]]:
        kept = Kept(
            index=index,
            name="keys",
            version_of=lambda key: versions.get(key, "1"),
            encode=lambda value: json.dumps(value).encode(),
            decode=json.loads,
        )
        return Fold(lambda: keys, start=list, add=add, kept=kept)

    assert fold().before("05") == keys[:5]
    assert fold().before("07") == keys[:7]
    assert added == keys[:7]
    versions["03"] = "2"  # one of those that were kept says something else now
    assert fold().before("07") == keys[:7]
    assert added == [*keys[:7], *keys[:7]]


def test_a_fold_that_is_asked_for_an_older_batch_does_not_start_over(monkeypatch):
    monkeypatch.setattr(folds, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(folds, "_KEPT_BEHIND", 10)
    keys, added = [f"{n:02d}" for n in range(60)], []
    index = RootIndex(Path(), None)

    def before(batch: str) -> int:
        kept = Kept(
            index=index,
            name="keys",
            version_of=lambda key: key,
            encode=lambda value: json.dumps(value).encode(),
            decode=json.loads,
        )

        def add(value: int, key: str) -> int:
            added.append(key)
            return value + 1

        return Fold(lambda: keys, start=int, add=add, kept=kept).before(batch)

    assert before("57") == 57
    added.clear()
    assert before("44") == 44
    assert added == keys[40:44]
    assert before("59") == 59
    added.clear()
    assert before("47") == 47
    assert len(added) <= 10


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


def test_an_index_that_is_deleted_is_made_again(work):
    before = status_of(work)
    (work.root.path / FILE).unlink()
    assert status_of(pipeline_at(work.root.path)) == before
