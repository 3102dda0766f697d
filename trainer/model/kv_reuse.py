"""Run the hint-conditioned teacher on the student's own key-value cache.

The self-teacher is the student that has also seen a hint. If the hint is at the *end* of the
context, `prompt + hint + completion`, both share the prompt. Causal attention then gives the prompt
the same keys and values in both. So the teacher only runs the hint and the completion, a small part
of the forward pass for a long agent prompt. A hint before the prompt, or a teacher with other
weights (EMA, base model), shares nothing: use `teacher_hidden`.

Keep batches on the CPU, wherever the model is. The alignment is computed there, and each pass moves
the tensors that it needs. On the device, the host would wait for every comparison.

Shapes: `B` sequences, `P` prompt tokens (padded on the left), `C` completion tokens (padded on the
right), `T` all tokens of the longest sequence, in whole blocks, `H` hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from trainer.errors import ShapeError, TrainerConfigError
from trainer.model.causal_lm import causal_lm_of
from trainer.model.tree_layout import common_prefix

BLOCK = 64
"""Forward passes run whole blocks of this many tokens. Matrix kernels process incomplete blocks in
another order, so without this the two ways to compute the teacher's states would differ in the last
digit."""

__all__ = [
    "HintedBatch",
    "StudentStates",
    "hinted_batch",
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
    """Hinted prompt and completion of each sequence, aligned with the student's batch.

    Made by `hinted_batch`.
    """

    ids_B_T: Tensor
    prompt_mask_B_P: Tensor
    """False at the padding on the left. Everything after column `P` is attended to."""
    predictors_B_C: Tensor
    """Index in `ids_B_T` of the token that predicts each completion token."""
    n_shared: int
    """Number of leading columns that come from the student."""

    @property
    def n_tokens(self) -> int:
        """Return the length of every row, in whole blocks."""
        return self.ids_B_T.shape[1]

    @property
    def n_reused(self) -> int:
        """Return the number of columns whose keys and values can come from the student, in whole blocks."""
        # The token before the completion runs again in any case: its state is the first that is
        # asked for, and a cache holds keys and values but no states.
        n_usable = min(self.n_shared, int(self.predictors_B_C.min()))
        return n_usable // BLOCK * BLOCK


def hinted_batch(
    prompt_ids_B_P: Tensor,
    hinted_prompts: Sequence[Sequence[int]],
    completion_ids_B_C: Tensor,
    *,
    prompt_mask_B_P: Tensor | None = None,
    pad_token_id: int = 0,
) -> HintedBatch:
    """Build the teacher's batch, with each prompt's shared tokens in the student's columns.

    Args:
        prompt_ids_B_P: the student's prompts, padded on the left.
        hinted_prompts: the same prompts with the hint, without padding. Everything after the first
            difference (the hint, the start of the answer) runs again. A row without a hint has its
            plain prompt here.
        completion_ids_B_C: the student's completions, padded on the right.
        prompt_mask_B_P: false at the padding of `prompt_ids_B_P`.
        pad_token_id: id of the padding.

    Raises:
        ShapeError: the rows don't match, or a prompt ends in padding.
    """
    n_rows, n_completion = completion_ids_B_C.shape
    if len(prompt_ids_B_P) != n_rows or len(hinted_prompts) != n_rows:
        raise ShapeError(
            f"{len(prompt_ids_B_P)} prompts, {len(hinted_prompts)} hinted prompts and {n_rows} "
            "completions"
        )
    mask_B_P = _prompt_mask(prompt_ids_B_P, prompt_mask_B_P)
    n_pads = (~mask_B_P).sum(1).tolist()
    starts = [n_pad + len(prompt) for n_pad, prompt in zip(n_pads, hinted_prompts, strict=True)]
    ids_B_T = completion_ids_B_C.new_full((n_rows, max(starts) + n_completion), pad_token_id)
    n_shared = ids_B_T.shape[1]
    for row, (n_pad, prompt, start) in enumerate(zip(n_pads, hinted_prompts, starts, strict=True)):
        ids_B_T[row, n_pad:start] = ids_B_T.new_tensor(prompt)
        ids_B_T[row, start : start + n_completion] = completion_ids_B_C[row]
        n_common = common_prefix(prompt_ids_B_P[row, n_pad:].tolist(), list(prompt))
        n_shared = min(n_shared, n_pad + n_common)
    first_B = torch.tensor(starts, device=ids_B_T.device) - 1
    steps_C = torch.arange(n_completion, device=ids_B_T.device)
    return HintedBatch(
        ids_B_T=_whole_blocks(ids_B_T, pad_token_id),
        prompt_mask_B_P=mask_B_P,
        predictors_B_C=first_B[:, None] + steps_C[None, :],
        n_shared=n_shared,
    )


def student_hidden(
    model: nn.Module,
    prompt_ids_B_P: Tensor,
    completion_ids_B_C: Tensor,
    *,
    prompt_mask_B_P: Tensor | None = None,
    pad_token_id: int = 0,
    n_tokens: int = 0,
) -> StudentStates:
    """Run the student's forward pass, with the cache that the teacher reuses.

    Gradients flow through `hidden_B_C_H`, as without a cache. `n_tokens=batch.n_tokens` pads the
    student's sequences on the right to the teacher's length. Kernels then run the same shapes in
    both, and the reused states equal the teacher's own to the last bit.

    Raises:
        ShapeError: a prompt ends in padding.
        TrainerConfigError: the model keeps no cache that can be shared.
    """
    backbone = _cacheable_backbone(model)
    config = causal_lm_of(model).config
    mask_B_P = _prompt_mask(prompt_ids_B_P, prompt_mask_B_P)
    ids_B_T = torch.cat([prompt_ids_B_P, completion_ids_B_C], 1)
    ids_B_T = _whole_blocks(ids_B_T, pad_token_id, n_tokens)
    outputs = backbone(
        input_ids=_moved(ids_B_T, model),
        attention_mask=_attention_mask(mask_B_P, ids_B_T.shape[1], model),
        past_key_values=DynamicCache(config=config),
        use_cache=True,
    )
    first, n_completion = prompt_ids_B_P.shape[1] - 1, completion_ids_B_C.shape[1]
    hidden_B_C_H = outputs.last_hidden_state[:, first : first + n_completion]
    return StudentStates(hidden_B_C_H, _checked_cache(outputs.past_key_values, first + 1))


@torch.no_grad()
def teacher_hidden(model: nn.Module, batch: HintedBatch) -> Tensor:
    """Compute the teacher's states before the completion, `[B, C, H]`, by a full forward pass.

    This works for any teacher. `teacher_hidden_with_prefix_reuse` computes the same numbers faster.
    """
    outputs = causal_lm_of(model).base_model(
        input_ids=_moved(batch.ids_B_T, model),
        attention_mask=_attention_mask(batch.prompt_mask_B_P, batch.n_tokens, model),
        use_cache=False,
    )
    return _select(outputs.last_hidden_state, batch.predictors_B_C)


@torch.no_grad()
def teacher_hidden_with_prefix_reuse(
    model: nn.Module, batch: HintedBatch, student_cache: Cache
) -> Tensor:
    """Compute the teacher's states before the completion, `[B, C, H]`, on the student's cache.

    The student's cache is only read, and its graph isn't kept.

    Args:
        model: model with the weights that filled `student_cache`.
        batch: batch with the student's prompts, padded in the same way.
        student_cache: from `student_hidden`, of the same step.

    Raises:
        ShapeError: the cache has other sequences than `batch`.
        TrainerConfigError: the model keeps no cache that can be shared.
    """
    backbone = _cacheable_backbone(model)
    n_reused, n_tokens = batch.n_reused, batch.n_tokens
    ids_B_T = _moved(batch.ids_B_T[:, n_reused:], model)
    outputs = backbone(
        input_ids=ids_B_T,
        attention_mask=_attention_mask(batch.prompt_mask_B_P, n_tokens, model),
        past_key_values=_prefix_of(student_cache, batch),
        # Columns, not real tokens: the student ran with padding counted, and rotary keys carry
        # the position that they were made at.
        position_ids=torch.arange(n_reused, n_tokens, device=ids_B_T.device)[None],
        use_cache=True,
    )
    return _select(outputs.last_hidden_state, batch.predictors_B_C - n_reused)


def _select(hidden_B_T_H: Tensor, index_B_C: Tensor) -> Tensor:
    rows_B_1 = torch.arange(len(hidden_B_T_H), device=hidden_B_T_H.device)[:, None]
    return hidden_B_T_H[rows_B_1, index_B_C.to(hidden_B_T_H.device, non_blocking=True)]


def _moved(values: Tensor, model: nn.Module) -> Tensor:
    return values.to(next(model.parameters()).device, non_blocking=True)


def _prefix_of(cache: Cache, batch: HintedBatch) -> Cache:
    _checked_cache(cache, at_least=batch.n_reused)
    # A new cache on views of the old one: the teacher appends to its own, and the student's graph
    # is cut by the detached views.
    prefix = DynamicCache()
    layers: list[Any] = cache.layers
    for layer_idx, layer in enumerate(layers):
        keys, values = layer.keys, layer.values
        if len(keys) != len(batch.ids_B_T):
            raise ShapeError(
                f"the student's cache has {len(keys)} sequences, but the batch has {len(batch.ids_B_T)}"
            )
        if n_reused := batch.n_reused:
            keys, values = keys.detach()[:, :, :n_reused], values.detach()[:, :, :n_reused]
            prefix.update(keys, values, layer_idx)
    return prefix


def _cacheable_backbone(model: nn.Module) -> nn.Module:
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
            f"the student's cache has {cache.get_seq_length()} tokens, but {at_least} are needed"
        )
    return cache


def _prompt_mask(ids_B_P: Tensor, mask_B_P: Tensor | None) -> Tensor:
    if mask_B_P is None:
        return torch.ones_like(ids_B_P, dtype=torch.bool)
    if not bool(mask_B_P[:, -1].all()):
        raise ShapeError("a prompt ends in padding: pad prompts on the left")
    return mask_B_P.bool()


def _attention_mask(prompt_mask_B_P: Tensor, n_tokens: int, model: nn.Module) -> Tensor | None:
    # Padding on the right comes after every real token, which therefore never sees it.
    if bool(prompt_mask_B_P.all()):
        return None
    mask_B_T = F.pad(prompt_mask_B_P, (0, n_tokens - prompt_mask_B_P.shape[1]), value=True)
    return _moved(mask_B_T.long(), model)


def _whole_blocks(ids_B_T: Tensor, pad_token_id: int, n_tokens: int = 0) -> Tensor:
    n_given = ids_B_T.shape[1]
    n_blocks = -(-max(n_given, n_tokens) // BLOCK)
    return F.pad(ids_B_T, (0, n_blocks * BLOCK - n_given), value=pad_token_id)
