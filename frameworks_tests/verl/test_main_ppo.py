"""VeRL's unmodified `main_ppo` on one settings file: three channels, and what must never pass."""

import json

import pytest
from cpu_run import run

from tests.trainer.one_file import first_replay_loss, settings_values


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


def test_plugin_that_is_switched_off_is_refused_before_the_start(dataset, model, tmp_path):
    done = run(command(dataset, model, tmp_path / "out"), VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 2
    assert "the plug-in is not live" in done.stderr
    assert "VeRL would train with FSDPEngineWithLMHead, on channel 1 alone" in done.stderr
    assert not (tmp_path / "out" / "verl.log").exists()


def test_plugin_that_is_off_in_the_workers_stops_the_run(dataset, model, tmp_path):
    """`main_ppo` started by hand, on workers without the entry point."""
    from trainer.integrations.settings import read_settings
    from trainer.integrations.verl.prepare import prepare

    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    settings = read_settings(values, "verl")
    key = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_PLUGINS"
    settings.own[key] = "none"
    prepared = prepare(settings)
    done = run(
        [
            *("-m", "verl.trainer.main_ppo", "--config-name", prepared.config.stem),
            *("--config-dir", str(prepared.config.parent)),
        ]
    )
    assert done.returncode != 0
    assert "on channel 1 alone" in done.stderr + done.stdout


def test_file_that_verl_cannot_do_is_refused_at_once(dataset, model, tmp_path):
    done = run(command(dataset, model, tmp_path / "out", sdpo_estimator="full", objective="vespo"))
    assert done.returncode == 2
    assert "set trl.sdpo_estimator=teacher_topk" in done.stderr
    assert "trl.objective=vespo" in done.stderr
