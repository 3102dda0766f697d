"""The hint-conditioned teacher on the student's own key-value cache.

The self-teacher is the student that has also seen a hint. With the hint at the *end* of the
context, `prompt + hint + completion`, both share the prompt, and causal attention makes the
prompt's keys and values the same numbers in both. The teacher then runs the hint and the completion
only: for a long agent prompt that is a small part of the forward pass. A hint in front of the
prompt, or a teacher with other weights (EMA, base model), shares nothing: use `teacher_hidden`.

Shapes: `B` sequences, `P` prompt tokens (padded on the left), `C` completion tokens (padded on the
right), `T` all tokens of the longest sequence, in whole blocks, `H` hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from trainer.errors import ShapeError, TrainerConfigError
from trainer.integrations.packing import causal_lm_of

BLOCK = 64
"""Forward passes run whole blocks of this many tokens. Matrix kernels treat the last, incomplete
rows of a product in another order, so that without it the two ways to the teacher's states differ
in the last digit."""

__all__ = [
    "HintedBatch",
    "StudentStates",
    "append_hints",
    "student_hidden",
    "teacher_hidden",
    "teacher_hidden_with_prefix_reuse",
]


class StudentStates(NamedTuple):
    """The student's states that predict the completion, and its key-value cache."""

    hidden_B_C_H: Tensor
    cache: Cache


@dataclass(frozen=True, slots=True, eq=False)
class HintedBatch:
    """`prompt + hint + completion` of each sequence. Made by `append_hints`."""

    ids_B_T: Tensor
    prompt_mask_B_P: Tensor
    predictors_B_C: Tensor
    """Index in `ids_B_T` of the token that predicts each completion token."""

    @property
    def n_prompt(self) -> int:
        """Padded prompt length, `P`."""
        return self.prompt_mask_B_P.shape[1]

    @property
    def n_reused(self) -> int:
        """Prompt tokens whose keys and values can come from the student, in whole blocks."""
        return (self.n_prompt - 1) // BLOCK * BLOCK


def append_hints(
    prompt_ids_B_P: Tensor,
    hint_ids: Sequence[Sequence[int]],
    completion_ids_B_C: Tensor,
    *,
    prompt_mask_B_P: Tensor | None = None,
    pad_token_id: int = 0,
) -> HintedBatch:
    """The teacher's batch: each sequence's hint (may be empty) between prompt and completion.

    Raises:
        ShapeError: the rows do not line up, or a prompt ends in padding.
    """
    n_rows, n_completion = completion_ids_B_C.shape
    if len(prompt_ids_B_P) != n_rows or len(hint_ids) != n_rows:
        raise ShapeError(
            f"{len(prompt_ids_B_P)} prompts, {len(hint_ids)} hints and {n_rows} completions"
        )
    mask_B_P = _prompt_mask(prompt_ids_B_P, prompt_mask_B_P)
    n_prompt, n_hint = prompt_ids_B_P.shape[1], max(len(hint) for hint in hint_ids)
    ids_B_T = completion_ids_B_C.new_full((n_rows, n_prompt + n_hint + n_completion), pad_token_id)
    ids_B_T[:, :n_prompt] = prompt_ids_B_P
    for row, hint in enumerate(hint_ids):
        start = n_prompt + len(hint)
        ids_B_T[row, n_prompt:start] = ids_B_T.new_tensor(hint)
        ids_B_T[row, start : start + n_completion] = completion_ids_B_C[row]
    first_B = torch.tensor([n_prompt + len(hint) - 1 for hint in hint_ids], device=ids_B_T.device)
    steps_C = torch.arange(n_completion, device=ids_B_T.device)
    return HintedBatch(
        _whole_blocks(ids_B_T, pad_token_id), mask_B_P, first_B[:, None] + steps_C[None, :]
    )


def student_hidden(
    model: nn.Module,
    prompt_ids_B_P: Tensor,
    completion_ids_B_C: Tensor,
    *,
    prompt_mask_B_P: Tensor | None = None,
    pad_token_id: int = 0,
) -> StudentStates:
    """The student's forward pass, with the cache that the teacher reuses.

    Gradients flow through `hidden_B_C_H`, as without a cache.

    Raises:
        ShapeError: a prompt ends in padding.
        TrainerConfigError: the model keeps no cache that can be shared.
    """
    backbone = _cacheable_backbone(model)
    mask_B_P = _prompt_mask(prompt_ids_B_P, prompt_mask_B_P)
    ids_B_T = _whole_blocks(torch.cat([prompt_ids_B_P, completion_ids_B_C], 1), pad_token_id)
    outputs = backbone(
        input_ids=ids_B_T,
        attention_mask=_attention_mask(mask_B_P, ids_B_T.shape[1]),
        past_key_values=DynamicCache(config=backbone.config),
        use_cache=True,
    )
    first, n_completion = prompt_ids_B_P.shape[1] - 1, completion_ids_B_C.shape[1]
    hidden_B_C_H = outputs.last_hidden_state[:, first : first + n_completion]
    return StudentStates(hidden_B_C_H, _checked_cache(outputs.past_key_values, first + 1))


