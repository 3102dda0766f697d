"""Channel 3 as credit per token, for engines that only accept advantages.

An engine with the loss `-sum(advantage * ratio)` can't see two responses at once, so it can't
compute a preference loss. But at the policy that scored the pair, the gradient of any preference
loss equals a policy gradient in which every token of a side has the same advantage.

Dimensions in names: `B` pairs.
"""

import torch
from torch import Tensor

from trainer.losses.channels import ReplayOptions, replay_per_pair


def replay_credit(
    chosen_logps_B: Tensor,
    rejected_logps_B: Tensor,
    n_chosen_B: Tensor,
    n_rejected_B: Tensor,
    ref_chosen_logps_B: Tensor | None,
    ref_rejected_logps_B: Tensor | None,
    options: ReplayOptions,
) -> tuple[Tensor, Tensor]:
    """Compute the advantages of the tokens in the chosen [B] and the rejected side [B] of pairs.

    It is the negative derivative of `replay_per_pair` by the side's summed log-probability: for
    plain DPO, `beta * sigmoid(-beta * h)` and its negative. With these advantages, an
    importance-weighted policy loss has exactly the pairwise gradient while the policy is the one
    that scored the pair. Score again after an optimizer step. The weight of a pair multiplies its
    credit.

    Source: DPO, arXiv:2305.18290, sec. 4 (gradient of eq. 7), for any of our variants.
    """
    with torch.enable_grad():
        chosen_B = chosen_logps_B.detach().requires_grad_()
        rejected_B = rejected_logps_B.detach().requires_grad_()
        losses_B = replay_per_pair(
            chosen_B,
            rejected_B,
            n_chosen_B,
            n_rejected_B,
            ref_chosen_logps_B,
            ref_rejected_logps_B,
            options,
        )
        by_chosen_B, by_rejected_B = torch.autograd.grad(losses_B.sum(), (chosen_B, rejected_B))
    return -by_chosen_B, -by_rejected_B
