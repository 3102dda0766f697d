"""Self-distillation from a teacher that saw a hint (SDPO), with its four estimators.

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

    "full" sums over the vocabulary. "topk" keeps the *student's* k most likely entries, and puts
    the rest into one more entry (`add_tail`) or renormalizes without it. "teacher_topk" keeps the
    teacher's entries, which a scoring server can return. "sampled" needs `ids_BT` and is
    `sampled_reverse_kl_per_token`.

    `alpha` is the mixture weight `beta` of `jsd_entries`: 0 gives KL(teacher || student), and 1
    gives KL(student || teacher). "sampled" supports only 1.

    >>> even, sure = torch.zeros(1, 1, 2), torch.tensor([[[0.9, 0.1]]]).log()
    >>> sdpo_per_token(even, sure, alpha=1.0)  # KL(s || t): log(0.5 / 0.3)
    tensor([[0.5108]])

    Source: SDPO, arXiv:2601.20802, sec. 3.

    Raises:
        TrainerConfigError: "sampled" has no ids, or another `alpha`.
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
    """Keep, in both log-distributions, the k entries that are most likely in one of them, [N, K + 1].

    The last entry is the rest. Without `add_tail` there is no such entry, and the others are scaled
    up.
    """
    chooser_NV = teacher_logp_NV if estimator == "teacher_topk" else student_logp_NV
    support_NK = chooser_NV.topk(min(top_k, chooser_NV.size(-1)), dim=-1).indices
    finish = with_tail if add_tail else renormalized
    return (
        finish(student_logp_NV.gather(-1, support_NK)),
        finish(teacher_logp_NV.gather(-1, support_NK)),
    )


def sampled_reverse_kl_per_token(student_logps_BT: Tensor, teacher_logps_BT: Tensor) -> Tensor:
    """Estimate KL(student || teacher) from the sampled tokens alone, by the score function, [B, T].

    The formula is `(log p_s - log p_t).detach() log p_s`. Over tokens that the student sampled, its
    expected gradient is that of the divergence. Its value has no meaning, and is negative half of
    the time. Use it for channel 2 if there are no logits.

    Source: SDPO, arXiv:2601.20802, sec. 3 (token-level credit).
    """
    return (student_logps_BT - teacher_logps_BT).detach() * student_logps_BT


def importance_weights(
    logps_BT: Tensor, old_logps_BT: Tensor, *, max_ratio: float, max_log_ratio: float = 20.0
) -> Tensor:
    """Compute the detached ratio `p / p_old` of each token, limited to `max_ratio`."""
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

    `mask_BT` is the response mask times "this row has a hint". With `is_clip`, each token's loss is
    weighted by its importance ratio against `old_logps_BT` (needs `ids_BT`), limited to `is_clip`.
    An empty mask gives 0 with a graph, never NaN.

    >>> even, sure = torch.zeros(1, 2, 2), torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log()
    >>> sdpo_loss(even, sure, torch.tensor([[1, 1]]), alpha=1.0)  # the mean of 0.5108 and 0
    tensor(0.2554)

    Source: SDPO, arXiv:2601.20802; aggregations as in verl's `agg_loss`.

    Raises:
        TrainerConfigError: `is_clip` has no ids or old logps, or the aggregation is unknown.
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
    """Reduce per-token values over all counted tokens, or first per sequence.

    A mean over sequences leaves out sequences without a counted token.

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