@torch.no_grad()
def teacher_hidden(model: nn.Module, batch: HintedBatch) -> Tensor:
    """The teacher's states that predict the completion, `[B, C, H]`, by a full forward pass.

    For any teacher; `teacher_hidden_with_prefix_reuse` gives the same numbers for less.
    """
    outputs = causal_lm_of(model).base_model(
        input_ids=batch.ids_B_T,
        attention_mask=_attention_mask(batch.prompt_mask_B_P, batch.ids_B_T.shape[1]),
        use_cache=False,
    )
    return _select(outputs.last_hidden_state, batch.predictors_B_C)


@torch.no_grad()
def teacher_hidden_with_prefix_reuse(
    model: nn.Module, batch: HintedBatch, student_cache: Cache
) -> Tensor:
    """The teacher's states that predict the completion, `[B, C, H]`, on the student's cache.

    The student's cache is read, not changed; nothing of its graph is kept.

    Args:
        model: the same weights that filled `student_cache`.
        batch: its prompts are the student's, padded alike.
        student_cache: from `student_hidden`, of the same step.

    Raises:
        ShapeError: the cache holds other sequences than `batch`.
        TrainerConfigError: the model keeps no cache that can be shared.
    """
    backbone = _cacheable_backbone(model)
    n_reused, n_tokens = batch.n_reused, batch.ids_B_T.shape[1]
    outputs = backbone(
        input_ids=batch.ids_B_T[:, n_reused:],
        attention_mask=_attention_mask(batch.prompt_mask_B_P, n_tokens),
        past_key_values=_prefix_of(student_cache, batch, backbone),
        position_ids=torch.arange(n_reused, n_tokens, device=batch.ids_B_T.device)[None],
        use_cache=True,
    )
    return _select(outputs.last_hidden_state, batch.predictors_B_C - n_reused)


def _select(hidden_B_T_H: Tensor, index_B_C: Tensor) -> Tensor:
    rows_B_1 = torch.arange(len(hidden_B_T_H), device=hidden_B_T_H.device)[:, None]
    return hidden_B_T_H[rows_B_1, index_B_C]


def _prefix_of(cache: Cache, batch: HintedBatch, backbone: PreTrainedModel) -> Cache:
    _checked_cache(cache, at_least=batch.n_prompt)
    prefix = DynamicCache(config=backbone.config)
    for layer_idx, layer in enumerate(cache.layers):
        if len(layer.keys) != len(batch.ids_B_T):
            raise ShapeError(
                f"the student's cache holds {len(layer.keys)} sequences, the batch "
                f"{len(batch.ids_B_T)}"
            )
        if batch.n_reused:
            keys, values = (
                states.detach()[:, :, : batch.n_reused] for states in (layer.keys, layer.values)
            )
            prefix.update(keys, values, layer_idx)
    return prefix


def _cacheable_backbone(model: nn.Module) -> PreTrainedModel:
    causal_lm = causal_lm_of(model)
    is_checkpointing = any(
        getattr(module, "gradient_checkpointing", False) for module in causal_lm.modules()
    )
    if is_checkpointing and causal_lm.training:
        raise TrainerConfigError(
            f"{type(causal_lm).__name__}: activation checkpointing drops the key-value cache, so "
            "the teacher cannot reuse the student's prefix. Switch one of the two off "
            "(gradient_checkpointing=False, or the teacher's full forward pass)."
        )
    return causal_lm.base_model


def _checked_cache(cache: Cache | None, at_least: int) -> Cache:
    if cache is None:
        raise TrainerConfigError(
            "the model returned no key-value cache: it does not support use_cache, so the "
            "teacher cannot reuse the student's prefix. Use the teacher's full forward pass."
        )
    layers = getattr(cache, "layers", [])
    is_partial = [getattr(layer, "is_sliding", True) for layer in layers]
    if not layers or any(is_partial):
        raise TrainerConfigError(
            f"the model's {type(cache).__name__} keeps only a window or a running state in some "
            "layers, so a prefix cannot be cut from it. Use the teacher's full forward pass."
        )
    if cache.get_seq_length() < at_least:
        raise ShapeError(
            f"the student's cache holds {cache.get_seq_length()} tokens, {at_least} are needed"
        )
    return cache


def _prompt_mask(ids_B_P: Tensor, mask_B_P: Tensor | None) -> Tensor:
    if mask_B_P is None:
        return torch.ones_like(ids_B_P, dtype=torch.bool)
    if not bool(mask_B_P[:, -1].all()):
        raise ShapeError("a prompt ends in padding: pad prompts on the left")
    return mask_B_P.bool()


def _attention_mask(prompt_mask_B_P: Tensor, n_tokens: int) -> Tensor | None:
    # Padding on the right comes after every real token, which therefore never sees it.
    if bool(prompt_mask_B_P.all()):
        return None
    return F.pad(prompt_mask_B_P, (0, n_tokens - prompt_mask_B_P.shape[1]), value=True).long()


def _whole_blocks(ids_B_T: Tensor, pad_token_id: int) -> Tensor:
    return F.pad(ids_B_T, (0, -ids_B_T.shape[1] % BLOCK), value=pad_token_id)
