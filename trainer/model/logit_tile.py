"""The logits of one chunk of tokens: projection, statistics, and gradient in place.

Shapes: `N` tokens, `C` tokens of one chunk, `R` tokens of one block of rows, `H` hidden, `V`
vocabulary, `K` vocabulary entries of one block of columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "CudaBackend",
    "LogitRule",
    "LogitTile",
    "PortableBackend",
    "TeacherHead",
    "TilePlan",
    "TokenGradients",
    "backend_for",
    "slices",
]


# --- how a device multiplies ---------------------------------------------------------------------


class PortableBackend:
    """The matrix products for a device that has only plain ones.

    Blocks of four rows keep element-wise work in the processor's cache. Half-precision weights are
    converted one block of columns at a time, so that logits are never rounded to 16 bits.
    """

    chunk = 256
    """Tokens whose logits exist at once."""
    rows = 4
    """Tokens whose temporaries exist at once."""
    _columns = 8192

    def project(self, hidden_C_H: Tensor, weight_V_H: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits `[C, V]` in `dtype`, never rounded to less."""
        hidden_C_H = hidden_C_H.to(dtype)
        if weight_V_H.dtype == dtype:
            return hidden_C_H @ weight_V_H.t()
        logits_C_V = hidden_C_H.new_empty(len(hidden_C_H), len(weight_V_H))
        for columns in slices(len(weight_V_H), self._columns):
            block_H_K = weight_V_H[columns].to(dtype).t()
            torch.mm(hidden_C_H, block_H_K, out=logits_C_V[:, columns])
        return logits_C_V

    def pull_back(self, grad_C_V: Tensor, weight_V_H: Tensor) -> Tensor:
        """Return the gradient of the hidden states, `[C, H]`."""
        return grad_C_V.to(weight_V_H.dtype) @ weight_V_H

    def accumulate_(self, total_V_H: Tensor, grad_C_V: Tensor, hidden_C_H: Tensor) -> None:
        """Add the weight's gradient to `total_V_H`, without rounding the product first."""
        total_V_H.addmm_(grad_C_V.t(), hidden_C_H.to(total_V_H.dtype))


