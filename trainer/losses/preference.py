"""Preference losses on the log-probability of whole responses.

Dimensions in names: `B` pairs, `T` tokens. `logps` are summed over a response, `avg_logps` are
divided by its length. Agent actions differ tenfold in length between the two sides, so the
length-normalized forms are the safer choice for them.
"""

from typing import Final, Literal

import torch.nn.functional as F
from torch import Tensor

from trainer.errors import ShapeError, TrainerConfigError

DPOKind = Literal["sigmoid", "hinge", "ipo", "robust"]


DEFAULT_GAMMA: Final = float("1.0")
"""Target margin of SimPO when none is given. Compared by identity, so that an explicit `gamma` next
to `gamma_beta_ratio` is refused even when it equals the default."""


def _weighted_mean(losses_B: Tensor, weight_B: Tensor | None) -> Tensor:
    if weight_B is None:
        return losses_B.mean()
    return (losses_B * weight_B).sum() / weight_B.sum().clamp_min(1e-12)


def simpo_per_pair(
    chosen_avg_logps_B: Tensor,
    rejected_avg_logps_B: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "hinge"] = "sigmoid",
) -> Tensor:
    """The terms of `simpo_loss`, [B]."""
    z_B = beta * (chosen_avg_logps_B - rejected_avg_logps_B) - gamma
    if kind == "hinge":
        return F.relu(1.0 - z_B)
    if kind != "sigmoid":
        raise TrainerConfigError(f"kind={kind!r} is neither 'sigmoid' nor 'hinge'")
    return -F.logsigmoid(z_B) * (1.0 - label_smoothing) - F.logsigmoid(-z_B) * label_smoothing


def simpo_loss(
    chosen_avg_logps: Tensor,
    rejected_avg_logps: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = DEFAULT_GAMMA,
    gamma_beta_ratio: float | None = None,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "hinge"] = "sigmoid",
    weight: Tensor | None = None,
) -> Tensor:
    """Simple preference optimization: length-normalized, no reference model.

    `-log sigmoid(beta (chosen - rejected) - gamma)`, mean over pairs [B]. Give the target margin
    either as `gamma` or, as the authors' scripts do, as `gamma_beta_ratio = gamma / beta`.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Raises:
        TrainerConfigError: both margins are given, or an unknown kind.
        ShapeError: chosen and rejected are not the same pairs.
    """
    _check_pairs(chosen_avg_logps, rejected_avg_logps)
    if gamma_beta_ratio is not None:
        if gamma is not DEFAULT_GAMMA:
            raise TrainerConfigError(
                "gamma and gamma_beta_ratio are two spellings of one margin: give one"
            )
        gamma = gamma_beta_ratio * beta
    losses_B = simpo_per_pair(
        chosen_avg_logps,
        rejected_avg_logps,
        beta=beta,
        gamma=gamma,
        label_smoothing=label_smoothing,
        kind=kind,
    )
    return _weighted_mean(losses_B, weight)


def dpo_per_pair(
    chosen_logps_B: Tensor,
    rejected_logps_B: Tensor,
    ref_chosen_logps_B: Tensor,
    ref_rejected_logps_B: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: DPOKind = "sigmoid",
) -> Tensor:
    """The terms of `dpo_loss`, [B]."""
    h_B = (chosen_logps_B - ref_chosen_logps_B) - (rejected_logps_B - ref_rejected_logps_B)
    kept_B = -F.logsigmoid(beta * h_B) * (1.0 - label_smoothing)
    flipped_B = -F.logsigmoid(-beta * h_B) * label_smoothing
    if kind == "sigmoid":
        return kept_B + flipped_B
    if kind == "robust":
        return (kept_B - flipped_B) / (1.0 - 2.0 * label_smoothing)
    if kind == "hinge":
        return F.relu(1.0 - beta * h_B)
    if kind == "ipo":
        return (h_B - 1.0 / (2.0 * beta)) ** 2
    raise TrainerConfigError(f"kind={kind!r} is not sigmoid, robust, hinge or ipo")


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: DPOKind = "sigmoid",
    weight: Tensor | None = None,
) -> Tensor:
    """Direct preference optimization, mean over pairs [B].

    With `h = (chosen - ref_chosen) - (rejected - ref_rejected)`: "sigmoid" is `-log sigmoid(beta
    h)`, smoothed by `label_smoothing`; "robust" is its unbiased form under flipped labels; "hinge"
    is `relu(1 - beta h)`; "ipo" is `(h - 1/(2 beta))**2` and wants length-averaged log-probs.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; IPO arXiv:2310.12036, eq. 17; robust DPO
    arXiv:2403.00409, eq. 12; hinge (SLiC) arXiv:2309.06657.

    Raises:
        TrainerConfigError: unknown kind.
        ShapeError: the four are not the same pairs.
    """
    _check_pairs(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    losses_B = dpo_per_pair(
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        beta=beta,
        label_smoothing=label_smoothing,
        kind=kind,
    )
    return _weighted_mean(losses_B, weight)


def _check_pairs(first: Tensor, *others: Tensor) -> None:
    for other in others:
        if other.shape != first.shape:
            raise ShapeError(
                f"log-probabilities of shape {tuple(first.shape)} and {tuple(other.shape)} are not "
                "the same pairs"
            )


def length_normalized_dpo_loss(
    chosen_avg_logps: Tensor,
    rejected_avg_logps: Tensor,
    ref_chosen_avg_logps: Tensor,
    ref_rejected_avg_logps: Tensor,
    *,
    beta: float = 2.0,
    weight: Tensor | None = None,
) -> Tensor:
    """DPO on log-probabilities averaged over each response: SimPO with a reference, no margin.

    `beta` lives on SimPO's scale (about 2), not on DPO's. The same as TRL's `sigmoid_norm`.

    Source: Lambert et al. 2024 (Tulu 3), arXiv:2411.15124, eq. 6.
    """
    return dpo_loss(
        chosen_avg_logps,
        rejected_avg_logps,
        ref_chosen_avg_logps,
        ref_rejected_avg_logps,
        beta=beta,
        weight=weight,
    )
