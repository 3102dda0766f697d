"""The real client, against a loopback server that speaks its protocol and has a real tiny model."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tinker import ServiceClient

from tests.frameworks.tinker.tinker_server import TinkerServer
from trainer.__main__ import main
from trainer.engines.settings_file import read_settings
from trainer.engines.tinker.run import TinkerOptions, TinkerRun
from trainer.losses.channels import distillation_per_token, replay_per_pair
from trainer.losses.credit import credit_per_token
from trainer.losses.sdpo import sampled_reverse_kl_per_token

POLICY, ALPHA, BETA = 0.8, 0.3, 0.6


def settings(folder: Path, dataset: Path, model: Path, address: str, **trl: Any) -> dict:
    shared = {
        "objective": "grpo",
        "policy_weight": POLICY,
        "alpha_sdpo": ALPHA,
        "sdpo_estimator": "teacher_topk",
        "sdpo_top_k": 16,
        "beta_replay": BETA,
        "dpo_variant": "dpo",
        "dpo_beta": 0.3,
        "teacher": "live",
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "pairs_per_step": 3,
        "max_completion_length": 12,
        "max_prompt_tokens": 96,
        "prompt_window": "tail",
        "max_response_tokens": 32,
        "render_tools": False,
        "seed": 0,
    }
    return {
        "dataset": str(dataset),
        "output": str(folder / "out"),
        "model": str(model),
        "rollouts": "generate",
        "reward": "tests.trainer.one_file:share_of_lower_case",
        "trl": shared | trl,
        "engines": {"tinker": {"base_url": address}},
    }


@pytest.fixture
def server(model):
    server = TinkerServer(str(model))
    server.address = server.start()
    yield server
    server.stop()


def flat(gradients) -> torch.Tensor:
    return torch.cat([part.flatten() for part in gradients])


def core_loss(run: Any, server: TinkerServer, rollouts: Any, step: int) -> dict[str, torch.Tensor]:
    """The three channels of one step with the loss core, on the server's model itself."""
    shared = run.shared
    model = server.model

    def logits(ids, n_prompt):
        return model(torch.tensor([ids])).logits[0, n_prompt - 1 : -1]

    policy, sdpo, n_hinted = torch.zeros(()), torch.zeros(()), 0
    states = [run.states[i] for i in run._order.step(step)]
    hinted_ids = {
        tuple(run.renderer.prompt_ids(row["prompt"])): run.renderer.prompt_ids(
            row["prompt"], hint="A file must be read before it is edited or written. Read it first."
        )
        for row in states
        if row["hint"]
    }
    for rollout in rollouts:
        ids = [*rollout.prompt_ids, *rollout.response_ids]
        own = logits(ids, len(rollout.prompt_ids))
        response = torch.tensor(rollout.response_ids)
        logps = own.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        charge = credit_per_token(logps, torch.tensor(rollout.advantage), old_logps_N=None)
        policy = policy + POLICY * charge.mean() / len(rollouts)
        before = hinted_ids.get(tuple(rollout.prompt_ids))
        if before is None:
            continue
        with torch.no_grad():
            teacher = logits([*before, *rollout.response_ids], len(before))
        if shared.sdpo_estimator == "sampled":
            picked = teacher.log_softmax(-1).gather(-1, response[:, None])[:, 0]
            per_token = sampled_reverse_kl_per_token(logps, picked)
        else:
            per_token = distillation_per_token(own, teacher, response, shared.sdpo)
        sdpo = sdpo + per_token.sum()
        n_hinted += len(response)
    rows = [run.pairs.rows[i] for i in run.pairs.sampler(batch_size=3, seed=0).step(step)]
    sums, lengths = [], []
    for side in ("chosen_ids", "rejected_ids"):
        sums.append(
            torch.stack(
                [
                    logits([*r["prompt_ids"], *r[side]], len(r["prompt_ids"]))
                    .log_softmax(-1)
                    .gather(-1, torch.tensor(r[side])[:, None])
                    .sum()
                    for r in rows
                ]
            )
        )
        lengths.append(torch.tensor([float(len(r[side])) for r in rows]))
    pairs = replay_per_pair(*sums, *lengths, *(s.detach() for s in sums), shared.replay)
    return {"policy": policy, "sdpo": ALPHA * sdpo / n_hinted, "replay": BETA * pairs.mean()}


@pytest.mark.parametrize(
    "trl",
    [
        {},
        {"jsd_beta": 0.0, "dpo_variant": "simpo"},
        {"sdpo_wrapper": "entropy_opd", "entropy_opd_h_max": 5.0, "dpo_variant": "dpo_norm"},
        {"sdpo_wrapper": "taid", "taid_alpha": 0},
        {"sdpo_estimator": "sampled", "jsd_beta": 1.0},
    ],
    ids=["jsd", "forward_kl", "entropy", "taid", "sampled"],
)
def test_loss_and_gradient_of_a_batch_are_the_cores(trl, server, dataset, model, tmp_path):
    values = settings(tmp_path, dataset, model, server.address, **trl)
    config = read_settings(values, "tinker")
    with ServiceClient(base_url=server.address) as service:
        run = TinkerRun(config, TinkerOptions(), service)
        rollouts, metrics = run.rollouts(0)
        assert metrics["rollouts/hinted"] > 0
        assert any(rollout.advantage for rollout in rollouts)
        futures = run.backward(rollouts, 0)
        reported = {name: f.result().metrics["loss:sum"] for name, f in futures.items()}
    seen = flat(p.grad for p in server.model.parameters())
    server.model.zero_grad()
    losses = core_loss(run, server, rollouts, 0)
    for name in ("sdpo", "replay"):
        if name == "sdpo" and config.shared.sdpo_estimator == "sampled":
            continue  # its value means nothing, in either form
        assert reported[name] == pytest.approx(float(losses[name]), rel=1e-5, abs=1e-7)
    assert reported["policy"] == pytest.approx(float(losses["policy"]), abs=1e-6)
    sum(losses.values()).backward()
    expected = flat(p.grad for p in server.model.parameters())
    difference = float((seen - expected).norm() / expected.norm())
    assert difference < 1e-5, difference


