"""The three channels inside TRL: accumulation, resuming, teachers, objectives."""

import copy

import pytest
import torch

from tests.trainer.training import assert_equal, parameters
from trainer.engines.trl import ComposerConfig, ComposerReplicationTrainer
from trainer.engines.trl.config import OBJECTIVES
from trainer.engines.trl.teacher import Teacher
from trainer.errors import DivergedError, TrainerConfigError

pytestmark = pytest.mark.slow


ALL_CHANNELS = {"alpha_sdpo": 0.5, "beta_replay": 1.0}


@pytest.mark.parametrize("objective", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_one_batch_of_eight_is_two_accumulated_batches_of_four(composer, model, objective):
    """Every channel is normalized by its own counts over the whole accumulation window."""
    after = {}
    for size, n_accumulated in ((8, 1), (4, 2)):
        trainer = composer(
            model=copy.deepcopy(model).double(),
            objective=objective,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=n_accumulated,
            dpo_variant="dpo_norm",
            **ALL_CHANNELS,
        )
        trainer.train()
        assert all(trainer.n_live_steps.values())
        after[size] = parameters(trainer)
    # Of doubles: AdamW makes a step of every gradient, also of one that is mostly rounding, and how
    # far floats are rounded depends on the processor.
    assert_equal(after[8], after[4], atol=5e-5, rtol=1e-4)
    moved = max(float((after[8][n] - p).detach().abs().max()) for n, p in model.named_parameters())
    assert moved > 1e-3


def test_resuming_is_bit_exact(composer, model, tmp_path):
    """Weights, teacher, pair order and the TAID schedule continue as if nothing had happened."""
    settings = {
        "sdpo_wrapper": "taid",
        "taid_alpha": 0.1,
        "teacher": "ema",
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "shuffle_dataset": True,
        "output": tmp_path / "run",
        **ALL_CHANNELS,
    }
    straight = composer(model=copy.deepcopy(model), **settings)
    straight.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = composer(model=copy.deepcopy(model), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(parameters(straight), parameters(resumed), atol=0.0, rtol=0.0)
    teachers = [dict(t.teacher.copy.named_parameters()) for t in (straight, resumed)]
    assert_equal(teachers[0], teachers[1], atol=0.0, rtol=0.0)
    assert straight.hint_channel.taid.state_dict() == resumed.hint_channel.taid.state_dict()
    assert straight.hint_channel.taid.t > 0.4
    logged = [
        [entry["replay/loss"] for entry in t.state.log_history if "replay/loss" in entry]
        for t in (straight, resumed)
    ]
    assert logged[0] == logged[1]
    assert len(logged[0]) == 4


def test_a_run_that_resumes_in_a_later_epoch_draws_what_it_would_have_drawn(
    composer, model, tmp_path
):
    settings = {
        "shuffle_dataset": True,
        "save_strategy": "steps",
        "save_steps": 4,
        "max_steps": 6,
        "learning_rate": 0.0,
        "per_device_train_batch_size": 8,
        "output": tmp_path / "run",
        **ALL_CHANNELS,
    }

    def drawn(checkpoint=None):
        trainer = composer(model=copy.deepcopy(model), **settings)
        seen, generate = [], trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda rows: (
            seen.append([row["group"] for row in rows]) or generate(rows)
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.epoch == 2.0  # of three steps
        return seen

    straight = drawn()
    assert straight[:3] != straight[3:]
    assert drawn(str(tmp_path / "run" / "checkpoint-4")) == straight[4:]


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_of_the_menu_takes_a_step(composer, model, objective):
    trainer = composer(model=copy.deepcopy(model), objective=objective, max_steps=1, **ALL_CHANNELS)
    for name, value in OBJECTIVES[objective].items():
        assert getattr(trainer.args, name) == value
    trainer.train()
    assert trainer.n_live_steps == {"policy": 1, "sdpo": 1, "replay": 1}
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_a_setting_of_the_user_wins_over_the_menu(tmp_path):
    args = ComposerConfig(
        output_dir=str(tmp_path), objective="cispo", epsilon_high=3.0, use_cpu=True, bf16=False
    )
    assert (args.loss_type, args.epsilon_high) == ("cispo", 3.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "ppo"}, "objective='ppo'"),
        ({"teacher": "oracle"}, "teacher='oracle'"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, settings, message):
    with pytest.raises(TrainerConfigError, match=message):
        ComposerConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


@pytest.mark.parametrize("kind", ["live", "base", "ema"])
def test_teachers_move_as_they_should(composer, model, kind):
    start = copy.deepcopy(model)
    trainer = composer(model=model, teacher=kind, teacher_ema_rate=0.5, max_steps=1, **ALL_CHANNELS)
    trainer.train()
    student = parameters(trainer)
    with trainer.teacher.weights(trainer.model) as teacher:
        seen = {n: p.detach().clone() for n, p in teacher.named_parameters()}
        assert not teacher.training
    first = {n: p.detach() for n, p in start.named_parameters()}
    expected = {
        "live": student,
        "base": first,
        "ema": {n: first[n].lerp(student[n], 0.5) for n in first},
    }[kind]
    assert_equal(seen, expected, atol=1e-7, rtol=1e-6)


def test_the_hinted_teacher_sees_the_hint_and_the_student_does_not(composer, tokenizer):
    trainer = composer(max_steps=1, **ALL_CHANNELS)
    seen = []
    original = trainer._three_channels

    def spy(model, inputs):
        seen.append(inputs)
        return original(model, inputs)

    trainer._three_channels = spy
    trainer.train()
    inputs = seen[0]
    for row, has_hint in enumerate(inputs["sdpo_mask"].tolist()):
        hinted = tokenizer.decode(inputs["teacher_prompt_ids"][row])
        plain = tokenizer.decode(inputs["prompt_ids"][row])
        assert ("Read it first." in hinted) == bool(has_hint)
        assert "Read it first." not in plain
    assert 0 < inputs["sdpo_mask"].sum() < len(inputs["sdpo_mask"])


def test_recorded_rollouts_have_true_importance_ratios(composer, model):
    """The second step's ratio is against the model as it was when the run began."""
    trainer = composer(max_steps=2, objective="grpo")
    ratios = []
    original = trainer._three_channels

    def spy(model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        n = inputs["completion_ids"].size(1)
        with torch.no_grad():
            logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, n)
        log_ratio = (logps - inputs["old_per_token_logps"]) * inputs["completion_mask"]
        ratios.append(log_ratio.abs().max().item())
        return original(model, inputs)

    trainer._three_channels = spy
    trainer.train()
    assert ratios[0] < 1e-4
    assert ratios[1] > 1e-3


def test_with_both_channels_off_we_are_trl(composer, model):
    """Same loss, same gradient, same update as `GRPOTrainer` on the same rollouts."""
    ours = composer(model=copy.deepcopy(model), objective="dapo")
    ours.train()
    theirs = composer(model=copy.deepcopy(model), objective="dapo")
    theirs._compute_loss = lambda m, i: super(ComposerReplicationTrainer, theirs)._compute_loss(
        m, i
    )
    theirs.train()
    assert_equal(parameters(ours), parameters(theirs), atol=0.0, rtol=0.0)


@pytest.mark.slow
def test_a_peft_model_trains_all_channels_with_its_base_as_teacher(composer, model):
    import peft

    lora = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    trainer = composer(model=lora, max_steps=2, **ALL_CHANNELS)
    assert trainer.teacher.kind == "base"
    assert trainer.teacher.copy is None
    before = {n: p.detach().clone() for n, p in lora.named_parameters()}
    trainer.train()
    moved = {n for n, p in lora.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert trainer.n_live_steps == {"policy": 2, "sdpo": 2, "replay": 2}


def test_an_ema_of_a_peft_model_is_refused(model):
    model.peft_config = {}
    with pytest.raises(TrainerConfigError, match="does not support PEFT"):
        Teacher("ema", model, ema_rate=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fast",
    [
        {"pair_forward": "padded"},
        {"pair_forward": "packed"},
        {"pair_forward": "packed", "max_packed_tokens": 1},
    ],
    ids=["fused head", "one tree", "one tree and others"],
)
@pytest.mark.parametrize("teacher", ["live", "ema"])
def test_a_speed_up_changes_no_update(composer, model, fast, teacher, monkeypatch):
    """Two optimizer steps with the plain path and with one speed-up end at the same weights."""
    settings = {"teacher": teacher, "optim": "sgd", **ALL_CHANNELS}
    after = []
    for is_fused, change in ((False, {"pair_forward": "padded"}), (True, fast)):
        monkeypatch.setattr(ComposerConfig, "is_fused", is_fused)
        trainer = composer(model=copy.deepcopy(model), **(settings | change))
        trainer.train()
        after.append(parameters(trainer))
    assert_equal(*after, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "n_passes"),
    [
        ({"teacher": "live"}, 1),
        ({"teacher": "ema"}, 2),
        ({"teacher": "live", "max_packed_tokens": 1}, 5),
    ],
    ids=["one tree", "and the teacher's weights", "and a tree a pair"],
)
def test_channels_share_one_forward_pass_where_weights_and_budget_allow(
    composer, model, settings, n_passes
):
    trainer = composer(max_steps=1, pair_forward="packed", **settings, **ALL_CHANNELS)
    calls = []
    backbones = [model.base_model]
    if trainer.teacher.copy is not None:
        backbones.append(trainer.teacher.copy.base_model)
    for backbone in backbones:
        backbone.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert len(calls) == n_passes


@pytest.mark.parametrize("pair_forward", ["packed", "padded"])
def test_a_batch_of_several_passes_is_one_update(composer, model, pair_forward):
    """Gradients that are sent back pass by pass add up to those of the whole batch."""
    settings = {"pair_forward": pair_forward, "optim": "sgd", "max_steps": 1}
    after = []
    for max_tokens in (32_768, 1):
        trainer = composer(
            model=copy.deepcopy(model), max_packed_tokens=max_tokens, **settings, **ALL_CHANNELS
        )
        trainer.train()
        after.append(parameters(trainer))
    assert_equal(*after, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("alpha_sdpo", [0.0, 0.5])
def test_a_policy_without_a_weight_runs_only_where_channel_2_needs_it(composer, alpha_sdpo):
    trainer = composer(policy_weight=0.0, beta_replay=1.0, alpha_sdpo=alpha_sdpo, max_steps=2)
    calls: set[str] = set()

    def watched(name, original):
        def call(*args, **kwargs):
            calls.add(name)
            return original(*args, **kwargs)

        return call

    names = {"_get_per_token_logps_and_entropies", "_generate_and_score_completions"}
    for name in names:
        setattr(trainer, name, watched(name, getattr(trainer, name)))
    trainer.train()
    assert calls == (names if alpha_sdpo > 0 else set())
    assert trainer.n_live_steps["replay"] == 2
    assert trainer.n_live_steps["policy"] == 0


def test_a_run_that_diverges_ends_and_says_so(composer):
    trainer = composer(learning_rate=1e30, max_grad_norm=0.0, max_steps=4, **ALL_CHANNELS)
    with pytest.raises(DivergedError, match=r"step \d: the loss is nan.*Lower learning_rate"):
        trainer.train()
