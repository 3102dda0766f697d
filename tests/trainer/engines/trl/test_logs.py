"""Logs are of tokens, pairs and steps, however a step is cut into micro-batches and ranks."""

import copy
import math

import pytest

from tests.trainer.published import rows_of
from trainer.engines.trl.run import MetricsFile

FIGURES = (
    "policy/loss",
    "sdpo/loss",
    "sdpo/n_tokens",
    "replay/loss",
    "replay/accuracy",
    "replay/margin",
    "replay/n_pairs",
)
ALL = {"alpha_sdpo": 0.5, "beta_replay": 0.7, "objective": "dapo", "learning_rate": 1e-3}


def logged(composer, model, tmp_path, **settings):
    """The lines that a run writes, without the last of the whole run."""
    rows = [
        {**row, "weight": 0.25 + 0.5 * i, "balance": 1 - i / 24} for i, row in enumerate(rows_of(3))
    ]
    trainer = composer(model=copy.deepcopy(model), pairs=rows, output=tmp_path, **ALL | settings)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    trainer.add_callback(file)
    trainer.train()
    return [row for row in file.rows if "train/train_runtime" not in row]


@pytest.mark.parametrize("pair_forward", ["packed", "padded"])
def test_micro_batches_log_what_one_batch_logs(composer, model, tmp_path, pair_forward):
    runs = [
        logged(
            composer,
            model,
            tmp_path / str(size),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            pairs_per_step=5,
            pair_forward=pair_forward,
        )
        for size in (8, 2)
    ]
    for whole, parts in zip(*runs, strict=True):
        assert whole["replay/n_pairs"] == 5
        for name in FIGURES:
            assert parts[name] == pytest.approx(whole[name], abs=2e-6), name


@pytest.mark.parametrize("size", [8, 2])
def test_the_loss_is_the_weighted_sum_of_the_figures(composer, model, tmp_path, size):
    rows = logged(
        composer,
        model,
        tmp_path,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
        pairs_per_step=5,
        drift_weight=3.0,
        drift_tokens=64,
        max_steps=3,
    )
    weights = {"policy/loss": 1.0, "sdpo/loss": 0.5, "replay/loss": 0.7, "drift/kl": 3.0}
    for row in rows:
        summed = sum(weight * row[name] for name, weight in weights.items())
        assert row["train/loss"] == pytest.approx(summed, abs=2e-6)
    assert rows[-1]["drift/kl"] > 0


def test_a_log_of_several_steps_is_their_mean_whatever_is_saved_between(composer, model, tmp_path):
    shared = {"max_steps": 4, "pairs_per_step": 4}
    single = logged(composer, model, tmp_path / "one", logging_steps=1, **shared)
    several = logged(
        composer,
        model,
        tmp_path / "four",
        logging_steps=4,
        save_strategy="steps",
        save_steps=3,
        **shared,
    )
    (row,) = several
    assert row["policy/loss"] == pytest.approx(sum(r["policy/loss"] for r in single) / 4, abs=1e-6)
    n_tokens = [r["sdpo/n_tokens"] for r in single]
    summed = sum(r["sdpo/loss"] * n for r, n in zip(single, n_tokens, strict=True))
    assert row["sdpo/loss"] == pytest.approx(summed / sum(n_tokens), abs=1e-6)
    assert row["replay/n_pairs"] == 4


def test_a_report_compares_the_first_tenth_of_the_steps_with_the_last(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert all(map(math.isnan, file.losses()))  # of a rank that writes no file
    file.rows = [{"train/train_loss": 5.0}]
    assert file.losses() == (5.0, 5.0)
    file.rows = [{"train/loss": float(loss)} for loss in range(20, 0, -1)] + file.rows
    assert file.losses() == (19.5, 1.5)
