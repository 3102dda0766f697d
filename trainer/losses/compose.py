"""The reference implementation: three channels on one batch, without any framework.

total = LM cross-entropy + alpha_sdpo * self-distillation + beta_replay * trace-replay preference.

Dimensions in names: `B` sequences, `T` tokens, `V` vocabulary, `N` response tokens.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import TrainerConfigError
from trainer.losses.channels import (
    VARIANTS,
    ReplayOptions,
    SDPOOptions,
    Wrapper,
    distillation_per_token,
    replay_per_pair,
)
from trainer.losses.divergence import IGNORED_LABEL
from trainer.losses.logps import align_responses, response_logps

logger = logging.getLogger(__name__)

Batch = Mapping[str, Tensor]
"""Tensors by name, as `trainer.ComposerDataCollator` makes them.

- channel 1: `input_ids` [B, T], `attention_mask`, and `response_mask` or `labels` (-100: ignored)
- channel 2: `ctx_teacher_input_ids` [B, S], `ctx_teacher_attention_mask`,
  `ctx_teacher_response_mask` (the same response tokens behind the hinted prompt), `sdpo_mask` [B]
- channel 3: `dpo_chosen_input_ids`, `dpo_chosen_attention_mask`, `dpo_chosen_response_mask`,
  `dpo_chosen_ref_logprobs` [P], the same for `dpo_rejected_*`, and `dpo_weight` [P]
"""


PairLogps = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Summed log-probability and token count of the chosen sides, then of the rejected ones, each [P]."""

PairForward = Callable[[nn.Module, Batch], PairLogps]
"""Runs a model on the pairs of a batch: `pair_logps`, or an equivalent function with less memory."""


@dataclass(frozen=True, kw_only=True)
class LossComponents:
    """One step's loss, in total and by channel. A channel that is off is 0."""

    total: Tensor
    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor
    metrics: dict[str, float]
    """Values by `group/name`: losses, tokens or pairs, and gradient norms on request."""
    off: dict[str, str] = field(default_factory=dict)
    """The reason for each channel that is off (`sdpo`, `replay`)."""


