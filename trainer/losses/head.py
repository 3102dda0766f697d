"""The language-model head and the losses behind it in one pass, without the logits of a batch.

The logits of a batch, `N x V`, are the largest tensor of a training step. Here they exist for one
chunk of tokens at a time. One projection of the student serves the policy loss and the
distillation, and each of the student's and the teacher's normalizers is local to a token, so the
gradient of a chunk is known as soon as the chunk has been projected: nothing is recomputed.

Two modes, the same numbers:

- `"fused"`: the policy loss of a chunk depends on that chunk's log-probabilities only (every
  token-level objective). The gradient is formed in the forward pass. Four products of size
  `N x V x H` with a teacher, three without.
- `"recompute"`: the loss may mix tokens (sequence-level ratios, entropy bonus, preference sums).
  Log-probabilities, entropies and divergences come back differentiable; the backward pass
  projects each chunk again. Six products with a teacher, four without.

Shapes: `N` tokens, `C` tokens of one chunk, `R` tokens of one block of rows, `H` hidden, `V`
vocabulary. Row `n` of `hidden_N_H` is the state that predicts `target_ids_N[n]`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ShapeError, TrainerConfigError

__all__ = [
    "FusedOutput",
    "HeadMode",
    "HeadOutput",
    "PolicyLoss",
    "fused_policy_distillation",
    "head_outputs",
    "reference_policy_distillation",
]

HeadMode = Literal["fused", "recompute"]

PolicyLoss = Callable[[Tensor, slice], Tensor]
"""`policy_loss(logps_C, rows)`: the summed, already normalized loss of the tokens `rows`, whose
log-probabilities are `logps_C`. In `"recompute"` mode it is called once, with all tokens."""


class FusedOutput(NamedTuple):
    """Loss and per-token statistics. In `"fused"` mode only `loss` carries a gradient."""

    loss: Tensor
    logps_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor


class HeadOutput(NamedTuple):
    """Per-token outputs of a head, each of them differentiable."""

    logps_N: Tensor
    entropy_N: Tensor
    divergence_N: Tensor


# --- how a device multiplies ---------------------------------------------------------------------


class _Backend(Protocol):
    chunk: int
    """Tokens whose logits exist at once."""
    rows: int
    """Tokens whose temporaries exist at once."""

    def project(self, hidden_C_H: Tensor, weight_V_H: Tensor, dtype: torch.dtype) -> Tensor: ...

    def pull_back(self, grad_C_V: Tensor, weight_V_H: Tensor) -> Tensor: ...

    def accumulate_(self, total_V_H: Tensor, grad_C_V: Tensor, hidden_C_H: Tensor) -> None: ...


class _PortableBackend:
    """CPU and any device that has only plain products.

    Blocks of four rows keep the element-wise work in the processor's cache. Half-precision weights
    are widened a block of columns at a time, so that logits are never rounded to 16 bits.
    """

    chunk = 256
    rows = 4
    _columns = 8192

    def project(self, hidden_C_H: Tensor, weight_V_H: Tensor, dtype: torch.dtype) -> Tensor:
        hidden_C_H = hidden_C_H.to(dtype)
        if weight_V_H.dtype == dtype:
            return hidden_C_H @ weight_V_H.t()
        logits_C_V = hidden_C_H.new_empty(len(hidden_C_H), len(weight_V_H))
        for columns in _slices(len(weight_V_H), self._columns):
            block_H_K = weight_V_H[columns].to(dtype).t()
            torch.mm(hidden_C_H, block_H_K, out=logits_C_V[:, columns])
        return logits_C_V

    def pull_back(self, grad_C_V: Tensor, weight_V_H: Tensor) -> Tensor:
        return grad_C_V.to(weight_V_H.dtype) @ weight_V_H

    def accumulate_(self, total_V_H: Tensor, grad_C_V: Tensor, hidden_C_H: Tensor) -> None:
        total_V_H.addmm_(grad_C_V.t(), hidden_C_H.to(total_V_H.dtype))


class _CudaBackend:
    """CUDA: 16-bit products that accumulate and return 32 bits (torch 2.8 or newer), no Triton."""

    chunk = 1024
    rows = 256

    def project(self, hidden_C_H: Tensor, weight_V_H: Tensor, dtype: torch.dtype) -> Tensor:
        hidden_C_H = hidden_C_H.to(weight_V_H.dtype)
        if weight_V_H.dtype == dtype:
            return hidden_C_H @ weight_V_H.t()
        return torch.mm(hidden_C_H, weight_V_H.t(), out_dtype=dtype)

    def pull_back(self, grad_C_V: Tensor, weight_V_H: Tensor) -> Tensor:
        return grad_C_V.to(weight_V_H.dtype) @ weight_V_H

    def accumulate_(self, total_V_H: Tensor, grad_C_V: Tensor, hidden_C_H: Tensor) -> None:
        # A product rounded to 16 bits before it is added biases the sum: entropy drifts down.
        if hidden_C_H.dtype == total_V_H.dtype:
            total_V_H.addmm_(grad_C_V.t(), hidden_C_H)
            return
        grad_V_C = grad_C_V.to(hidden_C_H.dtype).t()
        torch.addmm(total_V_H, grad_V_C, hidden_C_H, out_dtype=total_V_H.dtype, out=total_V_H)


def _backend_for(device: torch.device) -> _Backend:
    return _CudaBackend() if device.type == "cuda" else _PortableBackend()


def _slices(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


# --- one pass over a chunk -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LogitRule:
    """From projection to logits: scale, soft cap, temperature."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits_C_V: Tensor) -> Tensor:
        factor = self.scale / (self.softcap or self.temperature)
        if factor != 1.0:
            logits_C_V.mul_(factor)
        if self.softcap is not None:
            logits_C_V.tanh_().mul_(self.softcap / self.temperature)
        return logits_C_V

    def pull_back_(self, grad_R_V: Tensor, logits_R_V: Tensor) -> Tensor:
        if self.softcap is not None:
            tanh_R_V = logits_R_V * (self.temperature / self.softcap)
            grad_R_V.addcmul_(grad_R_V, tanh_R_V.square_(), value=-1.0)
        factor = self.scale / self.temperature
        return grad_R_V if factor == 1.0 else grad_R_V.mul_(factor)


