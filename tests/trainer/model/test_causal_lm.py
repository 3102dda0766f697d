"""A model's head: its rule from the configuration, and its numbers without full logits."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from tests.trainer.families import SIZES, causal_lm
from trainer.errors import TrainerConfigError
from trainer.losses import generalized_jsd_loss
from trainer.model.causal_lm import head_divergence, head_logps, lm_head_of, logit_rule
from trainer.model.scoring import project

RULES = {
    "qwen2": ({}, (1.0, None)),
    "cohere": ({"logit_scale": 0.25}, (0.25, None)),
    "granite": ({"logits_scaling": 8.0}, (0.125, None)),
    "gemma2": ({"final_logit_softcapping": 3.0, "head_dim": 8}, (1.0, 3.0)),
}


def make_model(family="qwen2"):
    return causal_lm(family, num_hidden_layers=1, pad_token_id=0, **RULES[family][0])


@pytest.mark.parametrize("family", RULES)
def test_the_logit_rule_gives_the_models_own_logps(family):
    model = make_model(family)
    assert logit_rule(model) == RULES[family][1]
    ids = torch.randint(2, 60, (1, 20))
    expected = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, ids[0, 1:, None])[:, 0]
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    torch.testing.assert_close(head_logps(model, hidden, ids[0, 1:])[0], expected)


@pytest.mark.parametrize("family", RULES)
def test_logps_and_entropies_are_those_of_full_logits_in_value_and_gradient(family, monkeypatch):
    monkeypatch.setattr(
        "trainer.model.causal_lm.WIDTH", 16
    )  # several tiles also for so few entries
    model = make_model(family)
    hidden = torch.randn(21, 32, requires_grad=True)
    ids = torch.randint(60, (21,))
    found = head_logps(model, hidden, ids, temperature=0.8)
    logp = (project(model, hidden) / 0.8).log_softmax(-1)
    expected = logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)

    def gradient(logps, entropy):
        loss = (logps * torch.linspace(-1, 1, 21)).sum() + entropy.sum()
        return torch.autograd.grad(loss, [hidden, model.lm_head.weight])

    torch.testing.assert_close(gradient(*found), gradient(*expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("family", RULES)
def test_divergence_is_that_of_full_logits_in_value_and_gradient(family, beta):
    model, teacher = make_model(family), copy.deepcopy(make_model(family))
    with torch.no_grad():
        teacher.lm_head.weight.add_(0.1 * torch.randn_like(teacher.lm_head.weight))
    hidden, of_teacher = torch.randn(2, 9, 32, requires_grad=True)
    found = head_divergence(model, hidden, teacher, of_teacher, beta=beta, temperature=0.8)
    expected = generalized_jsd_loss(
        project(model, hidden),
        project(teacher, of_teacher).detach(),
        beta=beta,
        temperature=0.8,
        reduction="none",
    ).sum(-1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    weights = [hidden, model.lm_head.weight]
    pairs = (
        torch.autograd.grad(one.sum(), weights, retain_graph=True) for one in (found, expected)
    )
    torch.testing.assert_close(*pairs, atol=2e-6, rtol=1e-5)
    assert torch.autograd.grad(found.sum(), teacher.lm_head.weight, allow_unused=True) == (None,)


def test_no_tokens_have_no_divergence_and_a_graph():
    model, nothing = make_model(), torch.zeros(0, 32, requires_grad=True)
    summed = head_divergence(model, nothing, model, nothing, beta=0.5).sum()
    assert summed == 0
    summed.backward()
    logps, _ = head_logps(model, nothing, torch.zeros(0, dtype=torch.long))
    assert logps.shape == (0,)


# peft still reads the deprecated name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_heads_that_the_fused_pass_would_get_wrong_are_refused():
    with pytest.raises(TrainerConfigError, match="no language-model head"):
        lm_head_of(Qwen2Model(Qwen2Config(**SIZES)))
    with pytest.raises(TrainerConfigError, match="not a transformers causal LM"):
        lm_head_of(nn.Linear(2, 2))
    adapted = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(TrainerConfigError, match="an adapter"):
        lm_head_of(adapted)