def compose_loss(
    model: nn.Module,
    batch: Batch,
    *,
    alpha_sdpo: float = 0.0,
    beta_replay: float = 0.0,
    dpo_variant: str = "dpo",
    dpo_beta: float = 0.1,
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    rpo_alpha: float = 0.0,
    label_smoothing: float = 0.1,
    sdpo_wrapper: Wrapper = "none",
    taid_t: float | None = None,
    entropy_opd_h_max: float | None = None,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    sdpo_top_k: int | None = None,
    sdpo_token_clip: float | None = None,
    teacher: nn.Module | None = None,
    with_gradient_norms: bool = False,
) -> LossComponents:
    """Return the sum of LM cross-entropy, alpha * hinted self-distillation, and beta * trace-replay preference.

    `model` maps `input_ids` and `attention_mask` to an object with `.logits` [B, T, V]. Each
    channel is a mean over its own tokens or pairs, so they don't dilute each other. A channel with
    weight 0 or without its inputs is off: its loss is 0, `off` has the reason, and the log says so
    once. `teacher` sees the hinted context; by default it is the model itself, without gradient.

    >>> class Even(nn.Module):  # gives each of four tokens the same probability
    ...     def forward(self, input_ids, attention_mask):
    ...         return types.SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))
    >>> parts = compose_loss(Even(), {"input_ids": torch.tensor([[0, 1, 2, 3]])})
    >>> parts.total  # log 4
    tensor(1.3863)
    >>> parts.off
    {'sdpo': 'alpha_sdpo is 0', 'replay': 'beta_replay is 0'}

    Raises:
        TrainerConfigError: an option is out of range, or `input_ids` are missing.
        AlignmentError: student and teacher responses have different tokens.
    """
    sdpo_options = SDPOOptions(
        jsd_beta=jsd_beta,
        temperature=temperature,
        wrapper=sdpo_wrapper,
        taid_t=taid_t,
        entropy_opd_h_max=entropy_opd_h_max,
        top_k=sdpo_top_k,
        token_clip=sdpo_token_clip,
    )
    replay_options = ReplayOptions(
        variant=dpo_variant,
        dpo_beta=dpo_beta,
        simpo_beta=simpo_beta,
        simpo_gamma=simpo_gamma,
        rpo_alpha=rpo_alpha,
        label_smoothing=label_smoothing,
    )
    if "input_ids" not in batch:
        raise TrainerConfigError("the batch has no input_ids: build it with ComposerDataCollator")
    weights = {"policy": 1.0, "sdpo": alpha_sdpo, "replay": beta_replay}
    off = _off_channels(batch, alpha_sdpo, beta_replay, replay_options)
    for channel, reason in off.items():
        _say_once(channel, reason)
    logits_BTV = model_logits(model, batch["input_ids"], batch.get("attention_mask"))
    lm_ce, metrics = _cross_entropy(logits_BTV, batch)
    sdpo = replay = logits_BTV.new_zeros(())
    if "sdpo" not in off:
        sdpo, numbers = _sdpo(teacher or model, logits_BTV, batch, sdpo_options)
        metrics |= numbers
    if "replay" not in off:
        replay, numbers = _replay(model, batch, replay_options)
        metrics |= numbers
    parts = {"policy": lm_ce, "sdpo": sdpo, "replay": replay}
    weighted = {name: weights[name] * part for name, part in parts.items()}
    if with_gradient_norms:
        metrics |= gradient_norms(model, {k: v for k, v in weighted.items() if k not in off})
    total = lm_ce + weighted["sdpo"] + weighted["replay"]
    metrics["loss/total"] = float(total.detach())
    return LossComponents(
        total=total,
        lm_ce=lm_ce,
        sdpo_jsd=sdpo,
        trace_replay_dpo=replay,
        metrics=metrics,
        off=off,
    )