def test_twenty_steps_of_the_command_learn_the_pairs(server, dataset, model, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    values = settings(tmp_path, dataset, model, server.address, max_steps=20, learning_rate=3e-3)
    path.write_text(yaml.safe_dump(values))
    assert main(["tinker", "--config", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == server.calls.count("optim_step") == 20
    assert report["sampler"] == "tinker://run/sampler_weights/final"
    assert report["rollouts"] == 20 * 8
    rows = [json.loads(line) for line in Path(report["metrics"]).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    losses = [row["replay/preference_loss"] for row in rows]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the policy is its own reference at first"
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert sum(row["rollouts/hinted"] for row in rows) == report["hinted_rollouts"] > 0


def test_a_server_without_topk_is_told_before_anything_is_trained(dataset, model, tmp_path, capsys):
    server = TinkerServer(str(model), topk=False)
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, dataset, model, server.start())))
    assert main(["tinker", "--config", str(path)]) == 2
    server.stop()
    assert "it must offer prompt log-probs, and their top-k" in capsys.readouterr().err
    assert "optim_step" not in server.calls


def test_an_address_where_nobody_answers_is_an_error_at_once(dataset, model, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        path.write_text(yaml.safe_dump(settings(tmp_path, dataset, model, address)))
        assert main(["tinker", "--config", str(path)]) == 2
    assert f"no server answers at {address}" in capsys.readouterr().err


def test_a_missing_key_is_said(server, dataset, model, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, dataset, model, server.address)))
    assert main(["tinker", "--config", str(path)]) == 2
    assert "TINKER_API_KEY" in capsys.readouterr().err


def test_a_stopped_run_says_where_its_state_is(server, dataset, model, tmp_path, monkeypatch):
    from trainer.engines.tinker.run import train_with_tinker
    from trainer.errors import TrainingStoppedError

    values = settings(tmp_path, dataset, model, server.address)
    asked = iter([False, True])
    with pytest.raises(TrainingStoppedError, match="tinker://run/weights/step-1"):
        train_with_tinker(values, should_stop=lambda: next(asked))
    assert server.calls.count("optim_step") == 1


PRICES = {"sampled": 30.0, "prefilled": 10.0, "trained": 30.0}


def test_no_step_is_begun_that_could_pass_the_ceiling(server, dataset, model, tmp_path):
    from trainer.engines.tinker.run import cost_of_step, train_with_tinker
    from trainer.errors import TrainingStoppedError

    values = settings(tmp_path, dataset, model, server.address)
    own = values["engines"]["tinker"]
    own |= {"usd_per_million": PRICES, "max_usd": 1.0}
    most = cost_of_step(read_settings(values, "tinker"), TinkerOptions(**own))
    own["max_usd"] = 1.9 * most
    with pytest.raises(TrainingStoppedError, match=r"of max_usd=.* are spent; the state is at"):
        train_with_tinker(values | {"trl": values["trl"] | {"max_steps": 50}})
    n = server.calls.count("optim_step")
    assert 1 <= n < 50


def test_the_service_is_not_used_without_its_prices(dataset, model, tmp_path, capsys):
    values = settings(tmp_path, dataset, model, "")
    values["engines"]["tinker"] = {}
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(values))
    assert main(["tinker", "--config", str(path)]) == 2
    assert (
        "usd_per_million must give the prices sampled, prefilled, and trained"
        in capsys.readouterr().err
    )


def test_who_is_asked_to_stop_does_not_wait_for_a_server_that_is_gone(
    server, dataset, model, tmp_path, monkeypatch, caplog
):
    from trainer.engines.tinker import meter
    from trainer.engines.tinker.run import train_with_tinker
    from trainer.errors import TrainingStoppedError

    monkeypatch.setattr(meter, "SETTLE_S", 1.0)
    monkeypatch.setattr(meter, "SAY_S", 0.4)
    hung = threading.Event()
    answer = server.answer

    def silent(path, body):
        if path == "forward_backward":
            hung.wait(60)
        return answer(path, body)

    server.answer = silent
    values = settings(tmp_path, dataset, model, server.address)
    began = time.monotonic()
    with pytest.raises(TrainingStoppedError, match="did not answer"):
        train_with_tinker(values, should_stop=lambda: time.monotonic() > began + 4)
    assert time.monotonic() - began < 30
    assert "Tinker has not answered for" in caplog.text
    hung.set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sdpo_estimator": "full"}, "set trl.sdpo_estimator=teacher_topk"),
        ({"objective": "sapo"}, "choose bnpo, dapo, dr_grpo, grpo"),
        ({"sdpo_estimator": "sampled", "jsd_beta": 0.5}, "set trl.jsd_beta=1.0"),
        ({"lr_scheduler_type": "sideways"}, "lr_scheduler_type"),
    ],
)
def test_what_tinker_cannot_do_is_refused(
    change, message, server, dataset, model, tmp_path, capsys
):
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path, dataset, model, server.address, **change)))
    assert main(["tinker", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err
