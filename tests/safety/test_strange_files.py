"""Recipes, folders and files of a stranger: 0 lines of theirs are executed, and none breaks a command."""

import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from replay_pipeline.errors import NormalizeError, TrainError, UntrustedError
from replay_pipeline.ingesters import discover
from replay_pipeline.normalize import DJNormalizer, load_recipe
from replay_pipeline.normalize.executors import execute
from replay_pipeline.replay import ledger_status
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.stages.budget.spending import completed_batches
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.stages.views.summary import summary_of
from replay_pipeline.stages.work.trainer_process import TrainerJob, run_trainer
from replay_pipeline.storage.processes import TRAINER, child_environment, python, start_environment
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import pipeline_at, project_root
from tests.safety.commands import cli, program
from tests.safety.strange_folder import fill


def recipe(folder: Path, *steps) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"process": list(steps)}))
    return path


@pytest.mark.parametrize(
    "step",
    [
        {"python_lambda_mapper": {"lambda_str": "lambda sample: open('ran', 'w') and sample"}},
        {"python_file_mapper": {"file_path": "evil.py", "function_name": "process"}},
        {"general_field_filter": {"filter_condition": "__import__('os').system('touch ran')"}},
        {"llm_quality_score_filter": {"api_or_hf_model": "x"}},
        {"video_ffmpeg_wrapped_mapper": {"filter_name": "x"}},
        {"download_file_mapper": {}},
        "perplexity_filter",
        {"words_num_filter": {"tokenization": True}},
        {"pair_identical_filter": {"runtime_env": {"pip": ["evil"]}}},
        {"text_length_filter": {"stats_export_path": "ran"}},
    ],
    ids=lambda step: next(iter(step)) if isinstance(step, dict) else step,
)
def test_a_recipe_runs_nothing_unless_the_operator_is_allowed_by_name(tmp_path, monkeypatch, step):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')\n")
    path = recipe(tmp_path, "pair_identical_filter", step)
    name = next(iter(step)) if isinstance(step, dict) else step
    with pytest.raises(UntrustedError, match=f"--allow-operator {name}"):
        DJNormalizer(path)
    assert not (tmp_path / "ran").exists()
    if name.endswith("_filter"):
        used = name if name.startswith("pair_") else "pair_each_side_filter"
        labels = load_recipe(path, allow_operators=[name]).labels
        assert labels == ["0.pair_identical_filter", f"1.{used}"]


def test_an_operator_that_was_allowed_is_used(tmp_path):
    step = {"general_field_filter": {"filter_condition": "1 < 2"}}
    normalizer = DJNormalizer(recipe(tmp_path, step), allow_operators=["general_field_filter"])
    assert normalizer.recipe.labels == ["0.pair_each_side_filter"]


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """The current folder is a stranger's."""
    ran = fill(tmp_path / "cloned")
    monkeypatch.chdir(tmp_path / "cloned")
    monkeypatch.setenv("PYTHONPATH", "")
    return ran


