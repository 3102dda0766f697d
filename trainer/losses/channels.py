"""Channels 2 and 3 as losses per token and per pair, shared by all engines.

Dimensions in names: `B` pairs, `N` response tokens, `V` vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import TrainerConfigError
from trainer.losses.divergence import (
    generalized_jsd_loss,
    jsd_entries,
    log_probs,
    taken,
    with_tail,
)
from trainer.losses.entropy_opd import soft_gated_kl_per_token
from trainer.losses.preference import dpo_per_pair, simpo_per_pair
from trainer.losses.taid import taid_per_token

Wrapper = Literal["none", "taid", "entropy_opd"]
Estimator = Literal["full", "topk", "teacher_topk", "sampled"]
DEFAULT_TOP_K = 100
"""Default number of entries of a top-k estimator."""


@dataclass(frozen=True, kw_only=True)
class SDPOOptions:
    """Options of channel 2, which pulls the student toward its hinted self."""

    jsd_beta: float = 0.5
    """Mixture weight. 0 gives KL(teacher || student), and 1 gives KL(student || teacher)."""
    temperature: float = 1.0
    wrapper: Wrapper = "none"
    """Variant of the divergence: plain, a TAID target, or the entropy-gated KLs."""
    taid_t: float | None = None
    """Weight of the teacher in the TAID target, in [0, 1]."""
    entropy_opd_h_max: float | None = None
    """Entropy (nats) at which the soft gate is fully forward KL. `None` means log V."""
    estimator: Estimator = "full"
    top_k: int | None = None
    """With the estimator "full", only the teacher's top-k count, renormalized. With "topk" (the
    student's) and "teacher_topk", this many entries count, and the rest is one more entry. `None`
    means 100."""
    token_clip: float | None = None
    """Upper limit on every vocabulary entry's part of the divergence. `None` means no limit."""

    def __post_init__(self) -> None:
        """Check what a step would only find out later.

        Raises:
            TrainerConfigError: a value out of range, or TAID without its `taid_t`.
        """
        if self.wrapper not in ("none", "taid", "entropy_opd"):
            raise TrainerConfigError(
                f"sdpo_wrapper={self.wrapper!r} is not none, taid or entropy_opd"
            )
        if self.estimator not in ("full", "topk", "teacher_topk", "sampled"):
            raise TrainerConfigError(
                f"sdpo_estimator={self.estimator!r} is not full, topk, teacher_topk or sampled"
            )
        if self.estimator == "sampled" and self.wrapper != "none":
            raise TrainerConfigError(
                f"sdpo_wrapper={self.wrapper!r} needs distributions: with "
                "sdpo_estimator='sampled' only the log-prob of the sampled token is known"
            )
        if self.taid_t is not None and not 0.0 <= self.taid_t <= 1.0:
            raise TrainerConfigError(f"taid_t={self.taid_t} is not in [0, 1]")
        if not 0.0 <= self.jsd_beta <= 1.0:
            raise TrainerConfigError(f"jsd_beta={self.jsd_beta} is not in [0, 1]")
        if self.temperature <= 0.0:
            raise TrainerConfigError(f"temperature={self.temperature} must be positive")

    @property
    def is_plain(self) -> bool:
        """Return whether this is the plain divergence over the full vocabulary, which can be fused."""
        return (
            self.wrapper == "none"
            and self.estimator == "full"
            and self.top_k is None
            and self.token_clip is None
        )

    def at(self, taid_t: float) -> "SDPOOptions":
        """Return a copy of the options with another `taid_t`."""
        return replace(self, taid_t=taid_t)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of channel 3's loss for a pair."""

    variant: str = "dpo"
    """The preference loss, one of `VARIANTS`."""
    dpo_beta: float = 0.1
    """Scale of all variants with a reference: of summed log-probs, or of averaged ones in "dpo_norm" and
    "ipo" (for "dpo_norm" about 2 is good)."""
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0
    rpo_alpha: float = 0.0
    """Weight of the chosen side's log-likelihood per token, for any variant (RPO)."""
    label_smoothing: float = 0.1
    """Share of pairs whose sides are believed to be swapped, for "robust"."""

    def __post_init__(self) -> None:
        """Check the name of the variant and the weight.

        Raises:
            TrainerConfigError: unknown variant, or a negative weight.
        """
        if self.rpo_alpha < 0:
            raise TrainerConfigError(f"rpo_alpha={self.rpo_alpha} is negative")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise TrainerConfigError(f"label_smoothing={self.label_smoothing} is not in [0, 0.5)")
        if self.variant not in VARIANTS:
            *names, last = VARIANTS
            known = f"{', '.join(names)} or {last}"
            raise TrainerConfigError(f"dpo_variant={self.variant!r} is not {known}")

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss needs log-probabilities of a reference model."""
        return VARIANTS[self.variant].needs_reference


PREFERENCE_NUMBERS = tuple(entry.name for entry in fields(ReplayOptions) if entry.name != "variant")
"""The options of channel 3 beside its variant, by their names in settings."""


class PairSides(NamedTuple):
    """What a preference loss knows of pairs, each [B]: summed log-probs, token counts, and the reference's."""

    chosen: Tensor
    rejected: Tensor
    n_chosen: Tensor
    n_rejected: Tensor
    ref_chosen: Tensor
    """NaN if there is no reference."""
    ref_rejected: Tensor

    @property
    def averaged(self) -> "PairSides":
        """Return the same per token."""
        n_chosen, n_rejected = self.n_chosen.clamp_min(1), self.n_rejected.clamp_min(1)
        return self._replace(
            chosen=self.chosen / n_chosen,
            rejected=self.rejected / n_rejected,
            ref_chosen=self.ref_chosen / n_chosen,
            ref_rejected=self.ref_rejected / n_rejected,
        )

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Return the log-probs of both sides less those of the reference."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected


@dataclass(frozen=True)
class PreferenceVariant:
    """A preference loss for each pair, [B]."""

    loss: Callable[[PairSides, ReplayOptions], Tensor]
    needs_reference: bool


VARIANTS: dict[str, PreferenceVariant] = {}
"""The preference losses by their names. Settings, engines, and messages read them here."""


def _variant(name: str, *, needs_reference: bool) -> Callable[..., Callable[..., Tensor]]:
    def register(loss: Callable[[PairSides, ReplayOptions], Tensor]) -> Callable[..., Tensor]:
        VARIANTS[name] = PreferenceVariant(loss, needs_reference)
        return loss

    return register


@_variant("dpo", needs_reference=True)
def _dpo(sides: PairSides, options: ReplayOptions) -> Tensor:
    of_policy, of_reference = (sides.chosen, sides.rejected), (sides.ref_chosen, sides.ref_rejected)
    return dpo_per_pair(*of_policy, *of_reference, beta=options.dpo_beta)


@_variant("dpo_norm", needs_reference=True)
def _dpo_norm(sides: PairSides, options: ReplayOptions) -> Tensor:
    return _dpo(sides.averaged, options)


@_variant("simpo", needs_reference=False)
def _simpo(sides: PairSides, options: ReplayOptions) -> Tensor:
    averages = sides.averaged
    beta, gamma = options.simpo_beta, options.simpo_gamma
    return simpo_per_pair(averages.chosen, averages.rejected, beta=beta, gamma=gamma)


# TRL computes those below inside of a method of its trainer, so each is written once more here.


@_variant("ipo", needs_reference=True)
def _ipo(sides: PairSides, options: ReplayOptions) -> Tensor:
    """Azar et al. 2023, arXiv:2310.12036, eq. 17, on averages as its authors use it."""
    chosen, rejected = sides.averaged.ratios
    return (chosen - rejected - 1 / (2 * options.dpo_beta)).square()


@_variant("robust", needs_reference=True)
def _robust(sides: PairSides, options: ReplayOptions) -> Tensor:
    """Chowdhury et al. 2024, arXiv:2403.00409: unbiased if a known share of the labels is swapped."""
    chosen, rejected = sides.ratios
    margin, swapped = options.dpo_beta * (chosen - rejected), options.label_smoothing
    kept = (1 - swapped) * F.logsigmoid(margin) - swapped * F.logsigmoid(-margin)
    return -kept / (1 - 2 * swapped)


@_variant("bco_pair", needs_reference=True)
def _bco_pair(sides: PairSides, options: ReplayOptions) -> Tensor:
    """Jung et al. 2024, arXiv:2404.04656: each side is classified by itself."""
    chosen, rejected = (options.dpo_beta * ratio for ratio in sides.ratios)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@_variant("apo_zero", needs_reference=True)
def _apo_zero(sides: PairSides, options: ReplayOptions) -> Tensor:
    """D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7: the chosen side up, the rejected one down."""
    chosen, rejected = (options.dpo_beta * ratio for ratio in sides.ratios)
    return 1 - chosen.sigmoid() + rejected.sigmoid()


@_variant("apo_down", needs_reference=True)
def _apo_down(sides: PairSides, options: ReplayOptions) -> Tensor:
    """The same, eq. 8: both sides down, the rejected one more."""
    chosen, rejected = (options.dpo_beta * ratio for ratio in sides.ratios)
    return chosen.sigmoid() + 1 - (chosen - rejected).sigmoid()


