"""Divergence from a frozen teacher, which may have another vocabulary.

Dimensions in names: `N` tokens or groups of tokens, `V` and `W` the two vocabularies, `K` entries that
both have.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from trainer.losses.channels import SDPOOptions, divergence_per_token
from trainer.losses.divergence import log_probs, with_tail

LEAST_REST = 1e-7
"""Smallest probability of the tokens that aren't compared, as in `with_tail`."""

__all__ = ["common_support_per_token", "span_per_group", "vocabulary_wide"]


def common_support_per_token(
    student_logits_NV: Tensor,
    teacher_logits_NW: Tensor,
    student_ids_K: Tensor | None,
    teacher_ids_K: Tensor | None,
    options: SDPOOptions,
) -> Tensor:
    """Compute the divergence of two next-token distributions on their shared tokens, [N].

    All other tokens of a side form one more entry, so that both sides stay distributions.

    Args:
        student_logits_NV: logits that predict the student's token.
        teacher_logits_NW: logits that predict the teacher's token for the same text.
        student_ids_K: ids of the shared tokens in the student's vocabulary. By default, all ids are
            shared.
        teacher_ids_K: ids of the same tokens in the teacher's vocabulary.
        options: the divergence, its temperature, its wrapper, and its limit.

    >>> student, teacher = torch.zeros(1, 4), torch.tensor([[0.5, 0.25, 0.25]]).log()
    >>> ids = torch.tensor([0, 2]), torch.tensor([0, 1])
    >>> common_support_per_token(student, teacher, *ids, SDPOOptions(jsd_beta=0.0))
    tensor([0.1733])

    Source: GKD, arXiv:2306.13649, eq. 1; matched tokens after GOLD (Hugging Face 2025), and the rest
    as one entry after SDPO, arXiv:2601.20802, sec. 3, where GOLD compares sorted probabilities.
    """
    student_NK = log_probs(student_logits_NV, options.temperature)
    teacher_NK = log_probs(teacher_logits_NW, options.temperature).detach()
    if student_ids_K is not None and teacher_ids_K is not None:
        student_NK = _with_rest(student_NK, student_ids_K)
        teacher_NK = _with_rest(teacher_NK, teacher_ids_K)
    return divergence_per_token(
        student_NK, teacher_NK, vocabulary_wide(options, student_logits_NV.size(-1))
    )


def _with_rest(logp_NV: Tensor, ids_K: Tensor) -> Tensor:
    """Keep these entries, and all others as one more, [N, K + 1].

    The rest is summed up as such: in float32, one minus what is kept has no digits left where a model
    is sure. It is at least `LEAST_REST`, or a vocabulary that is part of the other had none at all, and
    KL(teacher || student) no limit.
    """
    never = torch.finfo(logp_NV.dtype).min / 8
    rest_N1 = logp_NV.index_fill(-1, ids_K, never).logsumexp(-1, keepdim=True)
    kept_NK = logp_NV.index_select(-1, ids_K)
    return torch.cat([kept_NK, rest_N1.clamp_min(math.log(LEAST_REST))], dim=-1)


def span_per_group(student_logp_N: Tensor, teacher_logp_N: Tensor, options: SDPOOptions) -> Tensor:
    """Compute the divergence for groups of tokens with the same text, as a choice between this text and any other, [N].

    Args:
        student_logp_N: log-probability of the text, as the sum over its tokens.
        teacher_logp_N: the same for the teacher's tokens.
        options: as in `common_support_per_token`. The caller has already applied the temperature.

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> span_per_group(half, quarter, SDPOOptions(jsd_beta=1.0))
    tensor([0.1438])

    Source: the chain rule within a group after GOLD (Hugging Face 2025).
    """
    sides = (
        with_tail(logp_N.unsqueeze(-1)) for logp_N in (student_logp_N, teacher_logp_N.detach())
    )
    student_N2, teacher_N2 = sides
    return divergence_per_token(student_N2, teacher_N2, vocabulary_wide(options, 2))


def vocabulary_wide(options: SDPOOptions, n_entries: int) -> SDPOOptions:
    """Set the entropy gate to open at the log of a vocabulary's size, and not of the number of compared entries."""
    if options.entropy_opd_h_max is not None:
        return options
    return replace(options, entropy_opd_h_max=math.log(n_entries))