class CudaBackend(PortableBackend):
    """The matrix products on CUDA: 16-bit inputs, accumulated and returned in 32 bits.

    It needs torch 2.8 or newer, and no Triton.
    """

    chunk = 1024
    rows = 256

    def project(self, hidden_C_H: Tensor, weight_V_H: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits `[C, V]` in `dtype`, never rounded to less."""
        hidden_C_H = hidden_C_H.to(weight_V_H.dtype)
        if weight_V_H.dtype == dtype:
            return hidden_C_H @ weight_V_H.t()
        return torch.mm(hidden_C_H, weight_V_H.t(), out_dtype=dtype)

    def accumulate_(self, total_V_H: Tensor, grad_C_V: Tensor, hidden_C_H: Tensor) -> None:
        """Add the weight's gradient to `total_V_H`, without rounding the product first."""
        # A product rounded to 16 bits before it is added biases the sum: entropy drifts down.
        if hidden_C_H.dtype == total_V_H.dtype:
            total_V_H.addmm_(grad_C_V.t(), hidden_C_H)
            return
        grad_V_C = grad_C_V.to(hidden_C_H.dtype).t()
        torch.addmm(total_V_H, grad_V_C, hidden_C_H, out_dtype=total_V_H.dtype, out=total_V_H)


def backend_for(device: torch.device) -> PortableBackend:
    """Return the backend of `device`."""
    return CudaBackend() if device.type == "cuda" else PortableBackend()


def slices(n: int, size: int) -> Iterator[slice]:
    """Divide `range(n)` into slices of `size`. The last one may be shorter."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


# --- one pass over a chunk -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitRule:
    """The steps from a projection to logits: scale, soft cap, and temperature."""

    scale: float
    softcap: float | None
    temperature: float

    def apply_(self, logits_C_V: Tensor) -> Tensor:
        """Turn a projection into logits, in place."""
        factor = self.scale / (self.softcap or self.temperature)
        if factor != 1.0:
            logits_C_V.mul_(factor)
        if self.softcap is not None:
            logits_C_V.tanh_().mul_(self.softcap / self.temperature)
        return logits_C_V

    def pull_back_(self, grad_R_V: Tensor, logits_R_V: Tensor) -> Tensor:
        """Turn the gradient of the logits into that of the projection, in place."""
        if self.softcap is not None:
            tanh_R_V = logits_R_V * (self.temperature / self.softcap)
            grad_R_V.addcmul_(grad_R_V, tanh_R_V.square_(), value=-1.0)
        factor = self.scale / self.temperature
        return grad_R_V if factor == 1.0 else grad_R_V.mul_(factor)


@dataclass(frozen=True, slots=True, eq=False)
class TeacherHead:
    """The teacher's hidden states and head, without gradient."""

    hidden_N_H: Tensor
    weight_V_H: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """The inputs of one pass, besides the tensors that get a gradient."""

    target_ids_N: Tensor
    teacher: TeacherHead | None
    beta: float
    rule: LogitRule
    backend: PortableBackend
    chunk: int
    dtype: torch.dtype
    """Type of logits and sums: float32, or float64 for float64 inputs."""
    is_grad_on: bool
    """Whether a backward pass can follow. Inside a `Function`, torch can't tell."""

    def logits(
        self, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, rows: slice
    ) -> Tensor:
        """Project one model's states of the tokens `rows` to logits."""
        logits_C_V = self.backend.project(hidden_N_H[rows], weight_V_H, self.dtype)
        if bias_V is not None:
            logits_C_V += bias_V
        return self.rule.apply_(logits_C_V)

    def tile(
        self, hidden_N_H: Tensor, weight_V_H: Tensor, bias_V: Tensor | None, rows: slice
    ) -> "LogitTile":
        """Project both models' states of the tokens `rows`. The state and head arguments are the student's."""
        logits_C_V = self.logits(hidden_N_H, weight_V_H, bias_V, rows)
        teacher_logits_C_V = None
        if self.teacher is not None:
            teacher = self.teacher
            teacher_logits_C_V = self.logits(
                teacher.hidden_N_H, teacher.weight_V_H, teacher.bias_V, rows
            )
        return LogitTile(self, self.target_ids_N[rows], logits_C_V, teacher_logits_C_V)


@dataclass(frozen=True, slots=True, eq=False)
class TokenGradients:
    """Derivatives of the loss with respect to each per-token output. `None` means zero."""

    logps_C: Tensor | None = None
    entropy_C: Tensor | None = None
    divergence_C: Tensor | None = None


class LogitTile:
    """The logits of one chunk of tokens, and the values computed from them."""

    def __init__(
        self,
        plan: TilePlan,
        target_ids_C: Tensor,
        logits_C_V: Tensor,
        teacher_logits_C_V: Tensor | None,
    ) -> None:
        self._plan = plan
        self._target_ids_C_1 = target_ids_C[:, None]
        self._logits_C_V = logits_C_V
        self._teacher_logits_C_V = teacher_logits_C_V
        # Kept as one number per token: log-probabilities of a block are made when they are needed.
        self._norm_C_1 = self._normalizer(logits_C_V)
        self.logps_C = (logits_C_V.gather(-1, self._target_ids_C_1) - self._norm_C_1)[:, 0]
        self.entropy_C = torch.empty_like(self.logps_C)
        self.divergence_C = torch.zeros_like(self.logps_C)

    def statistics(self) -> Tensor:
        """Stack `logps_C`, `entropy_C` and `divergence_C`."""
        return torch.stack([self.logps_C, self.entropy_C, self.divergence_C])

    def _blocks(self) -> Iterator[slice]:
        return slices(len(self._logits_C_V), self._plan.backend.rows)

    def _normalizer(self, logits_C_V: Tensor) -> Tensor:
        norm_C_1 = logits_C_V.new_empty(len(logits_C_V), 1)
        for rows in self._blocks():
            torch.logsumexp(logits_C_V[rows], -1, keepdim=True, out=norm_C_1[rows])
        return norm_C_1

    def measure(self) -> None:
        """Fill `entropy_C` and `divergence_C`."""
        for rows in self._blocks():
            self._measure_rows(rows)

    def differentiate(self, gradients: TokenGradients) -> Tensor:
        """Fill the statistics, and turn the logits, in place, into their own gradient."""
        for rows in self._blocks():
            probs_R_V, logps_R_V, slope_R_V = self._measure_rows(rows)
            grad_R_V = self._gradient_rows(rows, gradients, probs_R_V, logps_R_V, slope_R_V)
            # In place: a second `C x V` would double what a chunk holds.
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
        gradients: TokenGradients,
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
    """Compute log-probs, with the lowest number for an impossible token, so that 0 * log 0 = 0."""
    return (logits_R_V - norm_R_1).clamp_(min=torch.finfo(logits_R_V.dtype).min)


def _jsd_and_slope(
    logps_R_V: Tensor, probs_R_V: Tensor, teacher_logps_R_V: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute the generalized JSD per token, and its derivative by the student's logits.

    With `m = (1 - beta) p + beta q`: `beta KL(q || m) + (1 - beta) KL(p || m)`; at 0 it is the
    forward `KL(q || p)`, at 1 the reverse `KL(p || q)`.

    Source: Agarwal et al. 2024, arXiv:2306.13649, eq. 1 and 2; derivative worked out from it.
    """
    if beta == 1.0:
        return _kl_and_slope(logps_R_V, probs_R_V, teacher_logps_R_V)
    teacher_probs_R_V = teacher_logps_R_V.exp()
    if beta == 0.0:
        gap_R_V = teacher_logps_R_V.sub_(logps_R_V)
        return _infinite((teacher_probs_R_V * gap_R_V).sum(-1)), probs_R_V - teacher_probs_R_V
    mixture_R_V = torch.lerp(probs_R_V, teacher_probs_R_V, beta)
    mixture_R_V.clamp_(min=torch.finfo(mixture_R_V.dtype).tiny).log_()
    student_kl_R, slope_R_V = _kl_and_slope(logps_R_V, probs_R_V, mixture_R_V)
    teacher_kl_R = teacher_logps_R_V.sub_(mixture_R_V).mul_(teacher_probs_R_V).sum(-1)
    return beta * teacher_kl_R + (1 - beta) * student_kl_R, slope_R_V.mul_(1 - beta)


def _kl_and_slope(
    logps_R_V: Tensor, probs_R_V: Tensor, other_logps_R_V: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `KL(p || other)`, and `p (log p - log other - KL)`."""
    gap_R_V = logps_R_V - other_logps_R_V
    kl_R = (probs_R_V * gap_R_V).sum(-1)
    return _infinite(kl_R), gap_R_V.sub_(kl_R[:, None]).mul_(probs_R_V)


def _infinite(kl_R: Tensor) -> Tensor:
    """Return a divergence with its infinity back, where one side forbids what the other does not.

    No finite logits come near a million nats; the lowest number does, by any probability above 1e-32.
    """
    return kl_R.masked_fill(kl_R > 1e6, torch.inf)
