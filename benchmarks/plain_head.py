"""The numbers of the fused head by full logits and plain autograd: what it is held against.

It holds about ten tensors of shape `N x V` (`N` tokens, `V` vocabulary, `H` hidden).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.head import FusedOutput


def plain_policy_distillation(
    hidden_N_H: Tensor,
    weight_V_H: Tensor,
    bias_V: Tensor | None = None,
    *,
    target_ids_N: Tensor,
    policy_loss: Callable[[Tensor, slice], Tensor] | None = None,
    teacher_hidden_N_H: Tensor | None = None,
    teacher_weight_V_H: Tensor | None = None,
    teacher_bias_V: Tensor | None = None,
    divergence_weights_N: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> FusedOutput:
    """Compute what `trainer.model.head.fused_policy_distillation` does, as one would write it."""
    n_tokens = len(target_ids_N)

    def logps(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = torch.promote_types(hidden_N_H.dtype, torch.float32)
        bias = None if bias is None else bias.to(dtype)
        logits_N_V = F.linear(hidden.to(dtype), weight.to(dtype), bias) * logit_scale
        if softcap is not None:
            logits_N_V = softcap * torch.tanh(logits_N_V / softcap)
        return torch.log_softmax(logits_N_V / temperature, -1)

    logps_N_V = logps(hidden_N_H, weight_V_H, bias_V)
    logps_N = logps_N_V.gather(-1, target_ids_N[:, None])[:, 0]
    entropy_N = torch.special.entr(logps_N_V.exp()).sum(-1)
    loss = logps_N.sum() * 0.0
    if policy_loss is not None:
        loss = loss + policy_loss(logps_N, slice(0, n_tokens))
    divergence_N = torch.zeros_like(logps_N)
    if teacher_hidden_N_H is not None:
        if teacher_weight_V_H is None:
            teacher_weight_V_H, teacher_bias_V = weight_V_H, bias_V
        teacher_N_V = logps(teacher_hidden_N_H, teacher_weight_V_H, teacher_bias_V).detach()
        divergence_N = _jsd(logps_N_V, teacher_N_V, beta)
        weights_N = torch.full_like(divergence_N, 1 / max(n_tokens, 1))
        if divergence_weights_N is not None:
            weights_N = divergence_weights_N.to(divergence_N.dtype)
        loss = loss + weights_N @ divergence_N
    return FusedOutput(loss, logps_N, entropy_N, divergence_N)


def _jsd(logps_N_V: Tensor, teacher_logps_N_V: Tensor, beta: float) -> Tensor:
    def kl(p_N_V: Tensor, q_N_V: Tensor) -> Tensor:
        return F.kl_div(q_N_V, p_N_V, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        return kl(teacher_logps_N_V, logps_N_V)
    if beta == 1.0:
        return kl(logps_N_V, teacher_logps_N_V)
    mixture_N_V = torch.logaddexp(logps_N_V + math.log1p(-beta), teacher_logps_N_V + math.log(beta))
    return beta * kl(teacher_logps_N_V, mixture_N_V) + (1 - beta) * kl(logps_N_V, mixture_N_V)
