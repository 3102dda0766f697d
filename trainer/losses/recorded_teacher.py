"""Channel 2 with a teacher whose most likely tokens were recorded.

Dimensions in names: `N` tokens, `V` vocabulary, `K` recorded entries of a token.
"""

import torch
from torch import Tensor

from trainer.losses.channels import SDPOOptions, divergence_per_token
from trainer.losses.distill import vocabulary_wide
from trainer.losses.divergence import log_probs, with_tail

NO_ENTRY = -1
"""Pads the ids of a token with fewer recorded entries."""


def recorded_teacher_per_token(
    student_logits_NV: Tensor,
    support_NK: Tensor,
    teacher_logp_NK: Tensor,
    options: SDPOOptions,
) -> Tensor:
    """Compute the loss of channel 2 from a teacher's recorded top-k, [N].

    Everything that was not recorded is one more entry on both sides, as in `divergence_per_token`.
    Servers record probabilities at temperature 1, so the student's temperature is also 1,
    regardless of `options`.

    Args:
        student_logits_NV: logits that predict the token of the teacher's entries.
        support_NK: ids of the entries in the student's vocabulary, padded with `NO_ENTRY`.
        teacher_logp_NK: natural log-probabilities of the entries. Padding may have any value.
        options: the divergence, its wrapper, and its limit.

    >>> student = torch.zeros(1, 4)
    >>> ids, logp = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]]).log()
    >>> recorded_teacher_per_token(student, ids, logp, SDPOOptions(jsd_beta=0.0))
    tensor([0.1733])

    Source: GKD, arXiv:2306.13649, sec. 3 (supervised, of a fixed teacher); the rest as one entry
    after SDPO, arXiv:2601.20802, sec. 3.
    """
    is_entry_NK = support_NK != NO_ENTRY
    student_NK = log_probs(student_logits_NV).gather(-1, support_NK.clamp_min(0))
    # Not minus infinity: 0 times it is NaN, in the loss as in its gradient.
    never = torch.finfo(student_NK.dtype).min / 8
    sides = (
        with_tail(logp_NK.to(student_NK.dtype).masked_fill(~is_entry_NK, never))
        for logp_NK in (student_NK, teacher_logp_NK.detach())
    )
    student_NK, teacher_NK = sides
    n_entries = student_logits_NV.size(-1)  # not those compared: their number differs by token
    return divergence_per_token(student_NK, teacher_NK, vocabulary_wide(options, n_entries))
