"""One trainer at a time in an output folder: the second is told, and touches nothing."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.programs import SMALL, start_ranks, words_of
from trainer.__main__ import main
from trainer.data.folders import LOCK_FILE, sole_writer
from trainer.errors import FolderInUseError, TrainerConfigError

ROOT = Path(__file__).parents[3]
HOLD = """
import pathlib, sys, time
from trainer.data.folders import sole_writer
with sole_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
FORK = """
import os, pathlib, sys, time
from trainer.data.folders import sole_writer
with sole_writer(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path):
    """A folder in which another process is at work, and that process."""
    folder = tmp_path / "model"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "held\n"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    yield folder, process
    process.kill()
    process.communicate()


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def settings(dataset: Path, output: Path, *more: str) -> list[str]:
    told = [f"dataset={dataset}", f"output={output}", *SMALL, "tiny.pretraining_steps=2"]
    told += ["trl.max_steps=2", "trl.max_completion_length=16", "evaluation.max_prompts=0"]
    return words_of(*told, *more)


def test_the_second_writer_learns_who_is_there(held):
    folder, process = held
    with pytest.raises(FolderInUseError) as refused, sole_writer(folder):
        pass
    assert str(refused.value) == (
        f"{folder}: another trainer is at work here (process {process.pid} on "
        f"{socket.gethostname()}); wait until it ends, stop it, or name another output folder"
    )


def test_the_lock_goes_with_a_killed_process(held):
    folder, process = held
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    with sole_writer(folder):
        assert (folder / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()} "), sole_writer(folder):
            pass
    with sole_writer(folder):
        pass


def test_a_forked_child_that_lives_on_does_not_hold_the_folder(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(FolderInUseError), sole_writer(tmp_path):
            pass
        holder.kill()
        holder.wait(60)
        os.kill(child, 0)  # it is there
        with sole_writer(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_a_replica_started_anew_waits_for_the_end_of_the_one_before(held):
    folder, process = held
    with pytest.raises(FolderInUseError), sole_writer(folder, patience_s=0.1):
        pass
    process.kill()  # it may take a moment to be gone
    with sole_writer(folder, patience_s=60):
        pass


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(TrainerConfigError, match=r"file/model: cannot be written to \("),
        sole_writer(tmp_path / "file" / "model"),
    ):
        pass


AS_PRIME_RL = (
    *("model=m", "rollouts=generate", "trl.objective=grpo", "trl.teacher=live"),
    *("trl.sdpo_estimator=sampled", "trl.jsd_beta=1.0"),
)


@pytest.mark.parametrize(("engine", "own"), [("trl", ()), ("prime_rl", AS_PRIME_RL)])
def test_a_second_trainer_is_refused_before_anything_is_written(
    held, dataset_folder, capsys, engine, own
):
    folder, process = held
    before = files(folder)
    assert main([engine, *settings(dataset_folder, folder, *own)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder}: another trainer is at work here")
    assert f"process {process.pid} " in error
    assert error.count("\n") == 1
    assert files(folder) == before


@pytest.mark.slow
def test_every_rank_is_refused_when_the_folder_is_taken(held, dataset_folder, tmp_path):
    folder, holder = held
    before = files(folder)
    words = settings(dataset_folder, folder)
    for process in start_ranks("-m", "trainer", *words, n=2, folder=tmp_path):
        status, errors = process.ended(240)
        assert status == 2, errors
        assert f"(process {holder.pid} " in errors
    assert files(folder) == before
