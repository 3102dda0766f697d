"""The adapter for VeRL, without VeRL: its own numbers, its files, and what it refuses."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from tests.trainer import vectors
from tests.trainer.published import rows_of, write_dataset
from tests.trainer.training import save_tiny_model
from trainer.__main__ import main
from trainer.data.rendering import Renderer
from trainer.engines.handover import TokenizedPairs, write_pairs
from trainer.engines.settings_file import read_settings
from trainer.engines.verl import launch
from trainer.engines.verl.losses import (
    NOT_SCORED,
    share_of_mean,
    topk_divergence,
)
from trainer.engines.verl.options import VARIABLE, PluginOptions
from trainer.engines.verl.prepare import prepare
from trainer.engines.verl.reward import compute_score
from trainer.errors import TrainerConfigError
from trainer.losses.channels import SDPOOptions
from trainer.losses.divergence import jsd_entries, log_probs, with_tail

VECTORS = "verl_0_9_1"


def tensor(key: str, name: str) -> torch.Tensor:
    return vectors.tensor(VECTORS, f"{key}/{name}")


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["distill/forward_kl_topk/0", "distill/forward_kl_topk/1"])
def test_topk_entries_are_verls_forward_kl_and_the_tail_is_ours(key):
    """VeRL's top-k forward KL drops what lies outside the k; ours keeps it as one more entry.

    A third case of VeRL's is not ours: it clamps the student's log-probs at -10 from below, which
    takes the gradient away where the student is most wrong.
    """
    logits = tensor(key, "student_logits")[0].requires_grad_()
    ids, teacher = tensor(key, "teacher_topk_ids").long(), tensor(key, "teacher_topk_log_probs")
    mine = log_probs(logits).gather(-1, ids)
    entries = jsd_entries(with_tail(mine), with_tail(teacher), 0.0)
    inside = entries[..., :-1].sum(-1)
    # VeRL computes this one in float32.
    theirs, their_gradient = (
        tensor(key, name)[0].double() for name in ("distillation_losses", "grad")
    )
    torch.testing.assert_close(inside.detach().double(), theirs, atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(inside.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient.double(), their_gradient, atol=1e-6, rtol=1e-6)
    ours = topk_divergence(logits, ids, teacher, SDPOOptions(jsd_beta=0.0))
    torch.testing.assert_close(ours, inside + entries[..., -1])
    assert bool((ours >= 0).all())


def test_shares_of_micro_batches_and_ranks_are_the_mean_over_everything():
    values, mask = torch.randn(8, 5), (torch.rand(8, 5) > 0.4).float()
    shares = [
        share_of_mean(
            values[2 * k : 2 * k + 2], mask[2 * k : 2 * k + 2], total=float(mask.sum()), n_ranks=2
        )
        for k in range(4)
    ]
    # Two micro-batches add up on a rank, then the two ranks are averaged.
    ranks = (shares[0] + shares[1], shares[2] + shares[3])
    torch.testing.assert_close(sum(ranks) / 2, (values * mask).sum() / mask.sum())


def test_unscored_position_costs_nothing_and_gets_no_gradient():
    logits = torch.randn(4, 10, requires_grad=True)
    logp, ids = torch.randn(4, 10).log_softmax(-1).topk(3)
    ids[1:3] = NOT_SCORED
    values = topk_divergence(logits, ids, logp, SDPOOptions())
    assert (values[1:3] == 0).all()
    assert (values[[0, 3]] > 0).all()
    values.sum().backward()
    assert logits.grad is not None
    assert (logits.grad[1:3] == 0).all()
    assert (logits.grad[[0, 3]] != 0).any(-1).all()


# -- pairs -----------------------------------------------------------------------------------------


@pytest.fixture
def renderer(tokenizer):
    return Renderer(
        tokenizer=tokenizer,
        max_prompt_tokens=64,
        max_response_tokens=24,
        with_tools=False,
        window="tail",
    )


@pytest.fixture
def pairs(tmp_path, renderer):
    rows = [row | {"weight": 1.0 + (i % 3)} for i, row in enumerate(rows_of(2))]
    assert write_pairs(tmp_path / "pairs.parquet", rows, renderer) == 8
    return TokenizedPairs(tmp_path / "pairs.parquet")


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_ranks_do_equal_work_and_see_each_pair_of_the_step_once(pairs, n_ranks):
    drawn = pairs.sampler(batch_size=5, seed=3).step(2)
    parts = [pairs.part(drawn, rank=rank, n_ranks=n_ranks, multiple=2) for rank in range(n_ranks)]
    assert len({len(part.indices) for part in parts}) == 1
    assert all(len(part.indices) % 2 == 0 for part in parts)
    real = [
        index
        for part in parts
        for index, weight in zip(part.indices, part.weights, strict=True)
        if weight > 0
    ]
    assert real == drawn
    assert sum(sum(part.weights) for part in parts) == pytest.approx(parts[0].total_weight)


# -- files -----------------------------------------------------------------------------------------


def file(dataset, output, saved, **trl) -> dict:
    shared = {
        "objective": "grpo",
        "alpha_sdpo": 0.1,
        "sdpo_estimator": "teacher_topk",
        "sdpo_top_k": 32,
        "beta_replay": 0.05,
        "max_steps": 4,
        "lr_scheduler_type": "constant",
        "max_prompt_tokens": 64,
        "prompt_window": "tail",
        "max_completion_length": 16,
        "num_generations": 4,
        "render_tools": False,
    }
    return {
        "dataset": str(dataset),
        "output": str(output),
        "model": str(saved),
        "rollouts": "generate",
        "trl": shared | trl,
    }


def test_prepared_run_holds_rendered_states_pairs_and_a_configuration(
    dataset_folder, saved, tmp_path
):
    values = file(dataset_folder, tmp_path, saved) | {
        "engines": {"verl": {"trainer.n_gpus_per_node": 2, "trainer.logger": ["console"]}}
    }
    run = prepare(read_settings(values, "verl"))
    assert (run.n_prompts, run.n_hints, run.n_pairs) == (20, 10, 20)
    rows = pq.read_table(tmp_path / "prompts.parquet").to_pylist()
    hinted = [row["extra_info"]["hinted_ids"] for row in rows]
    assert sum(ids is not None for ids in hinted) == 10
    for row, ids in zip(rows, hinted, strict=True):
        prompt = row["extra_info"]["prompt_ids"]
        assert len(prompt) <= 64
        if ids is not None:
            assert len(ids) > len(prompt)
    config = json.loads(run.config.read_text())
    actor, rollout = (config["actor_rollout_ref"][name] for name in ("actor", "rollout"))
    assert config["data"]["train_batch_size"] == 8 * 2 // 4
    assert actor["ppo_mini_batch_size"] == config["data"]["train_batch_size"]
    assert actor["loss_agg_mode"] == "seq-mean-token-mean"
    assert rollout["engine_kwargs"]["vllm"]["max_logprobs"] == 32
    assert rollout["max_model_len"] >= max(len(ids) for ids in hinted if ids) + 16
    assert config["trainer"]["logger"] == ["console"]
    sent = config["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"][VARIABLE]
    assert PluginOptions(**json.loads(sent)) == run.options
    assert len(TokenizedPairs(run.options.pairs)) == 20


def test_reward_column_is_read_back_by_the_reward_function(dataset_folder, saved, tmp_path):
    prepare(read_settings(file(dataset_folder, tmp_path, saved), "verl"))
    row = pq.read_table(tmp_path / "prompts.parquet").to_pylist()[0]
    truth = row["reward_model"]["ground_truth"]
    call = json.loads(truth)["consensus"]["tool_calls"][0]["function"]
    text = json.dumps({"name": call["name"], "arguments": call["arguments"]})
    right = f"<tool_call>\n{text}\n</tool_call>"
    assert compute_score("replay", right, truth, row["extra_info"]) == 1.0
    assert compute_score("replay", "no idea", truth, row["extra_info"]) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "set model"),
        ({"trl": {"max_steps": -1}}, "set trl.max_steps"),
        ({"trl": {"num_generations": 3}}, "is not a multiple of"),
        ({"trl": {"per_device_train_batch_size": 400}}, "needs 100 states"),
        ({"trl": {"lr_scheduler_type": "polynomial"}}, "constant and cosine"),
        ({"engines": {"verl": {"trainer.logger.x": 1}}}, "not a section"),
    ],
)
def test_run_that_verl_cannot_do_is_refused_before_anything_is_started(
    change, message, dataset_folder, saved, tmp_path
):
    values = file(dataset_folder, tmp_path, saved, **change.pop("trl", {})) | change
    with pytest.raises(TrainerConfigError, match=message):
        prepare(read_settings(values, "verl"))


# -- is it live? -----------------------------------------------------------------------------------

BOTH = PluginOptions(alpha_sdpo=0.1, beta_replay=0.05)


def test_first_step_without_a_channel_ends_the_run(tmp_path, caplog):
    metrics = tmp_path / "metrics.jsonl"
    assert not launch.check_first_step(metrics, BOTH)
    metrics.write_text('{"step": 1, "data": {"actor/pg_loss"')
    assert not launch.check_first_step(metrics, BOTH)
    metrics.write_text(json.dumps({"step": 1, "data": {"actor/pg_loss": 0.0}}) + "\n")
    with pytest.raises(TrainerConfigError, match=r"(?s)first step: channel 2.*channel 3"):
        launch.check_first_step(metrics, BOTH)
    data = {"actor/sdpo/n_tokens": 0.0, "actor/replay/n_pairs": 2.0}
    metrics.write_text(json.dumps({"step": 1, "data": data}) + "\n")
    assert launch.check_first_step(metrics, BOTH)
    assert "none of its rows has a hint" in caplog.text


def test_without_verl_the_command_says_how_to_get_it(tmp_path, capsys):
    with pytest.raises(TrainerConfigError, match=r"recipes/verl/requirements\.txt"):
        launch.require_version()
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(file("any", tmp_path, "any")))
    assert main(["verl", "--config", str(path)]) == 2
    assert "the engine verl needs the package verl" in capsys.readouterr().err


# -- the same file under TRL -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_settings_file_of_the_frameworks_drives_trl(tmp_path):
    """The same file runs VeRL and Monarch, each in an environment of its own; the first step's
    pairs and their loss are the same numbers there."""
    from tests.trainer.one_file import first_replay_loss, settings_values

    dataset = write_dataset(tmp_path / "data")
    model = save_tiny_model(tmp_path / "tiny", rows_of(8), n_layers=2)
    values = settings_values(dataset=dataset, output=tmp_path / "out", model=model)
    values["evaluation"] = {"max_prompts": 1, "max_new_tokens": 4}
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(values))
    assert main(["--config", str(path)]) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows[0]["replay/loss"] == pytest.approx(first_replay_loss(values), rel=1e-5)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 3
    assert {"policy", "replay"} <= set(report["channels_live"])
    assert prepare(read_settings(values, "verl")).n_pairs == 20
