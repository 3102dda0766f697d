"""Self-distillation from a teacher that saw a hint (SDPO), in its four estimators.

Dimensions in names: `B` sequences, `T` response tokens, `V` vocabulary, `K` top-k support.
"""

from typing import Literal

import torch
from torch import Tensor

from trainer.errors import TrainerConfigError
from trainer.losses.divergence import (
    check_same_shape,
    jsd_entries,
    log_probs,
    masked_sum,
    renormalized,
    with_tail,
    without_uncounted,
)

Estimator = Literal["full", "topk", "teacher_topk", "sampled"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def sdpo_per_token(
    student_logits_BTV: Tensor,
    teacher_logits_BTV: Tensor,
    *,
    ids_BT: Tensor | None = None,
    estimator: Estimator = "full",
    alpha: float = 0.5,
    temperature: float = 1.0,
    top_k: int = 100,
    add_tail: bool = True,
) -> Tensor:
    """Compute the divergence of every response token, [B, T].

    "full" sums over the vocabulary. "topk" keeps the *student's* k likeliest entries, with the
    rest in one tail bucket (`add_tail`) or renormalized away; "teacher_topk" keeps the teacher's,
    which is what a scoring server can send. "sampled" needs `ids_BT` and is
    `sampled_reverse_kl_per_token`.

    `alpha` is the mixture weight `beta` of `jsd_entries`: 0 is KL(teacher || student), 1 is
    KL(student || teacher); "sampled" knows only 1.

    >>> even, sure = torch.zeros(1, 1, 2), torch.tensor([[[0.9, 0.1]]]).log()
    >>> sdpo_per_token(even, sure, alpha=1.0)  # KL(s || t): log(0.5 / 0.3)
    tensor([[0.5108]])

    Source: SDPO, arXiv:2601.20802, sec. 3.

    Raises:
        TrainerConfigError: "sampled" without ids or with another `alpha`.
    """
    check_same_shape(student_logits_BTV, teacher_logits_BTV)
    student_logp = log_probs(student_logits_BTV, temperature)
    teacher_logp = log_probs(teacher_logits_BTV, temperature).detach()
    if estimator == "sampled":
        if ids_BT is None or alpha != 1.0:
            raise TrainerConfigError("the sampled estimator needs ids and alpha=1.0 (reverse KL)")
        student_BT, teacher_BT = (
            logp.gather(-1, ids_BT.unsqueeze(-1)).squeeze(-1)
            for logp in (student_logp, teacher_logp)
        )
        return sampled_reverse_kl_per_token(student_BT, teacher_BT)
    if estimator != "full":
        student_logp, teacher_logp = on_support(
            student_logp, teacher_logp, estimator=estimator, top_k=top_k, add_tail=add_tail
        )
    return jsd_entries(student_logp, teacher_logp, alpha).sum(-1)


def on_support(
    student_logp_NV: Tensor,
    teacher_logp_NV: Tensor,
    *,
    estimator: Estimator,
    top_k: int,
    add_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Keep the k entries that one log-distribution finds likeliest of both, [N, K + 1].

    The last entry is all the rest; without `add_tail` it is missing and the others are scaled up.
    """
    chooser_NV = teacher_logp_NV if estimator == "teacher_topk" else student_logp_NV
    support_NK = chooser_NV.topk(min(top_k, chooser_NV.size(-1)), dim=-1).indices
    finish = with_tail if add_tail else renormalized
    return (
        finish(student_logp_NV.gather(-1, support_NK)),
        finish(teacher_logp_NV.gather(-1, support_NK)),
    )


def sampled_reverse_kl_per_token(student_logps_BT: Tensor, teacher_logps_BT: Tensor) -> Tensor:
    """Estimate KL(student || teacher) from the sampled tokens alone, by score function, [B, T].

    `(log p_s - log p_t).detach() log p_s`: over tokens that the student sampled, its gradient is
    the divergence's; its value means nothing and is negative half of the time. It is all that is
    left of channel 2 where no logits are at hand.

    Source: SDPO, arXiv:2601.20802, sec. 3 (token-level credit).
    """
    return (student_logps_BT - teacher_logps_BT).detach() * student_logps_BT


def importance_weights(
    logps_BT: Tensor, old_logps_BT: Tensor, *, max_ratio: float, max_log_ratio: float = 20.0
) -> Tensor:
    """Compute the detached ratio `p / p_old` of each token, cut at `max_ratio`."""
    log_ratio_BT = (logps_BT - old_logps_BT).detach().clamp(-max_log_ratio, max_log_ratio)
    return log_ratio_BT.exp().clamp(max=max_ratio)


def sdpo_loss(
    student_logits_BTV: Tensor,
    teacher_logits_BTV: Tensor,
    mask_BT: Tensor,
    *,
    ids_BT: Tensor | None = None,
    old_logps_BT: Tensor | None = None,
    is_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
    estimator: Estimator = "full",
    alpha: float = 0.5,
    temperature: float = 1.0,
    top_k: int = 100,
    add_tail: bool = True,
) -> Tensor:
    """Compute hint-conditioned self-distillation, as one scalar.

    `mask_BT` is the response mask times "this row has a hint". With `is_clip` each token's loss is
    weighted by its importance ratio against `old_logps_BT` (needs `ids_BT`), cut at `is_clip`.
    An empty mask gives 0 with a graph, never NaN.

    >>> even, sure = torch.zeros(1, 2, 2), torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log()
    >>> sdpo_loss(even, sure, torch.tensor([[1, 1]]), alpha=1.0)  # the mean of 0.5108 and 0
    tensor(0.2554)

    Source: SDPO, arXiv:2601.20802; aggregations as in verl's `agg_loss`.

    Raises:
        TrainerConfigError: `is_clip` without ids and old logps, or an unknown aggregation.
    """
    check_same_shape(student_logits_BTV, teacher_logits_BTV)
    student_logits_BTV = without_uncounted(student_logits_BTV, mask_BT)
    teacher_logits_BTV = without_uncounted(teacher_logits_BTV, mask_BT)
    per_token_BT = sdpo_per_token(
        student_logits_BTV,
        teacher_logits_BTV,
        ids_BT=ids_BT,
        estimator=estimator,
        alpha=alpha,
        temperature=temperature,
        top_k=top_k,
        add_tail=add_tail,
    )
    if is_clip is not None:
        if ids_BT is None or old_logps_BT is None:
            raise TrainerConfigError("is_clip needs ids_BT and old_logps_BT")
        logps_BT = log_probs(student_logits_BTV, temperature).gather(-1, ids_BT.unsqueeze(-1))
        ratio_BT = importance_weights(logps_BT.squeeze(-1), old_logps_BT, max_ratio=is_clip)
        per_token_BT = per_token_BT * ratio_BT
    return aggregate(per_token_BT, mask_BT, aggregation)


def aggregate(per_token_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """Reduce per-token values: over all counted tokens, or per sequence first.

    A sequence without a counted token is left out of a mean over sequences.

    Raises:
        TrainerConfigError: the aggregation is unknown.
    """
    mask_BT = mask_BT.to(per_token_BT.dtype)
    if aggregation == "token-mean":
        return masked_sum(per_token_BT, mask_BT) / mask_BT.sum().clamp_min(1.0)
    values_BT = torch.where(mask_BT != 0, per_token_BT * mask_BT, per_token_BT.new_zeros(()))
    length_B = mask_BT.sum(-1)
    n_sequences = (length_B > 0).sum().clamp_min(1)
    if aggregation == "seq-mean-token-sum":
        return values_BT.sum() / n_sequences
    if aggregation == "seq-mean-token-mean":
        return (values_BT.sum(-1) / length_B.clamp_min(1.0)).sum() / n_sequences
    raise TrainerConfigError(f"aggregation={aggregation!r} is not one of {Aggregation}")