@dataclass(frozen=True, slots=True, eq=False)
class _Teacher:
    hidden_N_H: Tensor
    weight_V_H: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What one pass needs beside the tensors that get a gradient."""

    target_ids_N: Tensor
    teacher: _Teacher | None
    beta: float
    rule: _LogitRule
    backend: _Backend
    chunk: int
    dtype: torch.dtype
    """Type of logits and sums: float32, or float64 when the inputs are float64."""
    is_grad_on: bool
    """Whether a backward pass can follow; inside a `Function` torch always says no."""

    def logits(
        self, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, rows: slice
    ) -> Tensor:
        logits_C_V = self.backend.project(hidden_N_H[rows], weight_V_H, self.dtype)
        if bias_V is not None:
            logits_C_V += bias_V
        return self.rule.apply_(logits_C_V)

    def tile(
        self, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, rows: slice
    ) -> "_Tile":
        logits_C_V = self.logits(hidden_N_H, weight_V_H, bias_V, rows)
        teacher_logits_C_V = None
        if self.teacher is not None:
            teacher = self.teacher
            teacher_logits_C_V = self.logits(
                teacher.hidden_N_H, teacher.weight_V_H, teacher.bias_V, rows
            )
        return _Tile(self, self.target_ids_N[rows], logits_C_V, teacher_logits_C_V)


@dataclass(frozen=True, slots=True, eq=False)
class _TokenGradients:
    """Derivative of the loss with respect to each per-token output; `None`: zero."""

    logps_C: Tensor | None = None
    entropy_C: Tensor | None = None
    divergence_C: Tensor | None = None


class _Tile:
    """The logits of one chunk of tokens, and what can be read from them."""

    def __init__(
        self,
        plan: _Plan,
        target_ids_C: Tensor,
        logits_C_V: Tensor,
        teacher_logits_C_V: Tensor | None,
    ) -> None:
        self._plan = plan
        self._target_ids_C_1 = target_ids_C[:, None]
        self._logits_C_V = logits_C_V
        self._teacher_logits_C_V = teacher_logits_C_V
        self._norm_C_1 = self._normalizer(logits_C_V)
        self.logps_C = (logits_C_V.gather(-1, self._target_ids_C_1) - self._norm_C_1)[:, 0]
        self.entropy_C = torch.empty_like(self.logps_C)
        self.divergence_C = torch.zeros_like(self.logps_C)

    def statistics(self) -> Tensor:
        """`logps_C`, `entropy_C` and `divergence_C`, stacked."""
        return torch.stack([self.logps_C, self.entropy_C, self.divergence_C])

    def _blocks(self) -> Iterator[slice]:
        return _slices(len(self._logits_C_V), self._plan.backend.rows)

    def _normalizer(self, logits_C_V: Tensor) -> Tensor:
        norm_C_1 = logits_C_V.new_empty(len(logits_C_V), 1)
        for rows in self._blocks():
            torch.logsumexp(logits_C_V[rows], -1, keepdim=True, out=norm_C_1[rows])
        return norm_C_1

    def measure(self) -> None:
        """Fill `entropy_C` and `divergence_C`."""
        for rows in self._blocks():
            self._measure_rows(rows)

    def differentiate(self, gradients: _TokenGradients) -> Tensor:
        """Fill the statistics, and turn the logits, in place, into their own gradient."""
        for rows in self._blocks():
            probs_R_V, logps_R_V, slope_R_V = self._measure_rows(rows)
            grad_R_V = self._gradient_rows(rows, gradients, probs_R_V, logps_R_V, slope_R_V)
            logits_R_V = self._logits_C_V[rows]
            logits_R_V.copy_(self._plan.rule.pull_back_(grad_R_V, logits_R_V))
        self._teacher_logits_C_V = None  # the products that follow need the room
        return self._logits_C_V

    def _measure_rows(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        logps_R_V = _log_probs(self._logits_C_V[rows], self._norm_C_1[rows])
        probs_R_V = logps_R_V.exp()
        self.entropy_C[rows] = -(probs_R_V * logps_R_V).sum(-1)
        if self._teacher_logits_C_V is None:
            return probs_R_V, logps_R_V, None
        teacher_R_V = self._teacher_logits_C_V[rows]
        teacher_norm_R_1 = torch.logsumexp(teacher_R_V, -1, keepdim=True)
        self.divergence_C[rows], slope_R_V = _jsd_and_slope(
            logps_R_V, probs_R_V, _log_probs(teacher_R_V, teacher_norm_R_1), self._plan.beta
        )
        return probs_R_V, logps_R_V, slope_R_V

    def _gradient_rows(
        self,
        rows: slice,
        gradients: _TokenGradients,
        probs_R_V: Tensor,
        logps_R_V: Tensor,
        slope_R_V: Tensor | None,
    ) -> Tensor:
        if slope_R_V is None or gradients.divergence_C is None:
            grad_R_V = torch.zeros_like(probs_R_V)
        else:
            grad_R_V = slope_R_V.mul_(gradients.divergence_C[rows, None])
        if gradients.entropy_C is not None:
            # d entropy / d z = -p (log p + entropy)
            weight_R_1 = gradients.entropy_C[rows, None]
            logps_R_V.add_(self.entropy_C[rows, None]).mul_(weight_R_1)
            grad_R_V.addcmul_(probs_R_V, logps_R_V, value=-1.0)
        if gradients.logps_C is not None:
            # d log p[target] / d z = onehot(target) - p
            weight_R_1 = gradients.logps_C[rows, None]
            grad_R_V.addcmul_(probs_R_V, weight_R_1, value=-1.0)
            grad_R_V.scatter_add_(-1, self._target_ids_C_1[rows], weight_R_1)
        return grad_R_V


def _log_probs(logits_R_V: Tensor, norm_R_1: Tensor) -> Tensor:
    """Log-probabilities, with the lowest number for an impossible token, so that 0 * log 0 = 0."""
    return (logits_R_V - norm_R_1).clamp_(min=torch.finfo(logits_R_V.dtype).min)


def _jsd_and_slope(
    logps_R_V: Tensor, probs_R_V: Tensor, teacher_logps_R_V: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Generalized Jensen-Shannon divergence per token, and its derivative by the student's logits.

    With `m = (1 - beta) p + beta q`: `beta KL(q || m) + (1 - beta) KL(p || m)`; at 0 it is the
    forward `KL(q || p)`, at 1 the reverse `KL(p || q)`.

    Source: Agarwal et al. 2024, arXiv:2306.13649, eq. 1 and 2; derivative worked out from it.
    """
    if beta == 1.0:
        return _kl_and_slope(logps_R_V, probs_R_V, teacher_logps_R_V)
    teacher_probs_R_V = teacher_logps_R_V.exp()
    if beta == 0.0:
        gap_R_V = teacher_logps_R_V.sub_(logps_R_V)
        return (teacher_probs_R_V * gap_R_V).sum(-1), probs_R_V - teacher_probs_R_V
    mixture_R_V = torch.lerp(probs_R_V, teacher_probs_R_V, beta)
    mixture_R_V.clamp_(min=torch.finfo(mixture_R_V.dtype).tiny).log_()
    student_kl_R, slope_R_V = _kl_and_slope(logps_R_V, probs_R_V, mixture_R_V)
    teacher_kl_R = teacher_logps_R_V.sub_(mixture_R_V).mul_(teacher_probs_R_V).sum(-1)
    return beta * teacher_kl_R + (1 - beta) * student_kl_R, slope_R_V.mul_(1 - beta)


