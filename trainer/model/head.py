"""Compute the language-model head and its losses in one pass, without the logits of a batch.

The logits of a batch, `N x V`, are the largest tensor of a training step. Here they exist for only
one chunk of tokens at a time. The policy loss and the distillation share one projection of the
student. All normalizers are local to a token, so the gradient of a chunk is known right after its
projection, and nothing is recomputed.

Two modes give the same numbers:

- `"fused"`: the policy loss of a chunk depends on that chunk's log-probabilities only (every
  token-level objective). The gradient is formed in the forward pass. Four products of size `N x V x
  H` with a teacher, three without. - `"recompute"`: the loss may mix tokens (sequence-level ratios,
  entropy bonus, preference sums). Log-probabilities, entropies, and divergences are differentiable,
  and the backward pass projects each chunk again. Six products with a teacher, four without.

Shapes: `N` tokens, `C` tokens of one chunk, `R` tokens of one block of rows, `H` hidden, `V`
vocabulary. Row `n` of `hidden_N_H` is the state that predicts `target_ids_N[n]`.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainer.errors import ShapeError, TrainerConfigError
from trainer.model.logit_tile import (
    LogitRule,
    TeacherHead,
    TilePlan,
    TokenGradients,
    backend_for,
    slices,
)

__all__ = [
    "FusedOutput",
    "HeadMode",
    "HeadOutput",
    "PolicyLoss",
    "fused_policy_distillation",
    "head_outputs",
]

HeadMode = Literal["fused", "recompute"]

PolicyLoss = Callable[[Tensor, slice], Tensor]
"""A function `policy_loss(logps_C, rows)` that returns the summed, normalized loss of the tokens
`rows` with the log-probabilities `logps_C`. In `"recompute"` mode, it is called once with all
tokens."""


class FusedOutput(NamedTuple):
    """Loss and per-token statistics. In `"fused"` mode only `loss` carries a gradient."""

    loss: Tensor
    logps_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor


class HeadOutput(NamedTuple):
    """Differentiable per-token outputs of a head."""

    logps_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor


# --- sums over chunks ----------------------------------------------------------------------------


class _HeadGradients:
    """Gradients of the head's inputs, summed over chunks in 32 bits or more."""

    def __init__(
        self,
        plan: TilePlan,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        needed: tuple[bool, ...],
    ) -> None:
        self._plan, self._hidden_N_H, self._weight_V_H = plan, hidden_N_H, weight_V_H
        # What needs no gradient gets no buffer: a frozen head, as under LoRA, costs nothing here.
        self._hidden_grad = torch.empty_like(hidden_N_H) if needed[0] else None
        self._weight_grad = torch.zeros_like(weight_V_H, dtype=plan.dtype) if needed[1] else None
        self._bias_grad = None
        if needed[2] and bias_V is not None:
            self._bias_grad = torch.zeros_like(bias_V, dtype=plan.dtype)

    def add(self, rows: slice, grad_C_V: Tensor) -> None:
        backend = self._plan.backend
        if self._hidden_grad is not None:
            self._hidden_grad[rows] = backend.pull_back(grad_C_V, self._weight_V_H)
        if self._weight_grad is not None:
            backend.accumulate_(self._weight_grad, grad_C_V, self._hidden_N_H[rows])
        if self._bias_grad is not None:
            self._bias_grad += grad_C_V.sum(0)

    def totals(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # Rounded once, at the end. The 32-bit sum is let go at once: for a large vocabulary it is
        # as large as everything else together.
        dtype = self._weight_V_H.dtype
        weight_grad = None if self._weight_grad is None else self._weight_grad.to(dtype)
        self._weight_grad = None
        bias_grad = None if self._bias_grad is None else self._bias_grad.to(dtype)
        return self._hidden_grad, weight_grad, bias_grad


class _FusedHead(torch.autograd.Function):
    """Loss of all chunks; the gradients wait, ready, for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        plan: TilePlan,
        policy_loss: PolicyLoss | None,
        divergence_weights_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needed = tuple(plan.is_grad_on and need for need in ctx.needs_input_grad[:3])
        gradients = _HeadGradients(plan, hidden_N_H, weight_V_H, bias_V, needed)
        statistics_3_N = hidden_N_H.new_empty(3, len(hidden_N_H), dtype=plan.dtype)
        loss = hidden_N_H.new_zeros((), dtype=plan.dtype)
        for rows in slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            policy, logps_grad_C = _policy_gradient(policy_loss, tile.logps_C, rows)
            weights_C = None if divergence_weights_N is None else divergence_weights_N[rows]
            if any(needed):
                gradients.add(
                    rows, tile.differentiate(TokenGradients(logps_grad_C, None, weights_C))
                )
            else:
                tile.measure()
            loss += policy if weights_C is None else policy + weights_C @ tile.divergence_C
            statistics_3_N[:, rows] = tile.statistics()
            del tile  # before the next one is made
        ctx.save_for_backward(*gradients.totals())
        logps_N, entropy_N, divergence_N = statistics_3_N
        ctx.mark_non_differentiable(logps_N, entropy_N, divergence_N)
        return loss, logps_N, entropy_N, divergence_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_loss, *_) = grads
        # On CPU the usual factor 1 costs a second copy of the weight's gradient; look first.
        is_one = grad_loss.device.type == "cpu" and grad_loss.item() == 1.0
        ready = [
            grad if grad is None or is_one else grad * grad_loss.to(grad.dtype)
            for grad in ctx.saved_tensors
        ]
        return *ready, None, None, None


def _policy_gradient(
    policy_loss: PolicyLoss | None, logps_C: Tensor, rows: slice
) -> tuple[Tensor, Tensor | None]:
    if policy_loss is None:
        return logps_C.new_zeros(()), None
    # Inside a `Function` gradients are off; the policy loss is any code, so autograd derives it, on
    # a leaf of its own: nothing of the caller's graph hangs on it.
    with torch.enable_grad():
        leaf_C = logps_C.detach().requires_grad_()
        loss = policy_loss(leaf_C, rows)
        if not loss.requires_grad:
            return loss, None
        (grad_C,) = torch.autograd.grad(loss, leaf_C, materialize_grads=True)
    return loss.detach(), grad_C


class _RecomputeHead(torch.autograd.Function):
    """Differentiable log-probabilities, entropies and divergences; chunks are projected twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        plan: TilePlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics_3_N = hidden_N_H.new_empty(3, len(hidden_N_H), dtype=plan.dtype)
        for rows in slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            tile.measure()
            statistics_3_N[:, rows] = tile.statistics()
        ctx.save_for_backward(hidden_N_H, weight_V_H, bias_V)
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # an output that nothing reads costs no product
        logps_N, entropy_N, divergence_N = (row.clone() for row in statistics_3_N)
        return logps_N, entropy_N, divergence_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Any) -> Any:
        hidden_N_H, weight_V_H, bias_V = ctx.saved_tensors
        plan: TilePlan = ctx.plan
        needed = ctx.needs_input_grad[:3]
        gradients = _HeadGradients(plan, hidden_N_H, weight_V_H, bias_V, needed)
        for rows in slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            token_gradients = TokenGradients(*(None if g is None else g[rows] for g in grads_N))
            gradients.add(rows, tile.differentiate(token_gradients))
            del tile  # before the next one is made
        return *gradients.totals(), None


