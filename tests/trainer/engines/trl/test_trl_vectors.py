"""TRL's policy objectives through our trainer, against numbers that TRL itself produced."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.trainer.vectors import cases, tensor

CASES = cases("vectors")["grpo_trl116"]
array = partial(tensor, "grpo_trl116")


class Replay(PreTrainedModel):
    """A causal LM whose logits are a given leaf, in both forms that a trainer may ask for."""

    def __init__(self, logits):
        super().__init__(PreTrainedConfig())
        self.logits = logits
        self.nothing = nn.Parameter(torch.zeros(()))  # a model lies where its parameters do

    @property
    def base_model(self):
        # Of no row with a hint the teacher sees one, whose states count for nothing.
        return lambda input_ids, **_: SimpleNamespace(
            last_hidden_state=self.logits[: len(input_ids)]
        )

    def get_output_embeddings(self):
        size, kind = self.logits.size(-1), self.logits.dtype
        head = nn.Linear(size, size, bias=False, dtype=kind)
        head.weight = nn.Parameter(torch.eye(size, dtype=kind), requires_grad=False)
        return head

    def forward(self, input_ids, **_):
        logp = self.logits[:, :-1].log_softmax(-1)
        nothing = torch.zeros_like(self.logits[:, :1, 0])
        taken = logp.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return SimpleNamespace(
            log_probs=torch.cat([nothing, taken], 1), entropy=torch.cat([nothing, entropy], 1)
        )


class NoTeacher:
    """Stands for a hinted teacher on a rank whose rows have no hint."""

    kind = "base"

    @contextlib.contextmanager
    def weights(self, student):
        yield student


def inputs_of(case):
    inputs = {
        "prompt_ids": array("prompt_ids"),
        "prompt_mask": torch.ones_like(array("prompt_ids")),
        "num_items_in_batch": torch.tensor(case["num_items_in_batch"]),
        **{
            name: array(name)
            for name in ("completion_ids", "completion_mask", "tool_mask", "advantages")
        },
    }
    if case["old"]:
        inputs["old_per_token_logps"] = array("old_per_token_logps")
    if case["beta"]:
        inputs["ref_per_token_logps"] = array("ref_per_token_logps")
    return inputs


def without_hints(inputs):
    """Channel 2 is on, and no row of this rank has a hint: the other forward path, the same loss."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    on_host = {f"host_{name}": inputs[name] for name in names}
    return (
        inputs
        | on_host
        | {
            "teacher_prompt_ids": inputs["prompt_ids"],
            "teacher_prompt_mask": inputs["prompt_mask"],
            "sdpo_mask": torch.zeros(4),
            "n_sdpo_tokens": torch.tensor(7),
        }
    )


@pytest.fixture
def trainer(composer):
    built = composer(steps_per_generation=2, gradient_accumulation_steps=2)
    built.model.train()
    return built


@pytest.mark.parametrize("path", ["channels off", "channel 2 on without hints"])
@pytest.mark.parametrize("shard", range(4))
def test_trl_objectives_pass_through_our_trainer(trainer, path, shard):
    for case in CASES[shard::4]:
        for name in ("loss_type", "importance_sampling_level", "beta"):
            setattr(trainer, name, case[name])
        trainer.args.use_bias_correction_kl = case["use_bias_correction_kl"]
        trainer.epsilon_low, trainer.epsilon_high = case["epsilon_low"], case["epsilon_high"]
        trainer.current_gradient_accumulation_steps = case["current_gradient_accumulation_steps"]
        trainer.max_completion_length = case["max_completion_length"]
        logits = array("logits").requires_grad_()
        inputs = inputs_of(case)
        if path != "channels off":
            trainer.hint_channel.teacher, inputs = NoTeacher(), without_hints(inputs)
        loss = trainer.compute_loss(Replay(logits), inputs)
        # With channel 2, the head's log-probs are made in float32.
        loss_off, atol, rtol = (1e-9, 1e-8, 1e-7) if path == "channels off" else (1e-6, 1e-6, 1e-4)
        assert float(loss.detach()) == pytest.approx(case["loss"], abs=loss_off), case["key"]
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(gradient, array(f"grad_{case['key']}"), atol=atol, rtol=rtol)
        for name, value in case["metrics"].items():
            ours = trainer._metrics["train"][name][-1]
            assert ours == pytest.approx(value, abs=1e-6), (case["key"], name)