def _kl_and_slope(
    logps_R_V: Tensor, probs_R_V: Tensor, other_logps_R_V: Tensor
) -> tuple[Tensor, Tensor]:
    """`KL(p || other)`, and `p (log p - log other - KL)`."""
    gap_R_V = logps_R_V - other_logps_R_V
    kl_R = (probs_R_V * gap_R_V).sum(-1)
    return kl_R, gap_R_V.sub_(kl_R[:, None]).mul_(probs_R_V)


# --- sums over chunks ----------------------------------------------------------------------------


class _HeadGradients:
    """Gradients of the head's inputs, summed over chunks in 32 bits or more."""

    def __init__(
        self,
        plan: _Plan,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        needed: tuple[bool, ...],
    ) -> None:
        self._plan, self._hidden_N_H, self._weight_V_H = plan, hidden_N_H, weight_V_H
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
        plan: _Plan,
        policy_loss: PolicyLoss | None,
        divergence_weights_N: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needed = tuple(plan.is_grad_on and need for need in ctx.needs_input_grad[:3])
        gradients = _HeadGradients(plan, hidden_N_H, weight_V_H, bias_V, needed)
        statistics_3_N = hidden_N_H.new_empty(3, len(hidden_N_H), dtype=plan.dtype)
        loss = hidden_N_H.new_zeros((), dtype=plan.dtype)
        for rows in _slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            policy, logps_grad_C = _policy_gradient(policy_loss, tile.logps_C, rows)
            weights_C = None if divergence_weights_N is None else divergence_weights_N[rows]
            if any(needed):
                gradients.add(
                    rows, tile.differentiate(_TokenGradients(logps_grad_C, None, weights_C))
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
    with torch.enable_grad():
        leaf_C = logps_C.detach().requires_grad_()
        loss = policy_loss(leaf_C, rows)
        if not loss.requires_grad:
            return loss, None
        (grad_C,) = torch.autograd.grad(loss, leaf_C, allow_unused=True, materialize_grads=True)
    return loss.detach(), grad_C


class _RecomputeHead(torch.autograd.Function):
    """Differentiable log-probabilities, entropies and divergences; chunks are projected twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        statistics_3_N = hidden_N_H.new_empty(3, len(hidden_N_H), dtype=plan.dtype)
        for rows in _slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            tile.measure()
            statistics_3_N[:, rows] = torch.stack([tile.logps_C, tile.entropy_C, tile.divergence_C])
        ctx.save_for_backward(hidden_N_H, weight_V_H, bias_V)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        logps_N, entropy_N, divergence_N = (row.clone() for row in statistics_3_N)
        return logps_N, entropy_N, divergence_N

    @staticmethod
    def backward(ctx: Any, *grads_N: Any) -> Any:
        hidden_N_H, weight_V_H, bias_V = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needed = ctx.needs_input_grad[:3]
        gradients = _HeadGradients(plan, hidden_N_H, weight_V_H, bias_V, needed)
        for rows in _slices(len(hidden_N_H), plan.chunk):
            tile = plan.tile(hidden_N_H, weight_V_H, bias_V, rows)
            token_gradients = _TokenGradients(*(None if g is None else g[rows] for g in grads_N))
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
    """Log-probability, entropy and divergence from the teacher, per token and differentiable.

    Any loss can follow, also one that sums over a sequence first. The backward pass projects each
    chunk again. The teacher never gets a gradient; without one `divergence_N` is zero. Arguments
    as in `fused_policy_distillation`.

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
        _LogitRule(logit_scale, softcap, temperature),
        chunk,
    )
    hidden_N_H, weight_V_H, bias_V = _in_one_dtype(hidden_N_H, weight_V_H, bias_V)
    with torch.autocast(hidden_N_H.device.type, enabled=False):
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
    """Policy loss plus weighted distillation from hidden states, without the logits of a batch.

    `loss = policy_loss(logps_N) + sum(divergence_weights_N * divergence_N)`, where the divergence
    is the generalized Jensen-Shannon divergence of the two next-token distributions.

    Args:
        hidden_N_H: the student's states; row n predicts `target_ids_N[n]`.
        weight_V_H: the student's head, trainable or frozen.
        bias_V: the head's bias.
        target_ids_N: the tokens that were taken.
        policy_loss: see `PolicyLoss`; `None` leaves the channel off.
        teacher_hidden_N_H: the teacher's states at the same tokens; `None` leaves the channel off.
        teacher_weight_V_H: the teacher's head; by default the student's own, detached.
        teacher_bias_V: the bias of `teacher_weight_V_H`.
        divergence_weights_N: weight of each token's divergence (mask, channel weight and
            normalizer in one); by default 1/N each.
        beta: 0 is the forward KL(teacher || student), 1 the reverse, between them the JSD.
        temperature: both models' logits are divided by it.
        logit_scale: factor on both models' projections.
        softcap: both models' logits are capped by `softcap * tanh(logits / softcap)`.
        chunk: tokens whose logits exist at once; by default the device's own choice.
        mode: `"recompute"` for a policy loss that mixes tokens of different chunks.

    Raises:
        ShapeError: two inputs do not line up.
        TrainerConfigError: `beta`, `temperature`, `softcap`, `chunk` or `mode` is out of range.
    """
    teacher = _teacher(weight_V_H, bias_V, teacher_hidden_N_H, teacher_weight_V_H, teacher_bias_V)
    rule = _LogitRule(logit_scale, softcap, temperature)
    plan = _plan(hidden_N_H, weight_V_H, target_ids_N, teacher, beta, rule, chunk)
    weights_N = _divergence_weights(divergence_weights_N, plan)
    hidden_N_H, weight_V_H, bias_V = _in_one_dtype(hidden_N_H, weight_V_H, bias_V)
    with torch.autocast(hidden_N_H.device.type, enabled=False):
        if mode == "fused":
            return FusedOutput(
                *_FusedHead.apply(
                    hidden_N_H,
                    weight_V_H,
                    bias_V,
                    plan,
                    policy_loss,
                    weights_N,
                )
            )
        if mode == "recompute":
            outputs = HeadOutput(*_RecomputeHead.apply(hidden_N_H, weight_V_H, bias_V, plan))
            return FusedOutput(_total(outputs, policy_loss, weights_N), *outputs)
    raise TrainerConfigError(f"mode={mode!r}: use 'fused' or 'recompute'")


