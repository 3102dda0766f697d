"""The teacher on the student's cache: the full forward pass, to the last bit, for less."""

import random

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trainer.errors import ShapeError, TrainerConfigError
from trainer.model.kv_reuse import (
    BLOCK,
    hinted_batch,
    student_hidden,
    teacher_hidden,
    teacher_hidden_with_prefix_reuse,
)

SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def make_model(config_class=Qwen2Config, model_class=Qwen2ForCausalLM, **options):
    torch.manual_seed(0)
    return model_class._from_config(config_class(**SIZES | options)).train()


def make_rows(n_rows, n_prompt, n_hint, n_completion, *, seed=0, n_pads=0, n_tail=0):
    """Prompts whose last `n_tail` tokens come after the hint, like a generation prompt."""
    rng = random.Random(seed)

    def some(n_tokens):
        return [rng.randrange(5, 500) for _ in range(n_tokens)]

    prompts = [some(n_prompt) for _ in range(n_rows)]
    prompts[0] = prompts[0][n_pads:]
    cuts = [len(prompt) - n_tail for prompt in prompts]
    hinted = [
        [*prompt[:cut], *some(rng.randint(0, n_hint)), *prompt[cut:]]
        for prompt, cut in zip(prompts, cuts, strict=True)
    ]
    pads = [n_prompt - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + row for pad, row in zip(pads, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (n_prompt - pad) for pad in pads])
    return ids, mask, hinted, torch.tensor([some(n_completion) for _ in range(n_rows)])


@pytest.mark.parametrize(
    "family", [(Qwen2Config, Qwen2ForCausalLM), (LlamaConfig, LlamaForCausalLM)]
)
@pytest.mark.parametrize(
    ("n_rows", "n_prompt", "n_hint", "n_completion", "n_pads", "n_tail"),
    [
        (1, 700, 40, 30, 0, 0),
        (1, 302, 37, 2, 0, 4),
        (3, 278, 70, 30, 0, 3),
        (2, 200, 20, 9, 66, 3),
        (1, 20, 5, 3, 0, 0),
    ],
)
def test_reuse_equals_the_full_forward_pass_bit_for_bit(
    family, n_rows, n_prompt, n_hint, n_completion, n_pads, n_tail
):
    model = make_model(*family)
    ids, mask, hinted, completions = make_rows(
        n_rows, n_prompt, n_hint, n_completion, n_pads=n_pads, n_tail=n_tail
    )
    batch = hinted_batch(ids, hinted, completions, prompt_mask_B_P=mask)
    student = student_hidden(model, ids, completions, prompt_mask_B_P=mask, n_tokens=batch.n_tokens)
    reused = teacher_hidden_with_prefix_reuse(model, batch, student.cache)
    assert torch.equal(reused, teacher_hidden(model, batch))
    assert (batch.n_reused > 0) == (n_prompt > BLOCK)


def test_without_common_length_the_states_differ_by_rounding_only():
    model = make_model()
    for seed in range(5):
        ids, _, hinted, completions = make_rows(2, 150 + 31 * seed, 40, 17, seed=seed)
        batch = hinted_batch(ids, hinted, completions)
        student = student_hidden(model, ids, completions)
        reused = teacher_hidden_with_prefix_reuse(model, batch, student.cache)
        torch.testing.assert_close(reused, teacher_hidden(model, batch), rtol=1e-4, atol=1e-5)


def test_teacher_states_are_those_of_each_row_on_its_own():
    model = make_model()
    ids, mask, hinted, completions = make_rows(3, 90, 20, 6, n_pads=11, n_tail=3)
    batch = hinted_batch(ids, hinted, completions, prompt_mask_B_P=mask)
    states = teacher_hidden(model, batch)
    for row, prompt in enumerate(hinted):
        alone = torch.tensor([[*prompt, *completions[row].tolist()]])
        expected = model.model(input_ids=alone, use_cache=False).last_hidden_state
        torch.testing.assert_close(
            states[row], expected[0, len(prompt) - 1 : -1].detach(), rtol=1e-4, atol=1e-5
        )