@pytest.mark.slow
def test_no_program_that_is_started_imports_from_the_current_folder(strange, tmp_path):
    shown = "import sys, os, replay_pipeline, trainer; print(*sys.path, sep='\\n')"
    command = [*python(TRAINER)[:2], "-c", shown]
    told = subprocess.run(command, env=start_environment(), capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert not {"", str(Path.cwd())} & set(told.stdout.splitlines())
    with TeacherServer(script={"content": "yes"}) as server:
        assert server.bill().n_requests == 0
    with pytest.raises(TrainError, match="no-such-config"):
        run_trainer(
            TrainerJob(
                command=python(TRAINER, "--config", "no-such-config"), output=tmp_path / "m"
            ),
            lambda _: None,
        )
    with pytest.raises(NormalizeError):
        execute(
            [pa.table({"__row__": [0]})], [("no_such_filter", {})],
            executor="default", ray_address="local",
        )  # fmt: skip
    assert cli(["--help"], tmp_path / "cloned").returncode == 0
    assert cli(["status", "--data", str(tmp_path / "none")], tmp_path / "cloned").returncode == 0
    assert not strange.exists()


def test_a_program_that_is_started_gets_no_key_but_those_it_is_given(monkeypatch, tmp_path):
    keys = ("OPENROUTER_API_KEY", "HF_TOKEN", "REPLAY_SALT", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN",
            "HF_HUB_TOKEN", "WANDB_API_KEY", "REPLAY_LEDGER", "RAY_PASSWORD")  # fmt: skip
    for key in keys:
        monkeypatch.setenv(key, "planted-0123456789")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:planted-0123456789@proxy")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    heard = start_environment()
    assert "planted-0123456789" not in "".join(heard.values())
    assert heard["OMP_NUM_THREADS"] == "3"
    assert start_environment(also=["HF_TOKEN"])["HF_TOKEN"] == "planted-0123456789"
    show = "import os; print(dict(os.environ))"
    job = TrainerJob(command=[sys.executable, "-c", show], output=tmp_path, variables=["HF_TOKEN"])
    run_trainer(job, lambda _: None)
    assert (tmp_path / "trainer.log").read_text().count("planted-0123456789") == 1


# What is kept, and who may read it


def modes(root: Path) -> dict[str, int]:
    return {
        path.relative_to(root).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in [root, *root.rglob("*")]
    }


def replayed(root: Path) -> list[str]:
    """Replay a project of the sample; returns the words by which commands find it."""
    work = project_root(root)
    for batch in work.ingest_new():
        work.replay(batch)
    return ["--data", str(root), "--settings", str(root / "settings.toml")]


@pytest.mark.slow
def test_files_honour_the_umask_and_the_ledger_is_for_its_owner(tmp_path):
    before = os.umask(0o022)
    try:
        words = replayed(tmp_path / "data")
    finally:
        os.umask(before)
    open_modes = modes(tmp_path / "data")
    assert {m for p, m in open_modes.items() if p.endswith((".parquet", ".json"))} == {0o644}
    assert {m for p, m in open_modes.items() if "ledger" in p} == {0o600}
    command = [program(), "pairs", *words]
    subprocess.run(command, cwd=tmp_path, env=child_environment(), umask=0o077, check=True)
    made = modes(tmp_path / "data").items() - open_modes.items()
    assert not {p: oct(m) for p, m in made if m & 0o077 and p != "."}


# Bodies of commands that failed


def without_write_access(folder: Path) -> list[str]:
    """Make a folder read-only; gives what a command is to be put behind so that root obeys, too."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() != 0:
        return []
    program = shutil.which("setpriv") or "setpriv"
    return [program, "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.slow
def test_status_works_where_nothing_may_be_written(tmp_path):
    words = replayed(tmp_path / "data")
    behind = without_write_access(tmp_path / "data")
    done = subprocess.run(
        [*behind, program(), "status", *words, "--json"], cwd=tmp_path,
        env=child_environment(), capture_output=True, text=True,
    )  # fmt: skip
    for path in [tmp_path / "data", *(tmp_path / "data").rglob("*")]:
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert '"answered"' in done.stdout
    assert sorted(p.name for p in (tmp_path / "data").glob("*ledger*")) == ["sample-ledger.sqlite"]


def test_a_ledger_is_looked_at_while_it_is_written(tmp_path):
    with closing(Ledger(tmp_path / "l")):
        assert ledger_status(tmp_path / "l").spent_usd == 0


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '"x"', '{"stage": "replay"}',
     '{"stage": "replay", "batch": "b", "version": 1, "report": [], "seconds": 1}',
     '{"stage": "replay", "batch": "b", "fingerprint": "", "report": {}, "seconds": 1}'],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["replay", "ingest"])
def test_a_receipt_of_a_wrong_shape_counts_as_none_and_is_said(tmp_path, caplog, stage, text):
    project_root(tmp_path / "data")
    work = pipeline_at(tmp_path / "data")
    batch = work.find_batches()[0].key
    path = tmp_path / "data" / "receipts" / stage / f"{batch}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert status_of(work)["batches"][batch] == {}
    assert completed_batches(work) == set()
    assert summary_of(work, since="")["batches"] == 0
    assert work.receipts.read(stage, batch) is None
    assert "counts as not done" in caplog.text


@pytest.mark.parametrize("settle_s", [0.0, 60.0])
def test_a_session_with_a_time_in_the_future_is_taken_and_said(tmp_path, caplog, settle_s):
    source = next(path for path in sorted(SESSIONS_DIR.rglob("*.jsonl")))
    path = tmp_path / "late.jsonl"
    shutil.copy(source, path)
    later = time.time() + 40 * 86_400
    os.utime(path, (later, later))
    (batch,) = discover([tmp_path], settle_s=settle_s)
    assert "1 session files have a time in the future" in caplog.text
    assert str(path) in caplog.text
    assert batch.key[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert batch.slices[0].end == path.stat().st_size