def reference_policy_distillation(
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
) -> FusedOutput:
    """The numbers of `fused_policy_distillation` by full logits and plain autograd.

    For tests and for reading: it holds about ten tensors of shape `N x V`.
    """
    teacher = _teacher(weight_V_H, bias_V, teacher_hidden_N_H, teacher_weight_V_H, teacher_bias_V)
    rule = _LogitRule(logit_scale, softcap, temperature)
    plan = _plan(hidden_N_H, weight_V_H, target_ids_N, teacher, beta, rule, None)

    def logps(hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None) -> Tensor:
        bias_V = None if bias_V is None else bias_V.to(plan.dtype)
        logits_N_V = F.linear(hidden_N_H.to(plan.dtype), weight_V_H.to(plan.dtype), bias_V)
        logits_N_V = logits_N_V * logit_scale
        if softcap is not None:
            logits_N_V = softcap * torch.tanh(logits_N_V / softcap)
        return torch.log_softmax(logits_N_V / temperature, -1)

    logps_N_V = logps(hidden_N_H, weight_V_H, bias_V)
    logps_N = logps_N_V.gather(-1, target_ids_N[:, None])[:, 0]
    entropy_N = torch.special.entr(logps_N_V.exp()).sum(-1)
    divergence_N = torch.zeros_like(logps_N)
    if teacher is not None:
        teacher_logps_N_V = logps(teacher.hidden_N_H, teacher.weight_V_H, teacher.bias_V).detach()
        divergence_N = _plain_jsd(logps_N_V, teacher_logps_N_V, beta)
    outputs = HeadOutput(logps_N, entropy_N, divergence_N)
    weights_N = _divergence_weights(divergence_weights_N, plan)
    return FusedOutput(_total(outputs, policy_loss, weights_N), *outputs)