# --- public --------------------------------------------------------------------------------------


def head_outputs(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    bias_V: Tensor | None = None,
    *,
    target_ids_N: Tensor,
    teacher_hidden_N_H: Tensor | None = None,
    teacher_weight_V_H: Tensor | None = None,
    teacher_bias_V: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> HeadOutput:
    """Compute differentiable log-probability, entropy, and divergence from the teacher, for each token.

    Any loss can follow, even one that first sums over a sequence. The backward pass projects each
    chunk again. The teacher never gets a gradient. Without a teacher, `divergence_N` is zero. The
    arguments are those of `fused_policy_distillation`.

    Raises:
        ShapeError: two inputs do not line up.
        TrainerConfigError: `beta`, `temperature`, `softcap` or `chunk` is out of range.
    """
    plan = _plan(
        hidden_N_H,
        weight_V_H,
        target_ids_N,
        _teacher(weight_V_H, bias_V, teacher_hidden_N_H, teacher_weight_V_H, teacher_bias_V),
        beta,
        LogitRule(logit_scale, softcap, temperature),
        chunk,
    )
    hidden_N_H, weight_V_H, bias_V = _in_one_dtype(hidden_N_H, weight_V_H, bias_V)
    with _own_precision(hidden_N_H.device):
        return HeadOutput(*_RecomputeHead.apply(hidden_N_H, weight_V_H, bias_V, plan))


def fused_policy_distillation(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    bias_V: Tensor | None = None,
    *,
    target_ids_N: Tensor,
    policy_loss: PolicyLoss | None = None,
    teacher_hidden_N_H: Tensor | None = None,
    teacher_weight_V_H: Tensor | None = None,
    teacher_bias_V: Tensor | None = None,
    divergence_weights_N: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    mode: HeadMode = "fused",
) -> FusedOutput:
    """Compute policy loss plus weighted distillation from hidden states, without the logits of a batch.

    `loss = policy_loss(logps_N) + sum(divergence_weights_N * divergence_N)`, where the divergence
    is the generalized Jensen-Shannon divergence of the two next-token distributions.

    Args:
        hidden_N_H: the student's states. Row n predicts `target_ids_N[n]`.
        weight_V_H: the student's head, trainable or frozen.
        bias_V: the head's bias.
        target_ids_N: the target tokens.
        policy_loss: see `PolicyLoss`. `None` turns the channel off.
        teacher_hidden_N_H: the teacher's states at the same tokens. `None` turns the channel off.
        teacher_weight_V_H: the teacher's head. By default, the student's own, detached.
        teacher_bias_V: the bias of `teacher_weight_V_H`.
        divergence_weights_N: weight of each token's divergence (mask, channel weight, and
            normalizer in one). By default, 1/N each.
        beta: 0 gives the forward KL(teacher || student), 1 the reverse KL, and values between them
            the JSD.
        temperature: both models' logits are divided by it.
        logit_scale: factor on both models' projections.
        softcap: both models' logits are capped by `softcap * tanh(logits / softcap)`.
        chunk: tokens whose logits exist at once. By default, the device decides.
        mode: `"recompute"` for a policy loss that mixes tokens of different chunks.

    Raises:
        ShapeError: two inputs do not line up.
        TrainerConfigError: `beta`, `temperature`, `softcap`, `chunk` or `mode` is out of range.
    """
    teacher = _teacher(weight_V_H, bias_V, teacher_hidden_N_H, teacher_weight_V_H, teacher_bias_V)
    rule = LogitRule(logit_scale, softcap, temperature)
    plan = _plan(hidden_N_H, weight_V_H, target_ids_N, teacher, beta, rule, chunk)
    weights_N = _divergence_weights(divergence_weights_N, plan)
    hidden_N_H, weight_V_H, bias_V = _in_one_dtype(hidden_N_H, weight_V_H, bias_V)
    with _own_precision(hidden_N_H.device):
        if mode == "fused":
            given = (hidden_N_H, weight_V_H, bias_V, plan, policy_loss, weights_N)
            return FusedOutput(*_FusedHead.apply(*given))
        if mode == "recompute":
            outputs = HeadOutput(*_RecomputeHead.apply(hidden_N_H, weight_V_H, bias_V, plan))
            return FusedOutput(_total(outputs, policy_loss, weights_N), *outputs)
    raise TrainerConfigError(f"mode={mode!r}: use 'fused' or 'recompute'")


def _own_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off where there is such a thing: the head chooses its own precision."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _total(outputs: HeadOutput, policy_loss: PolicyLoss | None, weights_N: Tensor | None) -> Tensor:
    # Zero times a sum keeps the graph whole when a channel is off.
    loss = outputs.logps_N.sum() * 0.0
    if policy_loss is not None:
        loss = loss + policy_loss(outputs.logps_N, slice(0, len(outputs.logps_N)))
    return loss if weights_N is None else loss + weights_N @ outputs.divergence_N


def _teacher(
    weight_V_H: Tensor,
    bias_V: Tensor | None,
    teacher_hidden_N_H: Tensor | None,
    teacher_weight_V_H: Tensor | None,
    teacher_bias_V: Tensor | None,
) -> TeacherHead | None:
    if teacher_hidden_N_H is None:
        return None
    if teacher_weight_V_H is None:
        teacher_weight_V_H, teacher_bias_V = weight_V_H, bias_V
    bias_V = None if teacher_bias_V is None else teacher_bias_V.detach()
    return TeacherHead(teacher_hidden_N_H.detach(), teacher_weight_V_H.detach(), bias_V)


def _divergence_weights(weights_N: Tensor | None, plan: TilePlan) -> Tensor | None:
    n_tokens = len(plan.target_ids_N)
    if plan.teacher is None:
        return None
    if weights_N is None:
        return plan.teacher.hidden_N_H.new_full((n_tokens,), 1 / max(n_tokens, 1), dtype=plan.dtype)
    if weights_N.shape != (n_tokens,):
        raise ShapeError(
            f"divergence_weights_N has shape {tuple(weights_N.shape)}, expected ({n_tokens},)"
        )
    return weights_N.detach().to(plan.dtype)


def _plan(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    target_ids_N: Tensor,
    teacher: TeacherHead | None,
    beta: float,
    rule: LogitRule,
    chunk: int | None,
) -> TilePlan:
    _check_range(beta, rule, chunk)
    _check_head("student", hidden_N_H, weight_V_H, target_ids_N)
    if teacher is not None:
        _check_head("teacher", teacher.hidden_N_H, teacher.weight_V_H, target_ids_N)
        if len(teacher.weight_V_H) != len(weight_V_H):
            raise ShapeError(
                f"the vocabularies differ: student {len(weight_V_H)}, teacher "
                f"{len(teacher.weight_V_H)}; distillation needs one tokenizer"
            )
    backend = backend_for(hidden_N_H.device)
    dtype = torch.promote_types(hidden_N_H.dtype, torch.float32)
    return TilePlan(
        target_ids_N,
        teacher,
        beta,
        rule,
        backend,
        chunk or backend.chunk,
        dtype,
        torch.is_grad_enabled(),
    )


def _check_range(beta: float, rule: LogitRule, chunk: int | None) -> None:
    if not 0.0 <= beta <= 1.0:
        raise TrainerConfigError(f"beta={beta}: must lie in [0, 1]")
    if rule.temperature <= 0.0:
        raise TrainerConfigError(f"temperature={rule.temperature}: must be greater than 0")
    if rule.softcap is not None and rule.softcap <= 0.0:
        raise TrainerConfigError(f"softcap={rule.softcap}: must be greater than 0, or None")
    if chunk is not None and chunk < 1:
        raise TrainerConfigError(f"chunk={chunk}: must be at least 1 token")


def _check_head(who: str, hidden_N_H: Tensor, weight_V_H: Tensor, target_ids_N: Tensor) -> None:
    if hidden_N_H.ndim != 2 or weight_V_H.ndim != 2:
        raise ShapeError(
            f"{who}: hidden states must be [tokens, hidden] and the head [vocabulary, hidden], "
            f"not {tuple(hidden_N_H.shape)} and {tuple(weight_V_H.shape)}"
        )
    if hidden_N_H.shape[1] != weight_V_H.shape[1]:
        raise ShapeError(
            f"{who}: hidden states have width {hidden_N_H.shape[1]}, the head {weight_V_H.shape[1]}"
        )
    if target_ids_N.shape != hidden_N_H.shape[:1]:
        raise ShapeError(
            f"{who}: {hidden_N_H.shape[0]} hidden states for target ids of shape "
            f"{tuple(target_ids_N.shape)}"
        )


def _in_one_dtype(
    hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Multiply in the narrower type on CUDA where autocast gives a 32-bit head 16-bit states."""
    if hidden_N_H.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return hidden_N_H.to(dtype), weight_V_H.to(dtype), bias_V
    return hidden_N_H, weight_V_H, bias_V
