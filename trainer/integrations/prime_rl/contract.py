"""What PRIME-RL 0.8's trainer does with the streams that we send it, written down from its numbers.

The trainer adds three components over per-token streams, each divided by its own token count:

    loss = rl / n_rl + ce / n_ce + ref_kl / n_ref_kl

Where PRIME-RL is installed, its own functions are called (`loss.policy_loss`); this module stands in
for them elsewhere and is what `doctor` compares an installed version with. Every component is one
sequence, 1-D; `N` in names are its tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

REF_KL_FLOOR = -0.2
"""A token whose probability fell by more than this is left out of `ref_kl`."""
REF_KL_TAU = 1e-3


@dataclass(kw_only=True)
class LossInputs:
    """One sequence of one component, with today's field names."""

    trainer_logprobs: Tensor
    """Of the policy that is trained; has a graph."""
    inference_logprobs: Tensor
    """Of the policy that sampled."""
    ref_logprobs: Tensor | None = None
    """Of a reference: with hints, of the policy itself behind the hinted prompt."""
    advantages: Tensor
    loss_mask: Tensor
    """Tokens of this component."""
    loss_weights: Tensor | None = None
    """Weight of each token in this component; `None`: 1."""


@dataclass(kw_only=True)
class LossOutputs:
    """A summed loss, and metrics to average over sequences."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DefaultLoss:
    """Settings of `[trainer.loss]` with `type = "default"`."""

    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Importance-weighted policy gradient, masked where a probability moved too far.

        Too far is up where the advantage is positive, and down where it is not.
        """
        moved_N = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
        up_N, down_N = moved_N > self.dppo_mask_high, moved_N < -self.dppo_mask_low
        is_masked_N = torch.where(inputs.advantages > 0, up_N, down_N)
        outputs = _policy_gradient(
            inputs, inputs.advantages * self.adv_tau, is_masked_N, kl_tau=self.kl_tau
        )
        chosen = is_masked_N[inputs.loss_mask]
        signs = inputs.advantages[inputs.loss_mask][chosen]
        outputs.metrics |= {
            "is_masked_low": _mean((down_N & (inputs.advantages < 0)).float(), inputs.loss_mask),
            "is_masked_high": _mean((up_N & (inputs.advantages > 0)).float(), inputs.loss_mask),
            "masked_advantage_positive": (signs > 0).float().sum() / max(len(signs), 1),
            "masked_advantage_negative": (signs < 0).float().sum() / max(len(signs), 1),
        }
        return outputs


@dataclass(frozen=True, kw_only=True)
class IPOLoss:
    """Settings of `[trainer.loss]` with `type = "ipo"`."""

    ipo_threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """The same, masked wherever a probability moved by more than the threshold."""
        moved_N = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
        return _policy_gradient(
            inputs,
            inputs.advantages * self.adv_tau,
            moved_N.abs() > self.ipo_threshold,
            kl_tau=self.kl_tau,
        )


def ref_kl_loss(inputs: LossInputs) -> LossOutputs:
    """Reverse KL to the reference as a policy gradient on the sampled tokens."""
    assert inputs.ref_logprobs is not None
    moved_N = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
    signal_N = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    outputs = _policy_gradient(inputs, signal_N, moved_N < REF_KL_FLOOR, kl_tau=REF_KL_TAU)
    metrics = {f"ref_kl/{name}": value for name, value in outputs.metrics.items()}
    metrics["ref_kl"] = _mean(signal_N, inputs.loss_mask)
    return LossOutputs(loss=outputs.loss, metrics=metrics)


def ce_loss(inputs: LossInputs) -> LossOutputs:
    """Negative log-likelihood."""
    charge_N = -inputs.trainer_logprobs * inputs.loss_mask
    if inputs.loss_weights is not None:
        charge_N = charge_N * inputs.loss_weights
    nll = _mean(-inputs.trainer_logprobs.detach(), inputs.loss_mask)
    return LossOutputs(loss=charge_N.sum(), metrics={"nll": nll})


def _policy_gradient(
    inputs: LossInputs, signal_N: Tensor, is_masked_N: Tensor, *, kl_tau: float
) -> LossOutputs:
    log_ratio_N = inputs.trainer_logprobs - inputs.inference_logprobs
    ratio_N = log_ratio_N.exp()
    keep_N = inputs.loss_mask & ~is_masked_N
    charge_N = -(keep_N * signal_N * ratio_N)
    charge_N = charge_N + inputs.loss_mask * (kl_tau * log_ratio_N**2)
    if inputs.loss_weights is not None:
        charge_N = charge_N * inputs.loss_weights
    mismatch_N = (ratio_N - log_ratio_N - 1).detach()
    metrics = {
        "masked_mismatch_kl": _mean(mismatch_N, inputs.loss_mask & is_masked_N),
        "unmasked_mismatch_kl": _mean(mismatch_N, keep_N),
        "is_masked": _mean(is_masked_N.float(), inputs.loss_mask),
    }
    return LossOutputs(loss=charge_N.sum(), metrics=metrics)


def _mean(values_N: Tensor, mask_N: Tensor) -> Tensor:
    return values_N[mask_N].sum() / mask_N.sum().clamp_min(1)


@dataclass(kw_only=True)
class TokenStreams:
    """One sequence as the orchestrator ships it to the trainer."""

    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    rl_weights: Tensor | None = None
    ce_weights: Tensor | None = None
    ref_kl_weights: Tensor | None = None

    def members(self, component: str) -> Tensor:
        """Tokens of a component: where its weight is not 0; only `rl` also asks `loss_mask`."""
        weights: Tensor | None = getattr(self, f"{component}_weights")
        if component == "rl":
            return self.loss_mask if weights is None else self.loss_mask & (weights != 0)
        return torch.zeros_like(self.loss_mask) if weights is None else weights != 0


def compute_loss(
    trainer_logprobs: list[Tensor],
    sequences: list[TokenStreams],
    policy_loss: Any,
) -> Tensor:
    """The trainer's loss on packed sequences of one rank; a token may feed several components."""
    losses = {"rl": policy_loss, "ce": ce_loss, "ref_kl": ref_kl_loss}
    scales = {
        name: sum(int(sequence.members(name).sum()) for sequence in sequences) for name in losses
    }
    total = torch.stack([logprobs.sum() * 0.0 for logprobs in trainer_logprobs]).sum()
    for logprobs, sequence in zip(trainer_logprobs, sequences, strict=True):
        for name, loss in losses.items():
            mask = sequence.members(name)
            if not bool(mask.any()):
                continue
            inputs = LossInputs(
                trainer_logprobs=logprobs,
                inference_logprobs=sequence.inference_logprobs,
                ref_logprobs=sequence.ref_logprobs,
                advantages=sequence.advantages,
                loss_mask=mask,
                loss_weights=getattr(sequence, f"{name}_weights"),
            )
            total = total + loss(inputs).loss / max(scales[name], 1)
    return total