def _plain_jsd(logps_N_V: Tensor, teacher_logps_N_V: Tensor, beta: float) -> Tensor:
    def kl(p_N_V: Tensor, q_N_V: Tensor) -> Tensor:
        return F.kl_div(q_N_V, p_N_V, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return kl(teacher_logps_N_V, logps_N_V)
    if beta == 1.0:
        return kl(logps_N_V, teacher_logps_N_V)
    mixture_N_V = torch.logaddexp(logps_N_V + math.log1p(-beta), teacher_logps_N_V + math.log(beta))
    return beta * kl(teacher_logps_N_V, mixture_N_V) + (1 - beta) * kl(logps_N_V, mixture_N_V)


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
) -> _Teacher | None:
    if teacher_hidden_N_H is None:
        return None
    if teacher_weight_V_H is None:
        teacher_weight_V_H, teacher_bias_V = weight_V_H, bias_V
    bias_V = None if teacher_bias_V is None else teacher_bias_V.detach()
    return _Teacher(teacher_hidden_N_H.detach(), teacher_weight_V_H.detach(), bias_V)


def _divergence_weights(weights_N: Tensor | None, plan: _Plan) -> Tensor | None:
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
    teacher: _Teacher | None,
    beta: float,
    rule: _LogitRule,
    chunk: int | None,
) -> _Plan:
    _check_range(beta, rule, chunk)
    _check_head("student", hidden_N_H, weight_V_H, target_ids_N)
    if teacher is not None:
        _check_head("teacher", teacher.hidden_N_H, teacher.weight_V_H, target_ids_N)
        if len(teacher.weight_V_H) != len(weight_V_H):
            raise ShapeError(
                f"the vocabularies differ: student {len(weight_V_H)}, teacher "
                f"{len(teacher.weight_V_H)}; distillation needs one tokenizer"
            )
    backend = _backend_for(hidden_N_H.device)
    dtype = torch.promote_types(hidden_N_H.dtype, torch.float32)
    return _Plan(
        target_ids_N,
        teacher,
        beta,
        rule,
        backend,
        chunk or backend.chunk,
        dtype,
        torch.is_grad_enabled(),
    )


def _check_range(beta: float, rule: _LogitRule, chunk: int | None) -> None:
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
    """Under autocast a 32-bit head meets 16-bit states: multiply in the narrower type on CUDA."""
    if hidden_N_H.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        return hidden_N_H.to(dtype), weight_V_H.to(dtype), bias_V
    return hidden_N_H, weight_V_H, bias_V
