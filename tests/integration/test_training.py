"""The trained model as an asset: a process of its own, watched, stopped, and gone on with."""

import signal
import sys
import time
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from replay_pipeline.assets import of_stages
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.reporting import LiveCurves
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.errors import TrainError
from replay_pipeline.stages.work.trainer_process import TrainerJob, run_trainer
from tests.integration.processes import instance_of, materialize, wait_until
from tests.roots import pipeline_at, project_root, run_batches
from tests.support.forked import forked_python
from tests.support.settings_files import write_settings

pytestmark = pytest.mark.slow

N_STEPS = 16
CONFIG = f"""\
dataset: there
output: there
tiny: {{hidden_size: 32, vocab_size: 512}}
evaluation: {{max_prompts: 0}}
preflight: {{max_cut_prompts: 1.0}}
trl:
  max_steps: {N_STEPS}
  learning_rate: 0.003
  alpha_sdpo: 0.1
  beta_replay: 1.0
  dpo_variant: simpo
  per_device_train_batch_size: 4
  num_generations: 2
  max_prompt_tokens: 128
  prompt_window: tail
  max_response_tokens: 64
  max_completion_length: 64
  render_tools: false
  activation_checkpointing: false
  seed: 0
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A data root with a published dataset and a quick training configuration."""
    root = tmp_path_factory.mktemp("published") / "data"
    work = project_root(root, ask_at="consequences")
    run_batches(work)
    work.publish()
    (root / "train.yaml").write_text(CONFIG)
    return root


@pytest.fixture
def root(published, tmp_path, monkeypatch) -> Path:
    """The same dataset, with a place of its own for the model."""
    data = tmp_path / "data"
    monkeypatch.setenv("REPLAY_DATA", str(data))
    write_settings(
        data,
        publish={"folder": published / "dataset"},
        train={"config": published / "train.yaml"},
    )
    return data


def train_in_process(root: Path, instance: dg.DagsterInstance, **options):
    job = define(PipelineResource()).resolve_implicit_global_asset_job_def()
    return job.execute_in_process(
        instance=instance, asset_selection=[dg.AssetKey("trained_model")], **options
    )


def weights(root: Path) -> bytes:
    return (root / "model" / "checkpoint" / "model.safetensors").read_bytes()


def n_steps(root: Path) -> int:
    path = root / "model" / "metrics.jsonl"
    return path.read_bytes().count(b"policy/loss") if path.exists() else 0


def test_a_training_is_watched_and_a_stopped_one_ends_with_the_same_weights(
    root, published, tmp_path, monkeypatch
):
    monkeypatch.setattr(of_stages, "LiveCurves", partial(LiveCurves, every_s=0.0))
    monkeypatch.setattr("sys.executable", forked_python())
    with instance_of(root) as instance:
        run = train_in_process(root, instance)
        points = instance.fetch_observations(dg.AssetKey("trained_model"), limit=100).records
        live = [
            {name: value.value for name, value in record.asset_observation.metadata.items()}
            for record in reversed(points)
        ]
        (event,) = run.asset_materializations_for_node("trained_model")
    steps = [point["step"] for point in live]
    assert steps == sorted(steps)
    assert steps[-1] == N_STEPS
    assert steps[0] < N_STEPS  # at least one while it ran
    assert {"train/loss", "policy/loss", "replay/loss"} <= set(live[-1])
    assert "█" in event.metadata["train/loss by step"].value
    assert event.metadata["steps"].value == N_STEPS

    # The same training, stopped on its way as Dagster stops a step, and started again.
    again = tmp_path / "again"
    again.mkdir()
    (again / "settings.toml").write_text((root / "settings.toml").read_text())
    process = materialize(again, "trained_model")
    wait_until(lambda: n_steps(again) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) != 0
    assert 2 <= n_steps(again) < N_STEPS
    assert "is complete. To go on" in (again / "model" / "trainer.log").read_text()
    assert list((again / "model" / "steps").glob("checkpoint-*/run.json"))
    assert not (again / "receipts" / "train").exists()
    report = pipeline_at(again).train().report
    assert report["steps"] == N_STEPS
    assert n_steps(again) == N_STEPS
    assert weights(again) == weights(root)


def test_a_failing_training_shows_what_the_trainer_said(root, published):
    config = root / "wrong.yaml"
    config.write_text(CONFIG.replace("learning_rate", "lerning_rate"))
    settings = (root / "settings.toml").read_text()
    (root / "settings.toml").write_text(
        settings.replace(str(published / "train.yaml"), str(config))
    )
    with instance_of(root) as instance:
        run = train_in_process(root, instance, raise_on_error=False)
        assert not run.success
        (failure,) = [event for event in run.all_events if event.is_step_failure]
    told = failure.step_failure_data.error.to_string()
    assert "error: unknown setting trl.lerning_rate" in told
    assert "ended with code 2" in told


def run_script(tmp_path: Path, script: str, **options) -> None:
    job = TrainerJob(command=[sys.executable, "-c", script], output=tmp_path / "model", **options)
    run_trainer(job, lambda progress: None)


def test_the_last_words_of_a_crash_are_told(tmp_path):
    with pytest.raises(TrainError, match=r"ended with code 1.*ValueError: no such reward"):
        run_script(tmp_path, "raise ValueError('no such reward')")
    with pytest.raises(TrainError, match=r"ended with code -9.*it said nothing"):
        run_script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else 'ready').write_text('x')
time.sleep(600)
"""


def test_a_trainer_that_does_not_stop_is_killed_after_its_time(tmp_path):
    ready = tmp_path / "ready"
    job = TrainerJob(
        command=[sys.executable, "-c", DEAF, str(ready)], output=tmp_path, stop_timeout_s=0.3
    )

    def interrupt(progress) -> None:
        if ready.exists():
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_trainer(job, interrupt)
    assert time.monotonic() - started < 60