def distillation_per_token(
    student_logits_NV: Tensor,
    teacher_logits_NV: Tensor,
    ids_N: Tensor,
    options: SDPOOptions,
) -> Tensor:
    """Compute the loss of channel 2 for each response token, [N].

    The estimator "full" sums over the vocabulary. "topk" keeps the *student's* k most likely
    entries, "teacher_topk" the teacher's, which a scoring server can return, and both put the rest
    into one more entry. "sampled" is `sampled_reverse_kl_per_token`.

    Source: SDPO, arXiv:2601.20802, sec. 3.
    """
    teacher_logits_NV = teacher_logits_NV.detach()
    if options.estimator == "full" and options.wrapper == "none":
        return generalized_jsd_loss(
            student_logits_NV,
            teacher_logits_NV,
            beta=options.jsd_beta,
            temperature=options.temperature,
            reduction="none",
            top_k=options.top_k,
            token_clip=options.token_clip,
        ).sum(-1)
    if options.estimator == "full":
        scale = 1.0 / options.temperature
        return _wrapped_per_token(student_logits_NV * scale, teacher_logits_NV * scale, options)
    student_logp, teacher_logp = (
        log_probs(logits, options.temperature) for logits in (student_logits_NV, teacher_logits_NV)
    )
    if options.estimator == "sampled":
        student_N, teacher_N = (taken(logp, ids_N) for logp in (student_logp, teacher_logp))
        return sampled_reverse_kl_per_token(student_N, teacher_N)
    chooser_NV = teacher_logp if options.estimator == "teacher_topk" else student_logp
    top_k = min(options.top_k or DEFAULT_TOP_K, chooser_NV.size(-1))
    kept_NK = chooser_NV.topk(top_k, dim=-1).indices
    student_NK, teacher_NK = (
        with_tail(logp.gather(-1, kept_NK)) for logp in (student_logp, teacher_logp)
    )
    return divergence_per_token(student_NK, teacher_NK, options)


def sampled_reverse_kl_per_token(student_logps_N: Tensor, teacher_logps_N: Tensor) -> Tensor:
    """Estimate KL(student || teacher) from the sampled tokens alone, by the score function, [N].

    The formula is `(log p_s - log p_t).detach() log p_s`. Over tokens that the student sampled, its
    expected gradient is that of the divergence. Its value has no meaning, and is negative half of
    the time. Use it for channel 2 if there are no logits.

    Source: SDPO, arXiv:2601.20802, sec. 3 (token-level credit).
    """
    return (student_logps_N - teacher_logps_N).detach() * student_logps_N


def divergence_per_token(
    student_logp_NK: Tensor, teacher_logp_NK: Tensor, options: SDPOOptions
) -> Tensor:
    """Compute channel 2 from log-distributions over one support, [N].

    The support is a part of the vocabulary, with the rest as one entry (`with_tail`), as a scoring
    server returns it. The server has already applied temperature, estimator, and top-k.
    """
    teacher_logp_NK = teacher_logp_NK.detach()
    if options.wrapper != "none":
        return _wrapped_per_token(student_logp_NK, teacher_logp_NK, options)
    entries_NK = jsd_entries(student_logp_NK, teacher_logp_NK, options.jsd_beta)
    if options.token_clip is not None:
        entries_NK = entries_NK.clamp(max=options.token_clip)
    return entries_NK.sum(-1)


def _wrapped_per_token(student_NV: Tensor, teacher_NV: Tensor, options: SDPOOptions) -> Tensor:
    """Apply TAID or the entropy gate to logits, or to log-probs, which are logits as well.

    Raises:
        TrainerConfigError: `taid_t` is missing.
    """
    if options.wrapper == "entropy_opd":
        return soft_gated_kl_per_token(student_NV, teacher_NV, h_max=options.entropy_opd_h_max)
    if options.taid_t is None:
        raise TrainerConfigError("sdpo_wrapper='taid' needs taid_t, e.g. TAIDScheduler(...).t")
    return taid_per_token(student_NV, teacher_NV, t=options.taid_t)


def replay_per_pair(
    chosen_logps_B: Tensor,
    rejected_logps_B: Tensor,
    n_chosen_B: Tensor,
    n_rejected_B: Tensor,
    ref_chosen_logps_B: Tensor | None,
    ref_rejected_logps_B: Tensor | None,
    options: ReplayOptions,
) -> Tensor:
    """Compute the loss of channel 3 for each pair, [B]. Log-probs are sums; `n_*` count tokens.

    A preference loss only wants a difference, and often gets it by making both sides less likely.
    `rpo_alpha` times the chosen side's negative log-likelihood per token prevents that.

    Source: Pang et al. 2024 (iterative reasoning preference optimization), arXiv:2404.19733, eq. 1.

    Raises:
        TrainerConfigError: a variant with a reference got no reference log-probs.
    """
    variant, references = VARIANTS[options.variant], (ref_chosen_logps_B, ref_rejected_logps_B)
    if variant.needs_reference and any(one is None for one in references):
        raise TrainerConfigError(f"dpo_variant={options.variant!r} needs reference log-probs")
    unknown_B = torch.full_like(chosen_logps_B, torch.nan)
    sides = PairSides(
        chosen_logps_B,
        rejected_logps_B,
        n_chosen_B,
        n_rejected_B,
        *(unknown_B if one is None else one for one in references),
    )
    return variant.loss(sides, options) - options.rpo_alpha * sides.averaged.chosen


def replay_credit(
    chosen_logps_B: Tensor,
    rejected_logps_B: Tensor,
    n_chosen_B: Tensor,
    n_rejected_B: Tensor,
    ref_chosen_logps_B: Tensor | None,
    ref_rejected_logps_B: Tensor | None,
    options: ReplayOptions,
) -> tuple[Tensor, Tensor]:
    """Compute channel 3 as advantages of the tokens in the chosen [B] and the rejected side [B] of pairs.

    This is for engines that can't see two responses at once, and only accept credit per token.
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
