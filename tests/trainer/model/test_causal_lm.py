"""A model's head: its rule from the configuration, and completions without full logits."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

from benchmarks.plain_head import plain_policy_distillation
from trainer.errors import TrainerConfigError
from trainer.model.causal_lm import (
    completion_outputs,
    lm_head_of,
    logit_rule,
    model_head_outputs,
)
from trainer.model.logit_tile import PortableBackend

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
RULES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, (1.0, None)),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}, (0.25, None)),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 8.0}, (0.125, None)),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"final_logit_softcapping": 3.0, "head_dim": 8},
        (1.0, 3.0),
    ),
}


def make_model(family="qwen2"):
    config_class, model_class, extra, _ = RULES[family]
    torch.manual_seed(0)
    return model_class._from_config(config_class(**SIZES | extra))


@pytest.mark.parametrize("family", RULES)
def test_the_logit_rule_gives_the_models_own_logps(family):
    model = make_model(family)
    assert logit_rule(model) == RULES[family][3]
    ids = torch.randint(2, 60, (1, 20))
    expected = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(-1, ids[0, 1:, None])[:, 0]
    hidden = model.base_model(input_ids=ids).last_hidden_state[0, :-1]
    outputs = model_head_outputs(model, hidden, ids[0, 1:])
    torch.testing.assert_close(outputs.logps_N, expected)


@pytest.mark.parametrize("n_hinted_rows", [0, 1, 3])
def test_completions_get_logps_everywhere_and_divergence_where_hinted(n_hinted_rows, monkeypatch):
    monkeypatch.setattr(PortableBackend, "chunk", 4)  # several chunks also for so few tokens
    model, teacher = make_model(), copy.deepcopy(make_model())
    with torch.no_grad():
        teacher.lm_head.weight.add_(0.1 * torch.randn_like(teacher.lm_head.weight))
    hidden = torch.randn(3, 7, 32, requires_grad=True)
    ids = torch.randint(60, (3, 7))
    hinted = (torch.arange(3) < n_hinted_rows)[:, None].expand(3, 7)
    teacher_hidden = torch.randn(int(hinted.sum()), 32)
    ours = completion_outputs(
        model,
        hidden,
        ids,
        hinted_B_C=hinted,
        teacher=teacher,
        teacher_hidden_N_H=teacher_hidden,
        temperature=0.8,
    )
    plain = plain_policy_distillation(
        hidden.flatten(0, 1), lm_head_of(model)[0], target_ids_N=ids.flatten(), temperature=0.8
    )
    divergence = plain_policy_distillation(
        hidden[hinted],
        lm_head_of(model)[0],
        target_ids_N=ids[hinted],
        teacher_hidden_N_H=teacher_hidden,
        teacher_weight_V_H=lm_head_of(teacher)[0],
        temperature=0.8,
    ).divergence_N
    torch.testing.assert_close(ours.logps_B_C.flatten(), plain.logps_N)
    torch.testing.assert_close(ours.entropy_B_C.flatten(), plain.entropy_N)
    torch.testing.assert_close(ours.divergence_N, divergence)

    def gradient(logps, entropy, divergence):
        weight = torch.linspace(-1, 1, 21)
        loss = (logps.flatten() * weight).sum() + entropy.sum() + divergence.sum()
        return torch.autograd.grad(loss, [hidden, model.lm_head.weight])

    torch.testing.assert_close(
        gradient(*ours), gradient(plain.logps_N, plain.entropy_N, divergence)
    )


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
