"""Replicas of a Hugging Face trainer, launched as processes and joined by a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.forked import forked_python
from tests.trainer.programs import SMALL, words_of
from trainer.__main__ import main
from trainer.diloco import LocalProcessExecutor, ReplicaHandle
from trainer.diloco.environment import ReplicaPlace, replica_place
from trainer.diloco.executors.ledger import JobLedger
from trainer.diloco.launch import launch, launch_command
from trainer.errors import TrainerConfigError

REPO = Path(__file__).parents[3]


def handles_in(work_dir):
    """Return the last start of every rank."""
    rows = JobLedger(work_dir / "ledger.sqlite").rows()
    return list({row.rank: ReplicaHandle.from_json(row.handle) for row in rows}.values())


def test_a_cloud_replica_needs_a_store_that_it_can_see(tmp_path, capsys):
    options = ["--executor", "hf_jobs", "--work-dir", str(tmp_path)]
    assert launch_command(options) == 2
    assert "cannot see a local folder" in capsys.readouterr().err


def test_who_only_watches_replicas_loads_no_torch():
    code = "import sys, trainer.diloco.launch as watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


SLEEPY = "import sys, time, pathlib; time.sleep(0.3); print('done', sys.argv[1])"


def launched(tmp_path, code=SLEEPY, **options):
    return launch(
        ["-c", code, "{rank}"],
        replicas=2,
        uri=f"file://{tmp_path}/store",
        executor=LocalProcessExecutor(tmp_path),
        entrypoint=sys.executable,
        poll_s=0.02,
        work_dir=tmp_path,
        **options,
    )


def test_the_same_launch_again_goes_on_with_the_replicas_that_are_there(tmp_path):
    assert launched(tmp_path, is_detached=True) == []
    before = handles_in(tmp_path)
    assert [(r.attempt, r.log) for r in launched(tmp_path)] == [(0, "done 0\n"), (0, "done 1\n")]
    assert handles_in(tmp_path) == before
    with pytest.raises(TrainerConfigError, match="other arguments"):
        launched(tmp_path, code="print()")


def test_a_watch_taken_over_starts_anew_what_died_meanwhile(tmp_path):
    code = "import os, sys; sys.exit(int(os.environ['REPLICA_ATTEMPT']) < int(sys.argv[1]))"
    launched(tmp_path, code=code, is_detached=True)
    assert [result.attempt for result in launched(tmp_path, code=code)] == [0, 1]
    handles = handles_in(tmp_path)
    assert [handle.attempt for handle in handles] == [0, 1], "the next to take over finds them"


def test_stop_and_logs_find_the_replicas_of_a_detached_launch(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setenv("BUCKET_KEY", "s3cr3t-value")
    work_dir = ["--work-dir", str(tmp_path)]
    nothing = ["--set", f"dataset={tmp_path}/nothing", "--set", "output={rank}"]
    assert main(["launch", "--logs", *work_dir]) == 2
    assert "no launch was started" in capsys.readouterr().err
    options = ["--detach", "--secret", "BUCKET_KEY", "--env", "COLOUR=blue", "--replicas", "1"]
    assert main(["launch", *work_dir, *options, "--max-restarts", "0", *nothing]) == 0
    assert not any(b"s3cr3t" in path.read_bytes() for path in tmp_path.glob("*.json*"))
    assert handles_in(tmp_path)[0].env == {"COLOUR": "blue"}
    assert main(["launch", "--stop", *work_dir]) == 0
    assert main(["launch", "--logs", *work_dir]) == 0
    assert capsys.readouterr().out.startswith("replica 0: cancelled\n")
    assert main(["launch", "--attach", *work_dir]) == 2, "who was stopped is not started again"
    assert "cancelled" in capsys.readouterr().err


def test_a_secret_that_is_not_set_and_a_bad_variable_are_named(tmp_path, capsys):
    work_dir = ["--work-dir", str(tmp_path)]
    assert main(["launch", *work_dir, "--secret", "NOT_THERE_AT_ALL"]) == 2
    assert "NOT_THERE_AT_ALL: the variable is not set" in capsys.readouterr().err
    assert main(["launch", *work_dir, "--env", "COLOUR"]) == 2
    assert "expected NAME=VALUE" in capsys.readouterr().err


def test_a_process_learns_its_place_from_the_environment(monkeypatch):
    for name in ("REPLICA_RANK", "REPLICA_COUNT", "REPLICA_ATTEMPT", "REPLICA_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert replica_place() is None
    monkeypatch.setitem(os.environ, "REPLICA_RANK", "2")
    monkeypatch.setitem(os.environ, "REPLICA_COUNT", "4")
    monkeypatch.setitem(os.environ, "REPLICA_ATTEMPT", "1")
    assert replica_place() == ReplicaPlace(2, 4, 1, "")
    monkeypatch.setitem(os.environ, "REPLICA_COUNT", "2")
    with pytest.raises(TrainerConfigError, match="not below 2"):
        replica_place()


@pytest.mark.slow
def test_the_trainers_own_command_launches_replicas_on_shards(
    dataset_folder, tmp_path, monkeypatch, capsys
):
    """Of two processes each; with one, they are above and in test_cloud_run.py."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setitem(LocalProcessExecutor.__init__.__kwdefaults__, "python", forked_python())
    settings = [
        f"dataset={dataset_folder}",
        f"output={tmp_path}/model-{{rank}}",
        "outer_options.sync_every=2",
        "outer_options.quorum=2",
        "outer_options.rounds=synchronous",
        "trl.max_steps=4",
        *(*SMALL, "tiny.pretraining_steps=2", "trl.max_completion_length=16"),
        *("evaluation.max_prompts=1", "evaluation.max_new_tokens=4"),
    ]
    options = ["--replicas", "2", "--executor", "local", "--work-dir", str(tmp_path / "outer")]
    options += ["--processes", "2"]
    assert main(["launch", *options, *words_of(*settings)]) == 0
    assert "replica 1 (attempt 0)" in capsys.readouterr().out
    weights = [
        load_file(tmp_path / f"model-{rank}" / "checkpoint" / "model.safetensors")
        for rank in range(2)
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name])
    rows = (tmp_path / "model-0" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["outer/contributions"] == 2
    assert last["outer/round"] == 1, "two rounds of two steps"
    reports = [
        json.loads((tmp_path / f"model-{rank}" / "report.json").read_text()) for rank in range(2)
    ]
    assert reports[0]["steps"] == reports[1]["steps"] == 4
    store = f"file://{tmp_path}/outer/store"
    assert main(["export", "--uri", store, "--output", str(tmp_path / "made")]) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made").state_dict()
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, made[name].numpy())
    assert AutoTokenizer.from_pretrained(tmp_path / "made").chat_template
    assert main(["export", "--uri", store, "--output", str(tmp_path / "one"), "--round", "1"]) == 0
    earlier = load_file(tmp_path / "one" / "model.safetensors")
    assert any((earlier[name] != value).any() for name, value in weights[0].items())
    assert main(["export", "--uri", store, "--output", str(tmp_path / "x"), "--round", "9"]) == 2
