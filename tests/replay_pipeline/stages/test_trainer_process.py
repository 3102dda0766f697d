"""The trainer's process seen from the pipeline: one at a time in a folder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay_pipeline.errors import TrainError
from replay_pipeline.stages.work.trainer_process import TRAINER_LOCK, TrainerJob, run_trainer
from trainer.data.folders import LOCK_FILE

ROOT = Path(__file__).parents[3]
TRAIN = """
import pathlib, sys, time
from trainer.data.folders import sole_writer
output = pathlib.Path(sys.argv[1])
print("step 1", flush=True)
with sole_writer(output):
    (output / "ready").touch()
    while not (output / "go").exists():
        time.sleep(0.02)
"""
STARTER = """
import pathlib, sys
from replay_pipeline.stages.work.trainer_process import TrainerJob, run_trainer
output = pathlib.Path(sys.argv[1])
job = TrainerJob(command=[sys.executable, "-c", sys.argv[2], str(output)], output=output)
run_trainer(job, lambda progress: None)
"""


def job(output: Path) -> TrainerJob:
    return TrainerJob(command=[sys.executable, "-c", TRAIN, str(output)], output=output)


def idle(progress) -> None:
    del progress


def test_both_houses_name_the_same_lock():
    assert TRAINER_LOCK == LOCK_FILE


def test_a_second_training_is_refused_and_the_log_of_the_first_is_kept(tmp_path):
    told = []

    def second(progress) -> None:
        if (tmp_path / "ready").exists() and not told:
            with pytest.raises(TrainError) as refused:
                run_trainer(job(tmp_path), idle)
            told.append(str(refused.value))
            (tmp_path / "go").touch()

    run_trainer(job(tmp_path), second)
    owner = (tmp_path / LOCK_FILE).read_text().strip()
    assert told[0].startswith(f"{tmp_path}: another trainer is at work here ({owner}); wait until")
    assert (tmp_path / "trainer.log").read_text() == "step 1\n"
    run_trainer(job(tmp_path), idle)
    assert (tmp_path / "trainer.log").read_text() == "step 1\n", "of the last training only"


def test_a_trainer_whose_starter_was_killed_still_has_its_folder(tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path), TRAIN], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    starter.kill()
    starter.wait(60)
    pid = int((tmp_path / LOCK_FILE).read_text().split()[1])
    try:
        with pytest.raises(TrainError, match=f"process {pid} on "):
            run_trainer(job(tmp_path), idle)
    finally:
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    while True:  # the system takes a moment to bury it
        try:
            run_trainer(job(tmp_path), idle)
            break
        except TrainError:
            assert time.monotonic() < deadline
