"""VeRL's unmodified `main_ppo` on one settings file: three channels, and what must never pass."""

import json

import psutil
import pytest
from cpu_run import environment, run

from tests.trainer.one_file import first_replay_loss, settings_values
from trainer.engines.settings_file import read_settings
from trainer.engines.verl import launch
from trainer.engines.verl.prepare import prepare
from trainer.errors import TrainerError, TrainingStoppedError


def command(dataset, model, output, **overrides) -> list[str]:
    values = settings_values(dataset=dataset, output=output, model=model)
    for key, value in overrides.items():
        values["trl"][key] = value
    output.mkdir(parents=True, exist_ok=True)
    (output / "settings.yaml").write_text(json.dumps(values))
    return ["-m", "trainer", "verl", "--config", str(output / "settings.yaml")]


def test_three_channels_learn_in_the_unmodified_main_ppo(dataset, model, tmp_path):
    done = run(command(dataset, model, tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 3
    assert report["channels_live"] == ["policy", "sdpo", "replay"]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    values = settings_values(dataset=dataset, output=tmp_path, model=model)
    assert rows[0]["actor/replay/loss"] == pytest.approx(first_replay_loss(values), rel=1e-5)
    assert rows[-1]["actor/replay/loss"] < rows[0]["actor/replay/loss"]
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-5
    hinted = [row for row in rows if row["actor/sdpo/n_tokens"] > 0]
    assert hinted
    assert all(row["actor/sdpo/loss"] > 0 for row in hinted)


def test_plugin_that_is_switched_off_is_refused_before_the_first_step(dataset, model, tmp_path):
    done = run(command(dataset, model, tmp_path / "out"), VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 2
    log = (tmp_path / "out" / "verl.log").read_text()
    assert "VeRL would train with FSDPEngineWithLMHead, on channel 1 alone" in log


@pytest.fixture
def here(monkeypatch) -> None:
    """This process as one that sees VeRL on the CPU: what it starts inherits that."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_plugin_that_is_off_in_the_workers_stops_the_run(dataset, model, tmp_path, here):
    """The unmodified `main_ppo`, on workers without the entry point."""
    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    settings = read_settings(values, "verl")
    key = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_PLUGINS"
    settings.own[key] = "none"
    prepared = prepare(settings)
    log = tmp_path / "verl.log"
    with pytest.raises(TrainerError, match=r"VeRL ended with 1: .*verl\.log"):
        launch.watched(prepared, tmp_path / "metrics.jsonl", log, lambda: False)
    assert "on channel 1 alone" in log.read_text("utf-8", "replace")


def test_run_that_was_asked_to_stop_leaves_no_process(dataset, model, tmp_path, here):
    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    values["trl"]["max_steps"] = 1000
    metrics = tmp_path / "out" / "verl_metrics.jsonl"

    def has_stepped() -> bool:
        return metrics.exists() and metrics.read_text("utf-8").endswith("\n")

    with pytest.raises(TrainingStoppedError, match="goes on from its last checkpoint"):
        launch.train_with_verl(values, should_stop=has_stepped)
    told = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in told if str(tmp_path / "out") in command]


def test_file_that_verl_cannot_do_is_refused_at_once(dataset, model, tmp_path):
    done = run(command(dataset, model, tmp_path / "out", sdpo_estimator="full", objective="vespo"))
    assert done.returncode == 2
    assert "set trl.sdpo_estimator=teacher_topk" in done.stderr
    assert "trl.objective=vespo" in done.stderr
