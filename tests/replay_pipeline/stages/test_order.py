"""A stage that is asked for too early says which command comes first."""

import json

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.errors import ReplayPipelineError
from replay_pipeline.testing.sample import SESSIONS_DIR

FIRST_ON_NOTHING = {
    "estimate": "ingest",
    "replay": "ingest",
    "pairs": "ingest",
    "normalize": "ingest",
    "publish": "normalize",
    "train": "publish",
}
FIRST_ON_STATES = {"pairs": "replay", "normalize": "pairs"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPLAY_TEACHERS", "sample")
    return lambda *words: CliRunner().invoke(app, [*words, "--data", str(tmp_path / "data")])


def assert_names(result, first: str) -> None:
    assert isinstance(result.exception, ReplayPipelineError)
    assert f"run `replay-pipeline {first}` first" in str(result.exception)


@pytest.mark.parametrize("command", FIRST_ON_NOTHING)
def test_on_an_empty_data_root(run, tmp_path, command):
    assert_names(run(command), FIRST_ON_NOTHING[command])
    assert not (tmp_path / "data" / "dataset").exists()


def test_with_nothing_but_states(run):
    project = sorted(path for path in SESSIONS_DIR.iterdir() if path.is_dir())[0]
    assert run("ingest", str(project)).exit_code == 0
    for command, first in FIRST_ON_STATES.items():
        assert_names(run(command), first)


def test_the_state_of_nothing(run):
    assert "run `replay-pipeline ingest` first" in run("status").output


@pytest.mark.slow
def test_a_run_counts_its_ingestion_as_its_own(run):
    project = sorted(path for path in SESSIONS_DIR.iterdir() if path.is_dir())[0]
    done = run("run", str(project), "--no-train", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["seconds"]["ingest"] > 0
    again = json.loads(run("run", str(project), "--no-train", "--json").stdout)
    assert (again["calls"], again["newly_spent_usd"]) == (0, 0)
