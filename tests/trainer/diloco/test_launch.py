"""Replicas of a Hugging Face trainer, launched as processes and joined by a folder."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from trainer.__main__ import main
from trainer.diloco import LocalProcessExecutor
from trainer.diloco.environment import ReplicaPlace, replica_place
from trainer.diloco.launch import launch, launch_command, make_executor
from trainer.errors import ReplicaFailedError, TrainerConfigError

REPO = Path(__file__).parents[3]


@pytest.mark.slow
def test_two_hugging_face_trainers_end_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    results = launch(
        [str(Path(__file__).with_name("hf_replica.py")), str(tmp_path)],
        replicas=2,
        uri=f"file://{tmp_path}/store",
        executor=LocalProcessExecutor(tmp_path / "logs"),
        entrypoint=sys.executable,
        poll_s=0.05,
        max_restarts=0,
        handles_file=tmp_path / "handles.jsonl",
    )
    assert [r.log.strip().splitlines()[-1] for r in results] == ["done 0", "done 1"]
    first, second = (
        json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)
    )
    assert first["hash"] == second["hash"]
    assert first["rounds"] == 3
    assert first["contributions"] == [2, 2, 2]
    assert first["loss"][-1] < first["loss"][0]
    assert len((tmp_path / "handles.jsonl").read_text().splitlines()) == 2


def test_a_replica_that_cannot_be_saved_ends_the_run(tmp_path):
    with pytest.raises(ReplicaFailedError, match=r"exit code 5"):
        launch(
            ["-c", "raise SystemExit(5)"],
            replicas=1,
            uri=f"file://{tmp_path}/store",
            executor=LocalProcessExecutor(tmp_path),
            entrypoint=sys.executable,
            max_restarts=1,
            poll_s=0.02,
        )


def test_a_cloud_replica_needs_a_store_that_it_can_see(tmp_path, capsys):
    options = ["--executor", "hf_jobs", "--work-dir", str(tmp_path)]
    assert launch_command(options) == 2
    assert "cannot see a local folder" in capsys.readouterr().err


def test_executors_by_name(tmp_path):
    assert isinstance(make_executor("local", work_dir=tmp_path), LocalProcessExecutor)
    assert make_executor("modal", work_dir=tmp_path, hardware="A100").gpu == "A100"
    assert make_executor("hf_jobs", work_dir=tmp_path, hardware="t4-small").hardware == "t4-small"
    with pytest.raises(TrainerConfigError, match="choose one of"):
        make_executor("slurm", work_dir=tmp_path)


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
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    settings = [
        f"dataset={dataset_folder}",
        f"output={tmp_path}/model-{{rank}}",
        "outer_options.sync_every=2",
        "outer_options.inner=adamw",
        "outer_options.quorum=2",
        "trl.max_steps=4",
        "tiny.hidden_size=32",
        "tiny.vocab_size=512",
        "evaluation.max_prompts=1",
        "evaluation.max_new_tokens=4",
    ]
    arguments = [part for setting in settings for part in ("--set", setting)]
    options = ["--replicas", "2", "--executor", "local", "--work-dir", str(tmp_path / "outer")]
    assert main(["launch", *options, *arguments]) == 0
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
