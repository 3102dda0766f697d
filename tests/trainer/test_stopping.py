"""A training run may be stopped or killed at any step; its result is the same."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forked import fork_of
from tests.trainer.programs import Program
from trainer.__main__ import STOPPED
from trainer.trl.stopping import identity_of, last_checkpoint

N_STEPS = 16

pytestmark = pytest.mark.slow


def start(dataset: Path, output: Path, *settings: str) -> Program:
    shared = [
        f"dataset={dataset}",
        f"output={output}",
        f"trl.max_steps={N_STEPS}",
        "tiny.hidden_size=32",
        "tiny.vocab_size=512",
        "tiny.pretraining_steps=2",
        "evaluation.max_prompts=0",
    ]
    arguments = [part for setting in (*shared, *settings) for part in ("--set", setting)]
    errors = output.with_name(f"{output.name}.err")
    return Program("-m", "trainer", "--resume", *arguments, errors=errors)


def steps(output: Path) -> list[int]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row["step"] for row in rows if "train/train_runtime" not in row]


def wait_for(process: Program, condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.ended(1)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def weights(output: Path) -> bytes:
    return (output / "checkpoint" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(dataset_folder, tmp_path_factory) -> Path:
    """A run that nobody disturbed."""
    output = tmp_path_factory.mktemp("straight")
    process = start(dataset_folder, output)
    status, errors = process.ended(400)
    assert status == 0, errors
    return output


def assert_same(output: Path, straight: Path) -> None:
    assert weights(output) == weights(straight)
    assert steps(output) == steps(straight) == list(range(1, N_STEPS + 1))
    reports = [json.loads((one / "report.json").read_text()) for one in (output, straight)]
    for report in reports:
        report.pop("seconds")
    assert reports[0] == reports[1]


def test_a_stopped_run_saves_itself_and_goes_on_bit_for_bit(dataset_folder, straight, tmp_path):
    stopped = start(dataset_folder, tmp_path)
    wait_for(stopped, lambda: len(steps(tmp_path)) >= 2)
    stopped.send_signal(signal.SIGTERM)
    status, errors = stopped.ended(120)
    assert status == STOPPED, errors
    assert "resume_from=last goes on" in errors
    assert 2 <= len(steps(tmp_path)) < N_STEPS
    assert not (tmp_path / "report.json").exists()
    assert not list(tmp_path.rglob("training_args.bin"))
    resumed = start(dataset_folder, tmp_path)
    status, errors = resumed.ended(400)
    assert status == 0, errors
    assert_same(tmp_path, straight)


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(dataset_folder, straight, tmp_path):
    saving = ("trl.save_strategy=steps", "trl.save_steps=2")
    killed = start(dataset_folder, tmp_path, *saving)
    wait_for(killed, lambda: len(steps(tmp_path)) >= 3)
    os.kill(fork_of(killed), signal.SIGKILL)
    killed.wait(60)
    assert len(steps(tmp_path)) < N_STEPS
    (tmp_path / "steps" / "checkpoint-7").mkdir(parents=True)  # begun, and never finished
    (tmp_path / "steps" / "checkpoint-7" / "model.safetensors").write_bytes(b"half")
    resumed = start(dataset_folder, tmp_path, *saving)
    status, errors = resumed.ended(400)
    assert status == 0, errors
    assert_same(tmp_path, straight)


def test_only_a_whole_checkpoint_of_the_same_run_is_gone_on_from(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").write_bytes(b"rows")
    settings = {"dataset": str(tmp_path), "output": "here", "trl": {"seed": 1}}
    own = identity_of(settings)
    assert own == identity_of({**settings, "output": "there", "resume_from": "last"})
    assert own != identity_of({**settings, "trl": {"seed": 2}})
    for step, identity in ((2, own), (10, own), (11, "another")):
        folder = tmp_path / "steps" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"identity": identity}))
    (tmp_path / "steps" / "checkpoint-12").mkdir()
    assert last_checkpoint(tmp_path / "steps", own) == tmp_path / "steps" / "checkpoint-10"
    (tmp_path / "data" / "a.parquet").write_bytes(b"other rows")
    assert last_checkpoint(tmp_path / "steps", identity_of(settings)) is None
