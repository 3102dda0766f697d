"""What commands tell: what was new, what is left, what finishing costs, and why most calls failed."""

import json

import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.cli.console import open_words, progress_bars
from replay_pipeline.cli.shared import exit_if_most_failed
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.summary import open_work
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.sample import SESSIONS_DIR
from replay_pipeline.types import Progress

SESSION = sorted((SESSIONS_DIR / "-home-mira-code-tideline").glob("*.jsonl"))[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_TEACHERS", "sample")
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "root"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [*map(str, words)])


def test_ingest_tells_what_was_new_and_where_it_is_and_a_second_one_that_nothing_was(run, tmp_path):
    first = run("ingest", SESSION)
    assert first.exit_code == 0, first.output
    assert str(tmp_path / "root") in first.output
    assert "redacted" in first.output
    assert "fidelity" in first.output
    assert "replay-pipeline estimate" in first.output
    assert "Nothing was new" not in first.output
    assert "Nothing was new" in run("ingest", SESSION).output


def test_a_replay_under_a_ceiling_tells_why_it_stopped_what_is_left_and_what_finishing_costs(run):
    run("ingest", SESSION)
    whole = run("replay", "--budget", "0", "--json")
    report = next(iter(json.loads(whole.stdout).values()))
    n_left = report["skipped"]["budget"]
    assert n_left > 0
    for command in (("replay", "--budget", "0"), ("status",)):
        assert f"{n_left} questions were not sent (budget 1)" in run(*command).output
    run("replay")
    assert "no question (completed 1)" in run("status").output


def test_status_tells_the_fidelity_of_a_batch(run):
    run("ingest", SESSION)
    assert "claude_code" in run("status").output


def test_finishing_costs_what_the_answers_cost():
    report = {
        "skipped": {"budget": 30, "near_duplicates": 7}, "n_answers": 10, "spent_usd": 2.0,
        "stop_reason": "budget", "errors": {"timeout": 1},
    }  # fmt: skip
    work = open_work([report])
    assert (work["n_questions_left"], work["left_usd"]) == (30, pytest.approx(6.0))
    assert "about $6.0000 to finish" in open_words(work)


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


def test_half_of_the_calls_may_fail(capsys):
    exit_if_most_failed({"errors": {"timeout": 3}, "n_answers": 3})
    assert capsys.readouterr().err == ""


def test_progress_off_a_terminal_is_a_line_at_every_tenth(capsys):
    with progress_bars() as on_progress:
        for n in range(101):
            on_progress(Progress(stage="replay", n_done=n, n_total=100, cost_usd=0.5))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "replay 0 of 100, $0.5000"
    assert lines[-1] == "replay 100 of 100, $0.5000"
    assert len(lines) == 11


def test_a_stage_of_several_batches_is_told_once_and_never_goes_back(capsys):
    with progress_bars() as on_progress:
        on_progress(Progress(stage="replay", n_done=0, n_total=1_100, limit_usd=5.0))
        for part, n_total in (("b1", 100), ("b2", 1_000)):
            for n in range(0, n_total + 1, 50):
                on_progress(
                    Progress(
                        stage="replay", n_done=n, n_total=n_total, part=part, cost_usd=n / 1_000
                    )
                )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "replay 0 of 1,100, $0.0000 of $5.00"
    assert lines[-1] == "replay 1,100 of 1,100, $1.1000 of $5.00"
    assert len(lines) == 11


def test_ingestion_is_told_in_bytes_of_what_is_done(run, tmp_path):
    """A bar that counts files stands at ten of eleven while the longest is redacted."""
    seen: list[Progress] = []
    sessions = sorted((SESSIONS_DIR / "-home-mira-code-tideline").glob("*.jsonl"))
    settings = Settings.load(
        data_dir=tmp_path / "other",
        changes={"ingest": {"sources": sessions, "max_batch_sessions": 2}},
    )
    Pipeline(settings, on_progress=seen.append).ingest_new()
    n_bytes = sum(session.stat().st_size for session in sessions)
    assert seen[0] == Progress(stage="ingest", n_done=0, n_total=n_bytes, unit="bytes")
    last = {each.part: each for each in seen[1:]}
    assert len(last) == -(-len(sessions) // 2)
    assert sum(each.n_done for each in last.values()) == n_bytes
    Pipeline(settings, on_progress=seen.append).ingest_new()
    assert seen[-1] == Progress(stage="ingest", n_done=0, n_total=0, unit="bytes")


def test_questions_that_were_not_sent_are_not_told_as_done(run, tmp_path):
    seen: list[Progress] = []
    run("ingest", SESSION)
    settings = Settings.load(data_dir=tmp_path / "root", changes={"replay": {"max_total_usd": 0}})
    work = Pipeline(settings, on_progress=seen.append)
    work.replay_within()(work.batches()[0])
    n_left = work.status()["open"]["n_questions_left"]
    assert seen[-1].n_total == n_left + seen[-1].n_done
    assert seen[0].n_total == n_left
    assert seen[-1].n_done == 0
