"""`objective: sft`, held against TRL's own SFT on the same tokens."""

import copy

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tests.trainer.published import assistant, rows_of
from tests.trainer.training import PLAIN, assert_equal, parameters
from trainer.data.dataset import PreferenceData
from trainer.data.sampler import imitation_weight
from trainer.engines.trl import ComposerConfig
from trainer.errors import TrainerConfigError

pytestmark = pytest.mark.slow

ROWS = rows_of(2)
SFT = {"objective": "sft", "pairs_per_step": len(ROWS), "weight_decay": 0.0}


def trained_by_trl(model, collator, folder, *, max_steps):
    """TRL's SFT on the ids that we train on, completions alone, all rows a step."""
    batch = collator.pairs(ROWS)
    names = ("input_ids", "response_mask", "attention_mask")
    columns = [batch[f"dpo_chosen_{name}"].tolist() for name in names]
    rows = [
        {"input_ids": ids[: sum(seen)], "completion_mask": asked[: sum(seen)]}
        for ids, asked, seen in zip(*columns, strict=True)
    ]
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=len(rows),
        learning_rate=PLAIN["learning_rate"],
        max_length=None,
        gradient_checkpointing=False,
        completion_only_loss=True,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=collator.renderer.tokenizer,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("pair_forward", ["packed", "padded"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_steps_and_losses_are_those_of_trls_sft(composer, model, tmp_path, pair_forward):
    ours = composer(
        model=copy.deepcopy(model), pairs=ROWS, max_steps=3, pair_forward=pair_forward, **SFT
    )
    ours.train()
    theirs = trained_by_trl(copy.deepcopy(model), ours.collator, tmp_path / "trl", max_steps=3)
    losses = [
        [entry[name] for entry in one.state.log_history if name in entry]
        for one, name in ((ours, "policy/loss"), (theirs, "loss"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert_equal(parameters(ours.model), parameters(theirs.model), atol=5e-5, rtol=1e-3)


def test_a_step_in_parts_is_the_same_step(composer, model):
    """Tokens are counted over the whole step, not by micro-batch, and weights count."""
    rows = [{**row, "weight": 0.5 + i % 3} for i, row in enumerate(ROWS)]
    whole, parts = (
        composer(model=copy.deepcopy(model), pairs=rows, gradient_accumulation_steps=n, **SFT)
        for n in (1, 4)
    )
    for trainer in (whole, parts):
        trainer.train()
    logged = [
        [entry["policy/loss"] for entry in one.state.log_history if "policy/loss" in entry]
        for one in (whole, parts)
    ]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)
    assert_equal(parameters(whole.model), parameters(parts.model), atol=5e-5, rtol=1e-3)


def test_nothing_is_rolled_out_and_the_rejected_side_is_not_run(composer, model, monkeypatch):
    trainer = composer(model=copy.deepcopy(model), **SFT)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", pytest.fail)
    trainer.train()
    assert trainer.n_live_steps == {"policy": 2, "sdpo": 0, "replay": 0}
    assert all(row["rejected"] == row["chosen"] for row in trainer.pair_channel.pairs)


def test_beside_the_preference_loss_both_are_charged_from_one_forward_pass(composer, model):
    """As a pair a row weighs by `weight`, and its chosen side by how surely that is right."""
    better = [{**row, "weight": 0.2 + i % 2 / 2} for i, row in enumerate(ROWS)]
    right = [{**row, "weight": 0.9 - i % 3 / 5} for i, row in enumerate(ROWS)]
    rows = [{**row, "p_chosen_right": of["weight"]} for row, of in zip(better, right, strict=True)]
    settings = {"dpo_variant": "simpo", "beta_replay": 1.0}
    both = composer(model=copy.deepcopy(model), pairs=rows, **SFT | settings)
    both.train()
    settings |= {"policy_weight": 0.0, "pairs_per_step": len(ROWS)}
    alone = {
        "policy/loss": composer(model=copy.deepcopy(model), pairs=right, **SFT),
        "replay/loss": composer(model=copy.deepcopy(model), pairs=better, **settings),
    }
    for name, trainer in alone.items():
        trainer.train()
        assert both.state.log_history[0][name] == pytest.approx(
            trainer.state.log_history[0][name], rel=1e-5
        )


def test_what_is_only_imitated_is_no_pair_for_the_preference_loss(composer, model):
    """Rows with one action on both sides, which are the positives, leave the other channel alone."""
    agreed = [{**row, "rejected": row["chosen"]} for row in ROWS]
    settings = {"beta_replay": 1.0, "dpo_variant": "simpo", "rpo_alpha": 1.0, "simpo_gamma": 0.5}
    logged = []
    for rows in (ROWS, [*ROWS, *agreed]):
        trainer = composer(
            model=copy.deepcopy(model), pairs=rows, **SFT | settings | {"pairs_per_step": len(rows)}
        )
        trainer.train()
        logged.append(trainer.state.log_history[0])
    for name in ("policy/loss", "replay/loss", "replay/accuracy", "replay/margin"):
        assert logged[0][name] == pytest.approx(logged[1][name], rel=1e-5), name


def test_sft_on_says_whose_actions_are_imitated():
    read, edit = assistant("Read", file_path="a"), assistant("Edit", file_path="a")
    pair = {"prompt": [], "chosen": [read], "rejected": [edit], "p_chosen_right": 0.9}
    positive = {"prompt": [], "completion": [read]}
    data = PreferenceData(
        pairs=[pair],
        positives=[positive],
        answers=[{"prompt": [], "completion": [edit], "p_chosen_right": 0.75}],
    )
    imitated = {
        on: [row["chosen"] for row in data.sft_pairs(on)]
        for on in ("chosen", "consensus", "answers", "recorded")
    }
    assert imitated == {
        "chosen": [[read]],
        "consensus": [[read], [read]],
        "answers": [[read], [read], [edit]],
        "recorded": [[edit], [read]],
    }
    assert data.sft_pairs("answers")[-1]["weight"] == 0.75
    assert imitation_weight(data.sft_pairs("consensus")[0]) == 0.9
    # Nobody says how right the agent's own action is.
    assert imitation_weight(data.sft_pairs("recorded")[0]) == 1
    assert imitation_weight(pair | {"weight": 0.0}) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "dapo"},
        {"objective": "dapo", "sft_on": "chosen"},
        {"objective": "sft", "beta_replay": 1.0},
        {"sft_on": "all"},
    ],
)
def test_sft_on_without_sft_is_refused(tmp_path, settings):
    settings = {"sft_on": "recorded", "objective": "sft"} | settings
    with pytest.raises(TrainerConfigError, match="sft_on"):
        ComposerConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