def test_without_a_hint_the_teacher_is_the_student():
    model = make_model()
    ids, mask, _, completions = make_rows(2, 90, 0, 6, n_pads=11)
    own_prompts = [row[row_mask.bool()].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    batch = hinted_batch(ids, own_prompts, completions, prompt_mask_B_P=mask)
    student = student_hidden(model, ids, completions, prompt_mask_B_P=mask)
    torch.testing.assert_close(teacher_hidden(model, batch), student.hidden_B_C_H.detach())


def test_the_students_gradient_is_that_of_a_pass_without_cache():
    model = make_model()
    ids, _, hinted, completions = make_rows(1, 150, 10, 8)
    student = student_hidden(model, ids, completions)
    batch = hinted_batch(ids, hinted, completions)
    teacher_hidden_with_prefix_reuse(model, batch, student.cache)
    student.hidden_B_C_H.square().sum().backward()
    with_cache = torch.cat([p.grad.flatten() for p in model.model.parameters()])
    model.zero_grad()
    plain = model.model(input_ids=torch.cat([ids, completions], 1), use_cache=False)
    plain.last_hidden_state[:, 149:-1].square().sum().backward()
    without = torch.cat([p.grad.flatten() for p in model.model.parameters()])
    assert float((with_cache - without).norm() / without.norm()) < 1e-5


def test_the_student_cache_is_read_and_not_changed():
    model = make_model()
    ids, _, hinted, completions = make_rows(1, 150, 10, 8)
    student = student_hidden(model, ids, completions)
    before = [layer.keys.clone() for layer in student.cache.layers]
    batch = hinted_batch(ids, hinted, completions)
    states = teacher_hidden_with_prefix_reuse(model, batch, student.cache)
    assert not states.requires_grad
    for layer, keys in zip(student.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_a_hint_in_front_shares_nothing_and_still_runs():
    model = make_model()
    ids, _, _, completions = make_rows(1, 150, 0, 8)
    batch = hinted_batch(ids, [[499, 498, *ids[0].tolist()]], completions)
    assert batch.n_reused == 0
    student = student_hidden(model, ids, completions, n_tokens=batch.n_tokens)
    reused = teacher_hidden_with_prefix_reuse(model, batch, student.cache)
    torch.testing.assert_close(reused, teacher_hidden(model, batch))


def test_activation_checkpointing_is_refused_while_training():
    model = make_model()
    model.activation_checkpointing_enable()
    ids, _, _, completions = make_rows(1, 70, 0, 4)
    with pytest.raises(TrainerConfigError, match="activation checkpointing drops the key-value"):
        student_hidden(model, ids, completions)
    assert student_hidden(model.eval(), ids, completions).cache.get_seq_length() == 2 * BLOCK


def test_a_windowed_cache_is_refused():
    model = make_model(MistralConfig, MistralForCausalLM, sliding_window=16)
    ids, _, _, completions = make_rows(1, 70, 0, 4)
    with pytest.raises(TrainerConfigError, match="keeps only a window"):
        student_hidden(model, ids, completions)


def test_caches_and_rows_that_do_not_line_up_are_named():
    model = make_model()
    ids, _, hinted, completions = make_rows(2, 150, 10, 8)
    batch = hinted_batch(ids, hinted, completions)
    alone = student_hidden(model, ids[:1], completions[:1])
    with pytest.raises(ShapeError, match="has 1 sequences, but the batch has 2"):
        teacher_hidden_with_prefix_reuse(model, batch, alone.cache)
    with pytest.raises(TrainerConfigError, match="keeps only a window or a running state"):
        teacher_hidden_with_prefix_reuse(model, batch, DynamicCache())
    short = student_hidden(model, ids[:, :40], completions)
    with pytest.raises(ShapeError, match="has 64 tokens, but 128 are needed"):
        teacher_hidden_with_prefix_reuse(model, batch, short.cache)
    with pytest.raises(ShapeError, match="2 prompts, 1 hinted prompts and 2 completions"):
        hinted_batch(ids, hinted[:1], completions)
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    with pytest.raises(ShapeError, match="pad prompts on the left"):
        hinted_batch(ids, hinted, completions, prompt_mask_B_P=mask)
