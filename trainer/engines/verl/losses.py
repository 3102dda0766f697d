"""The plug-in's own computations: channel 2 from a server's top-k, and sums over all ranks.

Dimensions in names: `N` tokens of a micro-batch, `K` entries of the teacher, `V` vocabulary, `B`
rows, `R` response tokens, `P` pairs.
"""

import torch
from torch import Tensor

from trainer.errors import ShapeError
from trainer.losses.channels import (
    ReplayOptions,
    SDPOOptions,
    divergence_per_token,
    replay_per_pair,
)
from trainer.losses.divergence import log_probs, masked_sum, with_tail

NOT_SCORED = -1
"""Token id in the teacher's columns at a position that no hinted teacher scored."""


def is_scored(teacher_ids_NK: Tensor) -> Tensor:
    """Return a mask of the positions where a hinted teacher scored the next token, [N]."""
    return teacher_ids_NK[..., 0] != NOT_SCORED


def topk_divergence(
    student_logits_NV: Tensor,
    teacher_ids_NK: Tensor,
    teacher_logp_NK: Tensor,
    options: SDPOOptions,
) -> Tensor:
    """Compute channel 2 at every position, [N], with 0 where no hinted teacher scored.

    It compares the teacher's k entries, and the rest of each side as one more entry.

    Raises:
        ShapeError: the teacher's columns and the student's logits differ in length.
    """
    if len(student_logits_NV) != len(teacher_ids_NK):
        raise ShapeError(
            f"{len(student_logits_NV)} positions of the student were given for {len(teacher_ids_NK)} of the teacher: turn off sequence parallelism and padding to a fixed length for channel 2"
        )
    scored_N = is_scored(teacher_ids_NK)
    student_SK = log_probs(student_logits_NV[scored_N]).gather(-1, teacher_ids_NK[scored_N].long())
    teacher_SK = teacher_logp_NK[scored_N].to(student_SK.dtype)
    per_token_S = divergence_per_token(with_tail(student_SK), with_tail(teacher_SK), options)
    return per_token_S.new_zeros(len(student_logits_NV)).masked_scatter(scored_N, per_token_S)


def share_of_mean(values: Tensor, mask: Tensor, *, total: float, n_ranks: int) -> Tensor:
    """Return one micro-batch's part of the mean over all ranks, times the number of ranks.

    `total` is the sum of the mask over all ranks.
    """
    return masked_sum(values, mask) / max(total, 1e-12) * n_ranks


def pair_terms(
    logps_BR: Tensor,
    mask_BR: Tensor,
    reference_B: Tensor | None,
    options: ReplayOptions,
) -> tuple[Tensor, Tensor]:
    """Compute the loss [P] and the margin per token [P] of rows that alternate between chosen and rejected."""
    mask_BR = mask_BR.to(logps_BR.dtype)
    sums_B = torch.where(mask_BR != 0, logps_BR, logps_BR.new_zeros(())).sum(-1)
    lengths_B = mask_BR.sum(-1)
    references = (None, None) if reference_B is None else (reference_B[0::2], reference_B[1::2])
    losses_P = replay_per_pair(
        sums_B[0::2], sums_B[1::2], lengths_B[0::2], lengths_B[1::2], *references, options
    )
    averages_B = (sums_B / lengths_B.clamp_min(1)).detach()
    return losses_P, averages_B[0::2] - averages_B[1::2]
