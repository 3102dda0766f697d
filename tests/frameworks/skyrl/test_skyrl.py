"""Our Tinker adapter and the client that SkyRL wants, against SkyRL's own server of that API."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tinker import ServiceClient
from transformers import AutoModelForCausalLM

from tests.frameworks.tinker.test_tinker import core_loss, settings
from trainer.__main__ import main
from trainer.engines.settings_file import read_settings
from trainer.engines.tinker.run import TinkerOptions, TinkerRun

# JAX compiles a program for every shape, so there are few of them.
FEW = {
    "sdpo_estimator": "sampled",
    "jsd_beta": 1.0,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
}
OWN = {"lora_rank": 8}


class Weights:
    """What the server's LoRA is before the first step: the base model."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_losses_of_a_batch_are_the_cores_and_the_command_trains(
    server, dataset, model, tmp_path, capsys
):
    values = settings(tmp_path, dataset, model, server, **FEW)
    values["engines"]["tinker"] |= OWN
    config = read_settings(values, "tinker")
    run = TinkerRun(config, TinkerOptions(**OWN), ServiceClient(base_url=server))
    rollouts, metrics = run.rollouts(0)
    assert metrics["rollouts/count"] == 4
    # A model of random weights earns nothing: what its answers are worth is set here.
    for rollout, advantage in zip(rollouts, (1.0, -1.0, 0.5, -0.5), strict=True):
        rollout.advantage = advantage
    futures = run.backward(rollouts, 0)
    answers = {name: future.result() for name, future in futures.items()}
    losses = core_loss(run, Weights(model), rollouts, 0)
    preference = answers["replay"].metrics["replay/preference_loss"]
    assert preference == pytest.approx(float(losses["replay"]) / 0.6, rel=1e-5)
    terms = [sum(o["elementwise_loss"].data) for o in answers["policy"].loss_fn_outputs]
    assert sum(terms) == pytest.approx(float(losses["policy"]), abs=1e-5)

    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(values | {"output": str(tmp_path / "whole")}))
    assert main(["tinker", "--config", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in Path(report["metrics"]).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert report["rollouts"] == 8
    assert report["sampler"].startswith("tinker://")
