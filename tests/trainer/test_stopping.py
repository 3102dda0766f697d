"""A training run may be stopped or killed at any step; its result is the same."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forked import fork_of
from tests.trainer.programs import SMALL, Program, words_of
from trainer.data.evaluation import EvaluationOptions
from trainer.engines.trl.checkpoints import (
    checkpoint_to_resume,
    is_finished,
    mark_finished,
    stamp_of,
    write_stamp,
)
from trainer.errors import TrainerConfigError
from trainer.settings import RunConfig, TinyOptions

N_STEPS = 16

pytestmark = pytest.mark.slow


def start(dataset: Path, output: Path, *settings: str) -> Program:
    shared = [f"dataset={dataset}", f"output={output}", f"trl.max_steps={N_STEPS}", *SMALL]
    shared += ["tiny.pretraining_steps=2", "evaluation.max_prompts=0"]
    arguments = words_of(*shared, *settings)
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


SLOW_EVALUATION = ("evaluation.max_prompts=60", "evaluation.max_share=1000")


def test_a_run_that_is_stopped_anywhere_goes_on_bit_for_bit(dataset_folder, straight, tmp_path):
    def stopped(number: int, when, *settings: str) -> str:
        began = start(dataset_folder, tmp_path, *settings)
        wait_for(began, when)
        began.send_signal(number)
        status, errors = began.ended(120)
        assert status == 128 + number, errors
        assert not (tmp_path / "report.json").exists()
        assert not list(tmp_path.rglob("training_args.bin"))
        return errors

    # While it loads, and in the first evaluation.
    for when in (tmp_path / "trainer.lock").exists, lambda: list(tmp_path.glob("tokens/*.arrow")):
        told = stopped(signal.SIGINT, when, *SLOW_EVALUATION)
        assert "before a step was made" in told
        assert "run the same command again" in told
        (tmp_path / "trainer.lock").unlink()
    # In its steps, and in the last evaluation.
    told = stopped(signal.SIGINT, lambda: len(steps(tmp_path)) >= 2)
    assert "To go on, run the same command with --resume" in told
    n_made = len(steps(tmp_path))
    assert 2 <= n_made < N_STEPS
    assert (tmp_path / "steps" / f"checkpoint-{n_made}" / "run.json").exists()
    stopped(signal.SIGTERM, lambda: len(steps(tmp_path)) >= n_made + 2)
    saved = tmp_path / "checkpoint" / "rendering.json"
    told = stopped(signal.SIGINT, saved.exists, *SLOW_EVALUATION)
    assert f"stopped after step {N_STEPS} of {N_STEPS}" in told
    before = steps(tmp_path)
    resumed = start(dataset_folder, tmp_path)
    status, errors = resumed.ended(400)
    assert status == 0, errors
    assert steps(tmp_path) == before
    assert_same(tmp_path, straight)
    once_more = start(dataset_folder, tmp_path)
    status, errors = once_more.ended(400)
    assert (status, "this run is finished; --again" in errors) == (0, True)
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


def config_of(folder: Path, **changes) -> RunConfig:
    trl = {"seed": 1} | changes.pop("trl", {})
    return RunConfig(dataset=str(folder), output=str(folder / "out"), trl=trl, **changes)


@pytest.fixture
def begun(tmp_path) -> Path:
    """Two checkpoints of a run that has not ended, and a third that was never finished."""
    (tmp_path / "a.parquet").write_bytes(b"rows")
    for step in (2, 10):
        folder = tmp_path / "steps" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "trainer_state.json").write_text("{}")
        write_stamp(folder, stamp_of(config_of(tmp_path)))
    (tmp_path / "steps" / "checkpoint-12").mkdir()
    return tmp_path


def resumed(folder: Path, resume_from: str = "last", **changes) -> Path | None:
    stamp = stamp_of(config_of(folder, **changes))
    return checkpoint_to_resume(resume_from, folder / "steps", stamp)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evaluation": EvaluationOptions(max_pairs=1)},
        {"trl": {"logging_steps": 7, "save_steps": 3, "pair_forward": "padded"}},
        {"trl": {"pairs_per_step": 4}},  # the default, by its name
        {"agreement": "a.b:c", "push_to_hub": "me/model"},
    ],
)
def test_settings_that_change_no_mathematics_go_on_from_the_newest_checkpoint(begun, changes):
    assert resumed(begun, **changes) == begun / "steps" / "checkpoint-10"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trl": {"seed": 2}}, r"trl\.seed \(there 1, now 2\)"),
        ({"trl": {"learning_rate": 0.5}}, r"trl\.learning_rate \(there None, now 0\.5\)"),
        ({"model": "elsewhere"}, "model"),
        ({"tiny": TinyOptions(n_layers=3)}, r"tiny\.n_layers"),
    ],
)
def test_settings_that_change_it_are_refused_by_name(begun, changes, named):
    with pytest.raises(TrainerConfigError, match=named) as refused:
        resumed(begun, **changes)
    assert "Set them back" in str(refused.value)
    one = str(begun / "steps" / "checkpoint-2")
    assert resumed(begun, one, **changes) == Path(one)  # asked for by its name


def test_a_finished_run_stays_and_other_settings_are_refused_by_name_until_it_is_begun_again(begun):
    steps, stamp = begun / "steps", stamp_of(config_of(begun))
    assert not is_finished(steps, stamp, again=False)
    mark_finished(steps, stamp)
    assert is_finished(steps, stamp, again=False)
    for_less = stamp_of(config_of(begun, trl={"learning_rate": 0.5}))
    named = r"trl\.learning_rate \(there None, now 0\.5\).*--again"
    with pytest.raises(TrainerConfigError, match=named):
        is_finished(steps, for_less, again=False)
    assert not is_finished(steps, for_less, again=True)
    assert resumed(begun) is None  # nor do its checkpoints take part in what is begun


def test_a_checkpoint_that_lost_a_part_is_passed_over(begun, caplog):
    (begun / "steps" / "checkpoint-10" / "model.safetensors").write_bytes(b"weig")
    assert resumed(begun) == begun / "steps" / "checkpoint-2"
    assert "model.safetensors has 4 of 7 bytes" in caplog.text
    (begun / "steps" / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.raises(TrainerConfigError, match="no whole checkpoint"):
        resumed(begun)
    with pytest.raises(TrainerConfigError, match=r"model\.safetensors is missing"):
        resumed(begun, str(begun / "steps" / "checkpoint-2"))
    with pytest.raises(TrainerConfigError, match="no such folder"):
        resumed(begun, str(begun / "steps" / "checkpoint-3"))
