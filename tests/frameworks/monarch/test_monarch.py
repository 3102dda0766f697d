"""The real package: meshes of real processes around the TRL run, and what a death costs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.one_file import first_replay_loss, settings_values
from trainer.__main__ import read_config
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.data.rewards import consensus_reward
from trainer.engines.settings_file import read_settings
from trainer.hints import hint_for_row
from trainer.losses.channels import (
    ReplayOptions,
    SDPOOptions,
    distillation_per_token,
    replay_per_pair,
)
from trainer.model.loading import load_model, load_tokenizer
from trainer.settings import RunConfig


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "checkpoint" / "model.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    expected = weights(second)
    for name, value in weights(first).items():
        assert torch.equal(value, expected[name]), name


def steps(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "policy/loss" in line]


def test_the_same_settings_file_gives_the_same_model_with_and_without_a_mesh(command, tmp_path):
    plain = command("trl", tmp_path / "plain")
    hosted = command("monarch", tmp_path / "hosted")
    assert (plain.code, hosted.code) == (0, 0), hosted.errors
    assert_same_weights(tmp_path / "hosted", tmp_path / "plain")
    report = hosted.report["report"]
    assert report["loss_last"] == plain.report["loss_last"]
    assert report["channels_live"] == ["policy", "sdpo", "replay"]
    assert hosted.report["restarts"] == []


def test_the_file_that_drives_trl_and_verl_drives_the_mesh(command, tmp_path, dataset, model):
    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    file = tmp_path / "one.yaml"
    file.write_text(json.dumps(values))
    mesh = "engines.monarch.generators=1"
    done = command("monarch", tmp_path / "out", *mesh, file=file)
    assert done.code == 0, done.errors
    report = done.report["report"]
    assert (report["channels_live"], report["channels_off"]) == (["policy", "sdpo", "replay"], {})
    assert [line["step"] for line in steps(tmp_path / "out")] == [1, 2, 3]
    first = steps(tmp_path / "out")[0]["replay/loss"]
    assert first == pytest.approx(first_replay_loss(values), rel=1e-5)


def test_a_killed_rank_is_started_anew_and_the_run_ends_the_same(command, tmp_path):
    ranks = ("engines.monarch.ranks=2", "engines.monarch.checkpoint_every=1")
    whole = command("monarch", tmp_path / "whole", *ranks)
    killed = command(
        "monarch",
        tmp_path / "killed",
        *ranks,
        "reward=hosted_rewards:deadly",
        DEADLY_MARK=str(tmp_path / "mark"),
        DEADLY_AFTER="9",
        DEADLY_RANK="1",
    )
    assert (whole.code, killed.code) == (0, 0), killed.errors
    assert (tmp_path / "mark").exists()
    (restart,) = killed.report["restarts"]
    assert restart["resumed_from"].endswith("checkpoint-2")
    assert "Killed(sig=9)" in restart["cause"]
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    numbers = [
        [{k: v for k, v in line.items() if "time" not in k} for line in steps(tmp_path / name)]
        for name in ("killed", "whole")
    ]
    assert numbers[0] == numbers[1]
    assert [line["step"] for line in numbers[0]] == [1, 2, 3, 4]


def test_a_run_that_dies_too_often_ends(command, tmp_path):
    doomed = command(
        "monarch",
        tmp_path / "doomed",
        "reward=hosted_rewards:always_deadly",
        "engines.monarch.max_restarts=0",
    )
    assert doomed.code == 2
    assert "the run died 1 times" in doomed.errors


LEARNING_RATE = 1e6
"""So large that the step itself is read off the new weights to the last digit."""


def core_gradient(config: RunConfig) -> dict[str, torch.Tensor]:
    """Three channels of one batch with every pair, written out on the loss core in float64."""
    data = load_preference_data(config.dataset)
    tokenizer = load_tokenizer(config, data)
    model = load_model(config, tokenizer, seed=config.trl["seed"])
    model = model.double().eval()
    renderer = Renderer(
        tokenizer=tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )

    def logits(row, action, hint=None):
        prompt = renderer.prompt_ids(row["prompt"], None, hint=hint and hint.text)
        ids = renderer.response_ids(action)
        found = model(input_ids=torch.tensor([prompt + ids])).logits[0]
        return found[len(prompt) - 1 : -1], torch.tensor(ids)

    policy, n_rollouts, distance, n_tokens, replay, total_weight = 0.0, 0, 0.0, 0, 0.0, 0.0
    for row in data.pairs:
        actions = [row["rejected"][-1], row["chosen"][-1]]
        rewards = torch.tensor(
            [consensus_reward(action, {"consensus": actions[1]}) for action in actions]
        )
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        sums, lengths = [], []
        for action, advantage in zip(actions, advantages.tolist(), strict=True):
            student, ids = logits(row, action)
            logps = student.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            policy = policy - advantage * (logps - logps.detach()).exp().mean()
            n_rollouts += 1
            sums.append(logps.sum()[None])
            lengths.append(torch.tensor([len(ids)]))
            if hint := hint_for_row(row):
                with torch.no_grad():
                    teacher, _ = logits(row, action, hint)
                per_token = distillation_per_token(student, teacher, ids, SDPOOptions())
                distance, n_tokens = distance + per_token.sum(), n_tokens + len(ids)
        weight = float(row.get("weight") or 1.0)
        options = ReplayOptions(variant="simpo")
        losses = replay_per_pair(sums[1], sums[0], lengths[1], lengths[0], None, None, options)
        replay, total_weight = replay + weight * losses.sum(), total_weight + weight
    alpha, beta = config.trl["alpha_sdpo"], config.trl["beta_replay"]
    loss = policy / n_rollouts + alpha * distance / n_tokens + beta * replay / total_weight
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_the_three_channel_gradient_is_that_of_the_core(command, tmp_path, small_dataset):
    overrides = [
        f"dataset={small_dataset}",
        "rollouts=contrast",
        "trl.per_device_train_batch_size=8",
        "trl.max_steps=1",
        "trl.optim=sgd",
        f"trl.learning_rate={LEARNING_RATE}",
        "trl.lr_scheduler_type=constant",
        "trl.max_grad_norm=0.0",
        "trl.alpha_sdpo=0.5",
    ]
    done = command("monarch", tmp_path / "out", *overrides)
    assert done.code == 0, done.errors
    report = done.report["report"]
    assert report["channels_live"] == ["policy", "sdpo", "replay"]

    values = read_config(tmp_path / "settings.yaml", overrides)
    config = read_settings(values)
    tokenizer = load_tokenizer(config, load_preference_data(str(small_dataset)))
    start = load_model(config, tokenizer, seed=0)
    after, core = weights(tmp_path / "out"), core_gradient(config)
    difference = total = 0.0
    for name, parameter in start.named_parameters():
        step = (parameter.detach().double() - after[name].double()) / LEARNING_RATE
        difference += float((step - core[name]).square().sum())
        total += float(core[name].square().sum())
    relative = (difference / total) ** 0.5
    assert total > 0
    assert relative < 1e-6, f"relative difference {relative:.2e}"