def model_logits(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Compute the logits [B, T, V] of a causal LM. Without a mask, it attends to everything."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    output: Any = model(input_ids=input_ids, attention_mask=attention_mask)
    return output.logits


def pair_logps(model: nn.Module, batch: Batch) -> PairLogps:
    """Sum the log-probs of chosen and rejected sides, and count their tokens, each [P], with one forward pass per side.

    This is the plain path, in which every pair runs its prompt twice.
    """
    sides = []
    for side in ("chosen", "rejected"):
        ids = batch[f"dpo_{side}_input_ids"]
        logits = model_logits(model, ids, batch.get(f"dpo_{side}_attention_mask"))
        sides.append(response_logps(logits, ids, batch[f"dpo_{side}_response_mask"]))
    return sides[0], sides[1]


def gradient_norms(model: nn.Module, losses: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of each loss's gradient, under `grad_norm/<name>`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = {}
    for name, loss in losses.items():
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        squares = [grad.float().pow(2).sum() for grad in grads if grad is not None]
        norms[f"grad_norm/{name}"] = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    return norms


def _cross_entropy(logits_BTV: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    labels_BT = batch.get("labels")
    if labels_BT is None:
        mask_BT = batch.get("response_mask", batch.get("attention_mask"))
        labels_BT = batch["input_ids"]
        if mask_BT is not None:
            labels_BT = labels_BT.masked_fill(mask_BT == 0, IGNORED_LABEL)
    targets_BT = labels_BT[:, 1:]
    n_tokens = int((targets_BT != IGNORED_LABEL).sum())
    summed = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="sum",
    )
    loss = summed / max(n_tokens, 1)
    return loss, {"policy/loss": float(loss.detach()), "policy/n_tokens": float(n_tokens)}


def _sdpo(
    teacher: nn.Module, logits_BTV: Tensor, batch: Batch, options: SDPOOptions
) -> tuple[Tensor, dict[str, float]]:
    alignment = align_responses(
        batch["input_ids"],
        batch["response_mask"],
        batch["ctx_teacher_input_ids"],
        batch["ctx_teacher_response_mask"],
        row_mask_B=batch.get("sdpo_mask"),
    )
    with torch.no_grad():
        teacher_BSV = model_logits(
            teacher, batch["ctx_teacher_input_ids"], batch.get("ctx_teacher_attention_mask")
        )
    per_token_N = distillation_per_token(
        logits_BTV[alignment.rows, alignment.student_positions - 1],
        teacher_BSV[alignment.rows, alignment.teacher_positions - 1],
        alignment.ids,
        options,
    )
    loss = per_token_N.sum() / max(len(alignment), 1)
    return loss, {"sdpo/loss": float(loss.detach()), "sdpo/n_tokens": float(len(alignment))}


def _replay(
    model: nn.Module, batch: Batch, options: ReplayOptions
) -> tuple[Tensor, dict[str, float]]:
    (chosen_P, n_chosen_P), (rejected_P, n_rejected_P) = pair_logps(model, batch)
    losses_P = replay_per_pair(
        chosen_P,
        rejected_P,
        n_chosen_P,
        n_rejected_P,
        batch.get("dpo_chosen_ref_logprobs"),
        batch.get("dpo_rejected_ref_logprobs"),
        options,
    )
    weight_P = batch.get("dpo_weight", torch.ones_like(losses_P))
    loss = (losses_P * weight_P).sum() / weight_P.sum().clamp_min(1e-12)
    return loss, {"replay/loss": float(loss.detach())} | preference_metrics(
        chosen_P / n_chosen_P.clamp_min(1), rejected_P / n_rejected_P.clamp_min(1)
    )


def preference_metrics(chosen_avg_logps: Tensor, rejected_avg_logps: Tensor) -> dict[str, float]:
    """Return the share of pairs whose chosen side is more likely, the mean margin, and the count."""
    margin = (chosen_avg_logps - rejected_avg_logps).detach()
    n_pairs = margin.numel()
    return {
        "replay/accuracy": float((margin > 0).float().mean()) if n_pairs else float("nan"),
        "replay/margin": float(margin.mean()) if n_pairs else float("nan"),
        "replay/n_pairs": float(n_pairs),
    }


def _off_channels(
    batch: Batch,
    alpha_sdpo: float,
    beta_replay: float,
    replay: ReplayOptions,
) -> dict[str, str]:
    off = {}
    needed = ("response_mask", "ctx_teacher_input_ids", "ctx_teacher_response_mask")
    hinted = batch.get("sdpo_mask")
    if alpha_sdpo == 0.0:
        off["sdpo"] = "alpha_sdpo is 0"
    elif missing := [key for key in needed if key not in batch]:
        off["sdpo"] = f"the batch has no {', '.join(missing)} (no row has a hint?)"
    elif hinted is not None and not bool(hinted.any()):
        off["sdpo"] = "no row of the batch has a hint"
    keys = ["input_ids", "response_mask"] + (["ref_logprobs"] if replay.needs_reference else [])
    needed = tuple(f"dpo_{side}_{key}" for side in ("chosen", "rejected") for key in keys)
    if beta_replay == 0.0:
        off["replay"] = "beta_replay is 0"
    elif missing := [key for key in needed if key not in batch]:
        off["replay"] = f"the batch has no {', '.join(missing)}"
        if missing == [key for key in needed if key.endswith("ref_logprobs")]:
            free = " or ".join(repr(n) for n, one in VARIANTS.items() if not one.needs_reference)
            off["replay"] += f" (add_reference_logps fills them in; dpo_variant={free} needs none)"
    elif batch["dpo_chosen_input_ids"].size(0) == 0:
        off["replay"] = "the batch has no pair"
    return off


@functools.lru_cache(maxsize=64)
def _say_once(channel: str, reason: str) -> None:
    level = logging.INFO if reason.endswith(" is 0") else logging.WARNING
    logger.log(level, "channel %s is off: %s", channel, reason)
