"""Preference losses on the log-probability of whole responses.

Dimensions in names: `B` pairs, `T` tokens. `logps` are summed over a response, and `avg_logps` are
divided by its length. The two sides of an agent's pair may differ tenfold in length, so the
length-normalized losses are the safer choice.
"""

import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ShapeError


def simpo_per_pair(
    chosen_avg_logps_B: Tensor,
    rejected_avg_logps_B: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """Return the terms of `simpo_loss`, [B]."""
    return -F.logsigmoid(beta * (chosen_avg_logps_B - rejected_avg_logps_B) - gamma)


def simpo_loss(
    chosen_avg_logps: Tensor,
    rejected_avg_logps: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> Tensor:
    """Compute SimPO (length-normalized, without a reference model), as a mean over pairs [B].

    `-log sigmoid(beta (chosen - rejected) - gamma)`. The authors' scripts specify the target margin
    as the ratio `gamma / beta`.

    >>> import torch
    >>> chosen, rejected = torch.tensor([-1.0]), torch.tensor([-1.5])
    >>> simpo_loss(chosen, rejected)  # at the margin gamma / beta: log 2
    tensor(0.6931)

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Raises:
        ShapeError: chosen and rejected are not the same pairs.
    """
    _check_pairs(chosen_avg_logps, rejected_avg_logps)
    return simpo_per_pair(chosen_avg_logps, rejected_avg_logps, beta=beta, gamma=gamma).mean()


def dpo_per_pair(
    chosen_logps_B: Tensor,
    rejected_logps_B: Tensor,
    ref_chosen_logps_B: Tensor,
    ref_rejected_logps_B: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Return the terms of `dpo_loss`, [B]."""
    h_B = (chosen_logps_B - ref_chosen_logps_B) - (rejected_logps_B - ref_rejected_logps_B)
    return -F.logsigmoid(beta * h_B)


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Compute direct preference optimization, mean over pairs [B].

    `-log sigmoid(beta h)` with `h = (chosen - ref_chosen) - (rejected - ref_rejected)`.

    >>> import torch
    >>> same = torch.tensor([-3.0])
    >>> dpo_loss(same, same, same, same)  # no preference yet: log 2
    tensor(0.6931)
    >>> dpo_loss(same + 10, same, same, same)  # log(1 + 1/e)
    tensor(0.3133)

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.

    Raises:
        ShapeError: the four are not the same pairs.
    """
    _check_pairs(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    sides = (chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return dpo_per_pair(*sides, beta=beta).mean()


def _check_pairs(first: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != first.shape:
            raise ShapeError(
                f"log-probabilities of shape {tuple(first.shape)} and {tuple(other.shape)} can't belong to the same pairs"
            )
