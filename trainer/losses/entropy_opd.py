"""Entropy-aware on-policy distillation, which chooses the KL by the teacher's certainty.

Dimensions in names: `B` sequences, `T` tokens, `V` vocabulary, `N` counted tokens.
"""

import math

import torch
from torch import Tensor

from trainer.errors import TrainerConfigError
from trainer.losses.divergence import (
    IGNORED_LABEL,
    check_same_shape,
    kl_entries,
    log_probs,
    reduced,
    taken,
)


def soft_gated_kl_per_token(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    h_max: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Compute `w KL(t || s) + (1 - w) KL(s || t)` with `w = clamp(H(t) / h_max, 0, 1)`, per token.

    `h_max` defaults to `log V`. For a large vocabulary, `w` is then small nearly everywhere, which
    is almost pure reverse KL. Set it to about the largest entropy of the teacher.

    Raises:
        TrainerConfigError: `h_max` isn't positive.
    """
    check_same_shape(student_logits, teacher_logits)
    if h_max is not None and h_max <= 0:
        raise TrainerConfigError(f"h_max={h_max} must be positive (nats)")
    student_logp = log_probs(student_logits, temperature)
    teacher_logp = log_probs(teacher_logits, temperature).detach()
    ceiling = math.log(student_logits.size(-1)) if h_max is None else h_max
    gate = (-(teacher_logp.exp() * teacher_logp).sum(-1) / ceiling).clamp(0.0, 1.0)
    forward = kl_entries(teacher_logp, student_logp).sum(-1)
    reverse = kl_entries(student_logp, teacher_logp).sum(-1)
    return gate * forward + (1.0 - gate) * reverse


def gated_forward_kl_per_token(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    entropy_threshold: float = 0.8,
    top_k: int = 16,
    temperature: float = 1.0,
) -> Tensor:
    """Compute KL(t || s) on the teacher's top-k if its entropy exceeds the threshold, else 0.

    The top-k sum is neither renormalized nor clamped. The entropy (nats) is that of the teacher's
    full distribution.
    """
    student_logp = log_probs(student_logits, temperature)
    teacher_logp = log_probs(teacher_logits, temperature).detach()
    gate = -(teacher_logp.exp() * teacher_logp).sum(-1) > entropy_threshold
    support = teacher_logp.topk(min(top_k, teacher_logp.size(-1)), dim=-1).indices
    forward = kl_entries(teacher_logp.gather(-1, support), student_logp.gather(-1, support))
    return forward.sum(-1) * gate


def reverse_kl_surrogate_per_token(
    student_logits: Tensor,
    teacher_logits: Tensor,
    ids: Tensor,
    *,
    old_logps: Tensor | None = None,
    clip: float = 0.2,
    temperature: float = 1.0,
) -> Tensor:
    """Compute a clipped policy-gradient surrogate on the sampled token's reverse KL."""
    student_logps, teacher_logps = (
        taken(log_probs(logits, temperature), ids) for logits in (student_logits, teacher_logits)
    )
    old = student_logps.detach() if old_logps is None else old_logps
    advantage = (teacher_logps - old).detach()
    ratio = (student_logps - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage)


def entropy_aware_opd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    labels: Tensor | None = None,
    h_max: float | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    mode: str = "soft",
    entropy_threshold: float = 0.8,
    alpha: float = 1.0,
    top_k: int = 16,
    old_logps: Tensor | None = None,
    clip: float = 0.2,
) -> Tensor:
    """Compute entropy-aware on-policy distillation of logits [B, T, V].

    mode="additive" is the paper's form. It adds a clipped policy-gradient surrogate on the sampled
    token's reverse KL, over all tokens, and `alpha` times the top-k forward KL where the teacher's
    entropy exceeds `entropy_threshold` (nats). It needs `labels` with the sampled ids (-100 isn't
    counted). mode="soft" blends both full KLs by the teacher's relative entropy; see
    `soft_gated_kl_per_token`. Of the reductions, "batchmean" and "mean" divide by the counted tokens.

    >>> even, sure = torch.zeros(1, 1, 2), torch.tensor([[[0.9, 0.1]]]).log()
    >>> entropy_aware_opd_loss(sure, even)  # an even teacher opens the gate: KL(t || s)
    tensor(0.5108)

    Source: Entropy-Aware On-Policy Distillation, arXiv:2603.07079, eq. 6 (additive form).

    Raises:
        TrainerConfigError: the mode or reduction is unknown, or additive mode has no labels.
    """
    check_same_shape(student_logits, teacher_logits)
    if labels is not None:
        is_counted = labels != IGNORED_LABEL
        student_logits, teacher_logits = student_logits[is_counted], teacher_logits[is_counted]
        labels = labels[is_counted]
        old_logps = None if old_logps is None else old_logps[is_counted]
    if mode == "soft":
        per_token = soft_gated_kl_per_token(
            student_logits, teacher_logits, h_max=h_max, temperature=temperature
        )
    elif mode == "additive":
        if labels is None:
            raise TrainerConfigError("mode='additive' needs labels: the ids that were sampled")
        sides = (student_logits, teacher_logits)
        sampled = {"old_logps": old_logps, "clip": clip, "temperature": temperature}
        gated = {"entropy_threshold": entropy_threshold, "top_k": top_k, "temperature": temperature}
        per_token = reverse_kl_surrogate_per_token(*sides, labels, **sampled)
        per_token = per_token + alpha * gated_forward_kl_per_token(*sides, **gated)
    else:
        raise TrainerConfigError(f"mode={mode!r} is neither 'soft' nor 'additive'")
    return reduced(per_token, reduction, per_token.numel())
