"""The untouched model's view of the pairs: what the policy says before its first step."""

import copy
import math

import pytest

DPO = {
    "policy_weight": 0.0,
    "beta_replay": 1.0,
    "dpo_variant": "dpo",
    "dpo_beta": 1.0,
    "learning_rate": 0.0,
    "max_steps": 2,
}


@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("pair_forward", ["packed", "padded"])
def test_policy_and_reference_agree_before_the_first_step(composer, model, is_bf16, pair_forward):
    """Under the policy's own autocast, and in its own passes: in float32 they were up to .22 apart."""
    trainer = composer(model=copy.deepcopy(model), pair_forward=pair_forward, bf16=is_bf16, **DPO)
    trainer.train()
    losses = [row["replay/loss"] for row in trainer.state.log_history if "replay/loss" in row]
    assert losses == pytest.approx([math.log(2)] * 2, abs=2e-2 if is_bf16 else 1e-5)
    exact = composer(model=copy.deepcopy(model), pair_forward="padded", **DPO | {"seed": 1})
    difference = trainer.pair_channel.reference_logps - exact.pair_channel.reference_logps
    largest = float(difference.abs().max())
    assert 1e-3 < largest < 1 if is_bf16 else largest < 1e-4
