"""Causal LMs on packed pairs: equal to one pair at a time, or a clear refusal."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from tests.trainer.families import MODELS, causal_lm
from tests.trainer.model.test_tree import trace_pairs
from trainer.errors import ShapeError, TrainerConfigError
from trainer.model.packing import (
    enable_tree_attention,
    packed_logps,
    packed_pair_logps,
)
from trainer.model.tree_layout import pack_pairs

FAMILIES = {"qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 8}, "llama": {}}


def make_model(family="qwen2", **options):
    return causal_lm(family, **FAMILIES[family] | options).train()


def one_pair_at_a_time(model, pairs):
    def logp(prompt, completion):
        input_ids = torch.tensor([prompt + completion], device=model.device)
        logps = model(input_ids=input_ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        return logps.gather(-1, input_ids[0, len(prompt) :, None]).sum()

    chosen = torch.stack([logp(prompt, chosen) for prompt, chosen, _ in pairs])
    rejected = torch.stack([logp(prompt, rejected) for prompt, _, rejected in pairs])
    return chosen, rejected


def dpo_gradient(model, logps):
    model.zero_grad()
    chosen, rejected = logps
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat(grads)


def assert_same_training_signal(model, pairs, ours):
    expected = one_pair_at_a_time(model, pairs)
    for side, expected_side in zip(ours, expected, strict=True):
        torch.testing.assert_close(side, expected_side, rtol=1e-5, atol=1e-5)
    loss, gradient = dpo_gradient(model, ours)
    expected_loss, expected_gradient = dpo_gradient(model, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    relative = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert float(relative) < 1e-5


@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(sorted(FAMILIES)))
@settings(max_examples=12, deadline=None)
def test_packed_pairs_equal_one_pair_at_a_time(seed, n_states, family):
    model = make_model(family, seed=seed)
    pairs = trace_pairs(n_states, seed=seed, vocab=4 + seed % 50)
    pairs += trace_pairs(1, seed=seed + 1)  # a second trace in the same pass
    assert_same_training_signal(model, pairs, packed_logps(model, pack_pairs(pairs)))


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_the_models_own_attention_makes_no_difference(implementation):
    model, other, pairs = make_model(), make_model(), trace_pairs(4)
    other.set_attn_implementation(implementation)
    ours = dpo_gradient(other, packed_logps(other, pack_pairs(pairs)))
    expected = dpo_gradient(model, packed_logps(model, pack_pairs(pairs)))
    assert ours[0] == expected[0]
    torch.testing.assert_close(ours[1], expected[1])


def test_activation_checkpointing_recomputes_through_the_tree():
    pairs = trace_pairs(4)
    model = make_model()
    expected = dpo_gradient(model, packed_logps(model, pack_pairs(pairs)))
    model.activation_checkpointing_enable()
    loss, gradient = dpo_gradient(model, packed_logps(model, pack_pairs(pairs)))
    assert loss == expected[0]
    torch.testing.assert_close(gradient, expected[1])


def test_autocast_gives_the_logps_of_autocast():
    # Normalized queries of Qwen 3 are 32-bit under autocast, its values 16-bit.
    model, pairs = make_model("qwen3"), trace_pairs(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed = packed_logps(model, pack_pairs(pairs))
        expected = one_pair_at_a_time(model, pairs)
    for side, expected_side in zip(packed, expected, strict=True):
        torch.testing.assert_close(side, expected_side, rtol=5e-3, atol=5e-2)


# peft still reads the deprecated name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_adapters_get_the_same_gradient():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(make_model(), config)
    pairs = trace_pairs(4)
    assert_same_training_signal(model, pairs, packed_logps(model, pack_pairs(pairs)))


def test_calls_without_a_tree_stay_as_they_were():
    model = make_model().eval()
    ids = torch.tensor([[3, 4, 5, 6, 7], [0, 0, 8, 9, 10]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=mask).logits
    answer = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        packed_logps(model, pack_pairs(trace_pairs(3)))
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    after = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(after, answer)


def test_the_attention_swap_is_not_saved(tmp_path):
    model = make_model()
    with torch.no_grad():
        packed_logps(model, pack_pairs(trace_pairs(2)))
    model.save_pretrained(tmp_path)
    assert "prefix_tree" not in (tmp_path / "config.json").read_text()


def padded_batch(pairs):
    batch = {}
    for side, index in (("chosen", 1), ("rejected", 2)):
        rows = [pair[0] + pair[index] for pair in pairs]
        width = max(map(len, rows))
        pads = [width - len(row) for row in rows]
        n_prompts = [len(pair[0]) for pair in pairs]
        batch[f"dpo_{side}_input_ids"] = torch.tensor(
            [[0] * pad + row for pad, row in zip(pads, rows, strict=True)]
        )
        batch[f"dpo_{side}_attention_mask"] = torch.tensor(
            [[0] * pad + [1] * len(row) for pad, row in zip(pads, rows, strict=True)]
        )
        batch[f"dpo_{side}_response_mask"] = torch.tensor(
            [
                [0] * (pad + n_prompt) + [1] * (len(row) - n_prompt)
                for pad, n_prompt, row in zip(pads, n_prompts, rows, strict=True)
            ]
        )
    return batch


@pytest.mark.parametrize("max_tokens", [None, 40])
def test_a_padded_batch_gives_its_logps_in_order(max_tokens):
    model, pairs = make_model(), trace_pairs(5)
    (chosen, n_chosen), (rejected, n_rejected) = packed_pair_logps(
        model, padded_batch(pairs), max_tokens=max_tokens
    )
    assert n_chosen.tolist() == [len(side) for _, side, _ in pairs]
    assert n_rejected.tolist() == [len(side) for _, _, side in pairs]
    assert_same_training_signal(model, pairs, (chosen, rejected))


def test_a_response_with_a_gap_or_another_prompt_is_refused():
    model = make_model()
    batch = padded_batch(trace_pairs(2))
    batch["dpo_chosen_response_mask"][0, -1] = 0
    with pytest.raises(ShapeError, match="pair 0, chosen: the response mask has a gap"):
        packed_pair_logps(model, batch)
    batch = padded_batch([([1, 2], [3], [4])])
    batch["dpo_rejected_input_ids"][0, 0] = 9
    with pytest.raises(ShapeError, match="pair 0: chosen and rejected have different prompts"):
        packed_pair_logps(model, batch)


def test_what_a_tree_cannot_reproduce_is_refused():
    tree = pack_pairs(trace_pairs(3))
    with pytest.raises(TrainerConfigError, match="attention dropout"):
        enable_tree_attention(make_model(attention_dropout=0.1))
    model = make_model()
    enable_tree_attention(model)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(TrainerConfigError, match="attention dropout"):
        packed_logps(model, tree)
    with pytest.raises(TrainerConfigError, match="soft cap on attention"):
        enable_tree_attention(causal_lm("gemma2", head_dim=8, pad_token_id=0))


MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
WINDOWED = {
    "mistral": {},
    "gemma3_text": {"head_dim": 8, "pad_token_id": 0},
    "olmo3": {"pad_token_id": 0},
    "gpt_oss": {"head_dim": 8, "pad_token_id": 0, **MOE},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows_and_sinks_of_real_layers_are_followed(name):
    model = causal_lm(name, sliding_window=6, **WINDOWED[name]).train()
    if name == "gpt_oss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.linspace(-1, 2, 4))
    pairs = trace_pairs(4)
    assert max(len(prompt) for prompt, *_ in pairs) > 12
    assert_same_training_signal(model, pairs, packed_logps(model, pack_pairs(pairs)))


@pytest.mark.parametrize("family", ["lfm2", "nemotron_3", "qwen3_5"])
@pytest.mark.parametrize("seed", range(3))
def test_states_of_recurrent_layers_are_carried_along_a_prefix_and_forked(family, seed):
    kind, own = MODELS[family]
    model = causal_lm(kind, seed=seed, **own).train()
    pairs = trace_pairs(4, seed=seed) + trace_pairs(2, seed=seed + 7)
    pairs.append((pairs[0][0], pairs[0][1][:1], [*pairs[0][1], 3]))  # a fork after one token
    assert_same_training_signal(model, pairs, packed_logps(model, pack_pairs(pairs)))
    model.activation_checkpointing_enable()
    with pytest.raises(TrainerConfigError, match="under activation checkpointing"):
        packed_logps(model, pack_pairs(pairs))


def test_models_without_exchangeable_attention_are_refused():
    tree = pack_pairs(trace_pairs(2))
    bloom = BloomForCausalLM(BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(TrainerConfigError, match=r"BloomForCausalLM .*one pair at a time"):
        packed_logps(bloom, tree)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(TrainerConfigError, match=r"MambaForCausalLM .*one pair at a time"):
        packed_logps(mamba, tree)
    other = make_model()
    other.config.layer_types = ["full_attention", "another_mixer"]
    with pytest.raises(TrainerConfigError, match="another_mixer"):
        enable_tree_attention(other)
    with pytest.raises(TrainerConfigError, match="not a transformers causal LM"):
        packed_logps(nn.Linear(2, 2), tree)


def test_a_layer_that_does_not_pass_the_tree_on_is_noticed():
    model = make_model()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def forgetful(*args, prefix_tree, **kwargs):
        return forward(*args, **kwargs | {"attention_mask": None})

    attention.forward = forgetful
    with pytest.raises(TrainerConfigError, match="1 of its 2 layers"):
        packed_logps(model, pack_pairs(trace_pairs(2)))
