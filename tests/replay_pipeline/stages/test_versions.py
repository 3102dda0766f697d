"""Stale work is found and done again, and nothing is paid twice."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from replay_pipeline.errors import CheckFailedError
from replay_pipeline.ingesters import read_manifest
from replay_pipeline.settings import Settings
from replay_pipeline.stages import chain
from replay_pipeline.stages.budget.spending import stale_work
from replay_pipeline.stages.ingest import INGEST
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.status import status_of
from tests.roots import PROJECT, pipeline_at, project_root, run_batches


@pytest.fixture
def root(published, tmp_path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "data"))


def with_version(monkeypatch: pytest.MonkeyPatch, name: str, version: int) -> None:
    """Give a stage of the chain another version."""
    stages = [
        replace(stage, version=version) if stage.name == name else stage for stage in chain.STAGES
    ]
    monkeypatch.setattr(chain, "STAGES", stages)


def test_what_is_stale_is_listed_where_no_price_is_known(root):
    other = {"name": "other", "model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": ""}
    replay = {"teachers": [other], "sample_teachers": False}
    found = stale_work(pipeline_at(root, replay=replay))
    assert {"replay"} <= {stage for row in found["batches"].values() for stage in row}
    assert found["cost"] is None
    assert "other" in found["no_price"]


def test_a_changed_setting_is_stale_with_both_values_until_its_stage_has_run(root):
    plain = pipeline_at(root)
    first, *rest = plain.batches()
    assert stale_work(plain) == {"batches": {}, "cost": None, "no_price": None}
    work = pipeline_at(root, pairs={"include_natural": False})
    changed = {"pairs": ["pairs.include_natural: True → False"]}
    assert stale_work(work)["batches"] == dict.fromkeys([first, *rest], changed)
    assert not work.pairs(first).is_reused
    assert "pairs" not in stale_work(work)["batches"].get(first, {})
    for batch in work.batches():
        work.pairs(batch)
        work.normalize(batch)
    work.publish()
    assert stale_work(work)["batches"] == {}


def test_an_address_or_the_spelling_of_a_folder_makes_nothing_stale(root, monkeypatch):
    spelled = {"folder": root.parent / root.name / ".." / root.name / "dataset"}
    quick = [
        spec.model_dump() | {"max_concurrency": 3}
        for spec in pipeline_at(root).settings.replay.teachers
    ]
    work = pipeline_at(root, publish=spelled, replay={"teachers": quick})
    assert stale_work(work)["batches"] == {}
    assert work.publish().is_reused
    monkeypatch.chdir(root.parent)
    relative = Settings.load(root / "settings.toml", data_dir=Path(root.name))
    assert stale_work(Pipeline(relative))["batches"] == {}


@pytest.mark.slow
def test_a_raised_version_runs_its_stage_again_and_what_comes_out_alike_nothing_after_it(
    root, monkeypatch
):
    before = {path: path.read_bytes() for path in root.rglob("*.parquet")}
    spent_usd = status_of(pipeline_at(root))["ledger"]["spent_usd"]
    with_version(monkeypatch, "ingest", INGEST.version + 1)
    work = pipeline_at(root)
    reason = [f"version {INGEST.version} → {INGEST.version + 1}"]
    stale = {batch: {"ingest": reason} for batch in work.batches()}
    assert stale_work(work) == {"batches": stale, "cost": None, "no_price": None}
    other = {"publish": {"test_fraction": 0.5}}
    with pytest.raises(CheckFailedError, match="status --stale"):
        pipeline_at(root, **other).publish()
    for batch in work.batches():
        assert not work.ingest(batch).is_reused
        assert all(stage(batch).is_reused for stage in (work.replay, work.pairs, work.normalize))
    assert work.publish().is_reused
    assert {path: path.read_bytes() for path in root.rglob("*.parquet")} == before
    assert status_of(work)["ledger"]["spent_usd"] == spent_usd
    assert pipeline_at(root, **other).publish().report["rows_by_split"]


@pytest.mark.slow
def test_a_root_of_another_version_is_made_again_without_paying(root, caplog):
    for path in (root / "receipts").rglob("*.json"):
        told = json.loads(path.read_text())
        del told["version"]
        path.write_text(json.dumps(told | {"fingerprint": "f"}))
    before = {path: path.read_bytes() for path in root.rglob("*.parquet")}
    spent_usd = status_of(pipeline_at(root))["ledger"]["spent_usd"]
    assert "the ledger keeps what is paid for" in caplog.text
    work = pipeline_at(root)
    run_batches(work)
    assert work.publish().report["rows_by_split"]
    assert {path: path.read_bytes() for path in root.rglob("*.parquet")} == before
    assert status_of(work)["ledger"]["spent_usd"] == spent_usd


def test_what_was_read_from_logs_that_are_gone_is_redacted_again(tmp_path, monkeypatch):
    sessions = tmp_path / "sessions"
    shutil.copytree(PROJECT, sessions)
    work = project_root(tmp_path / "data")
    options = {"sources": [sessions], "keeps_bytes": False}
    work = pipeline_at(tmp_path / "data", ingest=options)
    batch = work.ingest_new()[0]
    before = {name: work.root.read(name, batch) for name in ("turns", "states")}
    shutil.rmtree(sessions)
    assert work.ingest(batch).is_reused

    with_version(monkeypatch, "ingest", INGEST.version + 1)
    again = work.ingest(batch)
    assert not again.is_reused
    assert again.report["n_files_gone"] == len(read_manifest(batch, work.root.path).slices)
    assert {name: work.root.read(name, batch) for name in before} == before

    states = work.root.read("states", batch)
    place = states.column_names.index("action_text")
    told = ["the key is ghp_" + "a1B2c3" * 6] * states.num_rows
    work.root.write("states", batch, states.set_column(place, "action_text", [told]))
    with_version(monkeypatch, "ingest", INGEST.version + 2)
    assert work.ingest(batch).report["redactions"]["github-token"] == states.num_rows
    assert not any(
        "ghp_" in text for text in work.root.read("states", batch)["action_text"].to_pylist()
    )
