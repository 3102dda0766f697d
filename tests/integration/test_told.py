"""What commands tell: what was new, what is left, what finishing costs, and why most calls failed."""

import itertools
import json
import re
import shutil

import dagster as dg
import pytest
from typer.testing import CliRunner

from replay_pipeline.assets.checks import as_result
from replay_pipeline.cli import app
from replay_pipeline.cli.bars import progress_bars
from replay_pipeline.errors import ConfigError
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.stages.audit.tables import faithful_prefixes
from replay_pipeline.storage.tables import DataRoot
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.sample import ANSWERS_FILE
from replay_pipeline.types import Progress
from tests.roots import PROJECT
from tests.support.settings_files import write_settings

SESSION = sorted(PROJECT.glob("*.jsonl"))[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_TEACHERS", "sample")
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "root"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [*map(str, words)])


def test_ingest_says_in_one_sentence_what_was_read_what_not_and_why(run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.json").write_text('{"no": "session"}')
    nothing = run("ingest", tmp_path / "logs")
    assert nothing.exit_code == 1
    assert "Read 0 of 1 files (not read: foreign 1) with 0 answers of models" in nothing.output
    for name in ("b.jsonl", "c.jsonl"):
        shutil.copy(SESSION, tmp_path / "logs" / name)
    found = run("ingest", tmp_path / "logs")
    assert found.exit_code == 0, found.output
    (told,) = re.findall(r"Read 2 of 2 files with (.*), from (.*) rows", found.output)
    n_answers, n_states, n_copies = map(int, re.findall(r"\d+", told[0]))
    assert n_answers == 2 * n_states == 2 * n_copies
    assert "copies" in told[0]


@pytest.mark.slow
def test_a_replay_under_a_ceiling_tells_why_it_stopped_what_is_left_and_what_finishing_costs(run):
    run("ingest", SESSION)
    whole = run("replay", "--budget", "0", "--json")
    report = next(iter(json.loads(whole.stdout).values()))
    n_left = report["skipped"]["budget"]
    assert n_left > 0
    for command in (("replay", "--budget", "0"), ("status",)):
        assert (
            f"{n_left} questions were not sent because the ceiling was reached in 1 batch"
            in run(*command).output
        )
    run("replay")
    assert "Left to ask: no question." in run("status").output


def test_teachers_that_answer_nothing_are_a_failure_with_its_commonest_reason(
    run, tmp_path, monkeypatch
):
    monkeypatch.delenv("REPLAY_TEACHERS")
    with TeacherServer(script={"status": 404}) as server:
        lines = ["[replay]", "sample_teachers = false", "confirm_above_usd = 100.0"]
        for teacher in server.teachers():
            lines += [
                "[[replay.teachers]]",
                f'name = "{teacher.name}"',
                f'model = "{teacher.model}"',
            ]
            lines += [f'base_url = "{teacher.base_url}"', 'api_key_env = ""']
            lines += ["price = {prompt = 0, completion = 0}"]
        settings = tmp_path / "mine.toml"
        settings.write_text("\n".join(lines))
        run("ingest", SESSION, "--settings", settings)
        done = run("replay", "--settings", settings)
    assert done.exit_code == 1, done.output
    assert "calls failed, most often with" in done.output


def test_money_is_told_by_its_tenths_and_every_ten_seconds(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: 6 * next(clock))
    with progress_bars() as on_progress:
        for n in range(12):
            usd = 0.02 * n
            on_progress(
                Progress(stage="replay", n_done=n, n_total=5_000, cost_usd=usd, limit_usd=2.0)
            )
    lines = capsys.readouterr().err.splitlines()
    # Every ten seconds, which is every second one here, and where a tenth of the money is spent.
    assert [line.split()[1] for line in lines] == ["0", "2", "4", "6", "8", "10"]
    assert lines[-1] == "replay 10 of 5,000, $0.2000 of $2.00"


def test_a_replay_of_what_is_finished_tells_that_nothing_was_asked_now(run):
    run("ingest", SESSION)
    first = next(iter(json.loads(run("replay", "--json").stdout).values()))
    assert "Nothing was asked now" in run("replay").output
    again = next(iter(json.loads(run("replay", "--json").stdout).values()))
    assert (again["n_sent"], again["newly_spent_usd"]) == (0, 0)
    assert again["n_cached"] == first["n_sent"] + first["n_cached"] > 0
    assert again["spent_usd"] == first["spent_usd"] > 0


@pytest.fixture
def served(run, tmp_path, monkeypatch):
    """Commands with a settings file whose teachers are real to them: they cost and are confirmed."""
    monkeypatch.delenv("REPLAY_TEACHERS")
    with TeacherServer(ANSWERS_FILE) as server:
        write_settings(
            tmp_path / "root",
            replay={"teachers": server.teachers(), "confirm_above_usd": 0.001, "gates": []},
            normalize={"recipe": "none"},
        )
        monkeypatch.setenv("REPLAY_SETTINGS", str(tmp_path / "root" / "settings.toml"))
        run("ingest", SESSION)
        yield run


def test_a_confirmation_names_no_more_than_the_ceiling(served):
    expected = json.loads(served("estimate", "--json").stdout)["expected_usd"]
    assert expected > 0.01
    refused = served("replay", "--budget", "0.004")
    assert isinstance(refused.exception, ConfigError)
    assert "expected to cost 0.00 USD, its ceiling (all of it: " in str(refused.exception)
    assert f"(all of it: {expected:.2f})" in str(refused.exception)
    assert served("replay", "--budget", "0.0005", "--yes").exit_code == 0


def test_a_check_that_judged_nothing_says_so_and_is_no_warning(tmp_path):
    result = as_result(faithful_prefixes(DataRoot(tmp_path), []))
    assert result.passed
    assert result.metadata["looked at"].value == "0"
    assert "Judged nothing" in result.description
    judged = as_result(AuditResult(judged=3))
    assert judged.passed
    assert judged.description is None
    # Of every number Dagster draws a plot, and of how many were looked at nobody needs one.
    assert isinstance(judged.metadata["looked at"], dg.TextMetadataValue)
