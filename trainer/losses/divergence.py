"""Divergences between a student's and a teacher's next-token distribution.

Dimensions in names: `B` sequences, `T` tokens, `V` vocabulary (or a top-k support of it), `N` any
leading dimensions. Student and teacher logits at the same position must predict the *same* target
token: the caller does the shift by one. Detach the teacher's logits, so that gradients flow only to
the student.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ShapeError, TrainerConfigError

IGNORED_LABEL = -100
"""Label of a position that doesn't count, as in `torch.nn.functional.cross_entropy`."""


def log_probs(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute a log-softmax in at least float32, which stays finite even if a logit is minus infinity.

    bf16 logits are converted first, because a log-softmax in bf16 makes small divergences negative.
    """
    widened_NV = logits_NV.float() if logits_NV.element_size() < 4 else logits_NV
    if temperature != 1.0:
        widened_NV = widened_NV / temperature
    logp_NV = F.log_softmax(widened_NV, dim=-1)
    return logp_NV.clamp_min(torch.finfo(logp_NV.dtype).min / 8)


def kl_entries(p_logp_NV: Tensor, q_logp_NV: Tensor) -> Tensor:
    """Compute the terms `p (log p - log q)` of KL(p || q), one for each vocabulary entry.

    If `q` gives an entry no probability but `p` does, its term is infinite, so that a run notices.
    """
    entries_NV = p_logp_NV.exp() * (p_logp_NV - q_logp_NV)
    is_infinite = ~_is_possible(q_logp_NV) & _is_possible(p_logp_NV)
    return entries_NV.masked_fill(is_infinite, math.inf)


def taken(logp_NV: Tensor, ids_N: Tensor) -> Tensor:
    """Return the log-probabilities of the given tokens, or minus infinity if impossible."""
    logp_N = logp_NV.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1)
    return logp_N.masked_fill(~_is_possible(logp_N), -math.inf)


def _is_possible(logp: Tensor) -> Tensor:
    return logp > torch.finfo(logp.dtype).min / 16  # `log_probs` goes no lower than an eighth


def jsd_entries(student_logp_NV: Tensor, teacher_logp_NV: Tensor, beta: float) -> Tensor:
    """Compute the terms of the generalized Jensen-Shannon divergence, one per vocabulary entry.

    With the mixture `m = (1 - beta) p_s + beta p_t`, it is `beta KL(p_t || m) + (1 - beta) KL(p_s
    || m)`. At `beta = 0` it is KL(p_t || p_s), and at `beta = 1` KL(p_s || p_t). These ends are
    *not* the limits of the middle, which go to zero. So a sweep over `beta` also changes the scale.

    Source: Agarwal et al. 2023, arXiv:2306.13649, eq. 1, with the convention of OPSD
    (arXiv:2601.18734).

    Raises:
        TrainerConfigError: `beta` isn't between 0 and 1.
    """
    if not 0.0 <= beta <= 1.0:
        raise TrainerConfigError(f"beta={beta} is not in [0, 1]")
    if beta == 0.0:
        return kl_entries(teacher_logp_NV, student_logp_NV)
    if beta == 1.0:
        return kl_entries(student_logp_NV, teacher_logp_NV)
    mixture_logp_NV = torch.logaddexp(
        student_logp_NV + math.log1p(-beta), teacher_logp_NV + math.log(beta)
    )
    return beta * kl_entries(teacher_logp_NV, mixture_logp_NV) + (1.0 - beta) * kl_entries(
        student_logp_NV, mixture_logp_NV
    )


def with_tail(logp_NK: Tensor) -> Tensor:
    """Append the log of the probability mass outside a top-k support as one more entry."""
    covered_N1 = torch.logsumexp(logp_NK, dim=-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logp_NK, torch.log(-torch.expm1(covered_N1))], dim=-1)


def renormalized(logp_NK: Tensor) -> Tensor:
    """Scale a top-k support so that its probabilities sum to one."""
    return logp_NK - torch.logsumexp(logp_NK, dim=-1, keepdim=True)


def without_uncounted(logits_NV: Tensor, mask_N: Tensor) -> Tensor:
    """Replace the logits of uncounted positions by zeros, even NaN.

    Leaving a position out of the sum isn't enough, because the gradient of a log-softmax of NaN is
    NaN, and 0 times NaN is NaN.
    """
    return logits_NV.masked_fill((mask_N == 0).unsqueeze(-1), 0.0)


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum where the mask isn't zero. NaN and infinities elsewhere have no effect."""
    return torch.where(mask_N != 0, values_N * mask_N, values_N.new_zeros(())).sum()


def check_same_shape(student: Tensor, teacher: Tensor) -> None:
    """Check that two logits tensors have the same shape.

    Raises:
        ShapeError: a dimension differs, for example because the vocabularies differ.
    """
    if student.shape != teacher.shape:
        raise ShapeError(
            f"student logits {tuple(student.shape)} and teacher logits {tuple(teacher.shape)} "
            "differ: select the same tokens from both, and use one vocabulary"
        )


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Tensor:
    """Compute the generalized Jensen-Shannon divergence of logits [B, T, V] (or [N, V]).

    `labels` [B, T] are already shifted, and -100 leaves a position out. `top_k` keeps the teacher's
    k most likely entries and renormalizes both sides on them. `token_clip` limits every vocabulary
    entry, as OPSD's later scripts do. The value may then be negative, and its gradient isn't that
    of a divergence.

    "batchmean" divides the sum by the number of counted tokens, or by B without labels. "mean"
    averages over all entries, "sum" adds them, and "none" returns them ([B, T, V], or [n_tokens, V]
    with labels). The value isn't scaled by T**2 or by the vocabulary size.

    >>> student, teacher = torch.zeros(1, 2), torch.tensor([[0.9, 0.1]]).log()
    >>> generalized_jsd_loss(student, teacher, beta=0.0)  # log 2 - 0.325, the teacher's entropy
    tensor(0.3681)

    Source: GKD, arXiv:2306.13649, eq. 1; top-k and clip after OPSD, arXiv:2601.18734.
    """
    check_same_shape(student_logits, teacher_logits)
    if labels is not None:
        is_counted = labels != IGNORED_LABEL
        student_logits, teacher_logits = student_logits[is_counted], teacher_logits[is_counted]
    student_logp, teacher_logp = (
        log_probs(student_logits, temperature),
        log_probs(teacher_logits, temperature),
    )
    if top_k is not None:
        support = teacher_logp.topk(min(top_k, teacher_logp.size(-1)), dim=-1).indices
        student_logp = renormalized(student_logp.gather(-1, support))
        teacher_logp = renormalized(teacher_logp.gather(-1, support))
    entries = jsd_entries(student_logp, teacher_logp, beta)
    if token_clip is not None:
        entries = entries.clamp(max=token_clip)
    return reduced(entries, reduction, entries.size(0))


def reduced(entries: Tensor, reduction: str, n_rows: int) -> Tensor:
    """Reduce the terms of a loss as `generalized_jsd_loss` says.

    Raises:
        TrainerConfigError: the reduction is unknown.
    """
    if reduction == "batchmean":
        return entries.sum() / max(n_rows, 1)
    if reduction == "sum":
        return entries.sum()
    if reduction == "mean":
        return entries.sum() / max(entries.numel(), 1)
    if reduction == "none":
        return entries
    raise TrainerConfigError(f"reduction={reduction!r} is not batchmean, mean, sum or none")
