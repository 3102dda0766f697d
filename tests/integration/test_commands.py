"""Commands around the pipeline: retraction, status, doctor."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from tests.roots import pipeline_at, project_root

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    project_root(tmp_path / "data", ask_at="consequences").ingest_new()
    return tmp_path / "data"


def command(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_retracted_session_is_gone_and_stays_away(root):
    work = pipeline_at(root)
    for batch in work.batches():
        for stage in (work.replay, work.pairs, work.normalize):
            stage(batch)
    work.publish()
    rows = work.root.read_all("normalized_pairs")["session_id"].to_pylist()
    gone = max(set(rows), key=rows.count)
    with pytest.raises(ConfigError, match="pass --yes"):
        command("retract", "--session", gone, "--data", root)
    with pytest.raises(ConfigError, match="name a session or a batch"):
        command("retract", "--yes", "--data", root)
    before = json.loads((root / "receipts/publish/all.json").read_text())["report"]["rows_by_split"]
    report = json.loads(command("retract", "--session", gone, "--yes", "--data", root, "--json"))
    n_before, n_after = (sum(rows["pairs"].values()) for rows in (before, report["rows_by_split"]))
    assert n_after == n_before - rows.count(gone)
    assert pipeline_at(root).root.read_all("normalized_pairs").num_rows == len(rows), (
        "the tables stay"
    )
    told = CliRunner().invoke(app, ["retract", "--session", "nosuch", "--yes", "--data", str(root)])
    assert told.exit_code == 1
    assert "not in the dataset: nosuch" in told.stderr
    (root / "receipts/publish/all.json").unlink()
    again = pipeline_at(root).publish().report["rows_by_split"]
    assert sum(again["pairs"].values()) == n_after


def test_status_says_whose_money_it_shows(root, monkeypatch):
    work = pipeline_at(root)
    work.replay(work.batches()[0])
    assert "Money of the sample's recorded teachers" in command("status", "--data", root)
    monkeypatch.setenv("REPLAY_TEACHERS", "openrouter")
    assert "Money of real teachers" in command("status", "--data", root)


def test_dagster_works_by_the_settings_that_ui_is_given(root, tmp_path, monkeypatch):
    theirs = (root / "settings.toml").read_text()
    (tmp_path / "mine.toml").write_text(f"{theirs}max_daily_usd = 0.25\n")
    given: dict[str, str] = {}
    monkeypatch.setattr("os.execve", lambda _path, _command, environment: given.update(environment))
    monkeypatch.chdir(tmp_path)
    command("ui", "--settings", "mine.toml", "--data", root)
    monkeypatch.chdir(root)
    assert Settings.load(env=given).replay.max_daily_usd == 0.25
