"""The three channels in Tinker's form: sequences with numbers per token, and losses on log-probs.

A server predicts `target_tokens[i]` from the input up to its token `i`. So targets are the sequence
shifted by one, and a response begins at target `len(prompt) - 1`.

Dimensions in names: `N` targets of a sequence, `R` response tokens, `K` entries of the teacher.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import Datum, ModelInput, TensorData
from torch import Tensor

from trainer.losses.channels import (
    ReplayOptions,
    SDPOOptions,
    divergence_per_token,
    replay_per_pair,
)
from trainer.losses.divergence import with_tail

CustomLoss = Callable[[Sequence[Datum], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]
"""A loss of data and the log-probs of their targets, in the form for `forward_backward_custom`."""

SIDES = ("chosen_ids", "rejected_ids")


@dataclass(kw_only=True)
class SampledResponse:
    """One sampled response to a recorded state."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """Log-probs of the response under the policy that sampled it."""
    advantage: float = 0.0
    teacher_ids_RK: Tensor | None = None
    """The most likely tokens under the policy with the hinted prompt. `None` without a hint."""
    teacher_logps_RK: Tensor | None = None
    """Log-probs of `teacher_ids_RK`."""


def policy_datums(
    rollouts: Sequence[SampledResponse],
    *,
    objective: str,
    weight: float,
    max_completion_length: int,
) -> list[Datum]:
    """Return the rollouts with advantages, for the loss `importance_sampling`.

    Tinker sums the loss over all tokens, so the advantages contain the objective's mean: over
    sequences and then tokens (`grpo`), over all tokens (`bnpo`, `dapo`), or over the longest
    possible response (`dr_grpo`).
    """
    n_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    datums = []
    for rollout in rollouts:
        n_own = len(rollout.response_ids)
        divisor = {
            "grpo": len(rollouts) * n_own,
            "dr_grpo": len(rollouts) * max_completion_length,
        }.get(objective, n_tokens)
        if rollout.advantage * weight != 0.0:
            datums.append(_scored_datum(rollout, [weight * rollout.advantage / divisor] * n_own))
    return datums


def sampled_distillation_datums(
    rollouts: Sequence[SampledResponse], *, weight: float
) -> list[Datum]:
    """Return hinted rollouts with `log p_teacher - log p_student` as each token's advantage.

    Under `importance_sampling`, this has the gradient of `sampled_reverse_kl_per_token`, as a mean.
    """
    hinted = [(r, r.teacher_logps_RK) for r in rollouts if r.teacher_logps_RK is not None]
    n_tokens = sum(len(rollout.response_ids) for rollout, _ in hinted)
    return [
        _scored_datum(
            rollout,
            [
                weight * (teacher - own) / n_tokens
                for teacher, own in zip(teacher_R1[:, 0].tolist(), rollout.logprobs, strict=True)
            ],
        )
        for rollout, teacher_R1 in hinted
    ]


def _scored_datum(rollout: SampledResponse, advantages: list[float]) -> Datum:
    ids = [*rollout.prompt_ids, *rollout.response_ids]
    unscored = [0.0] * (len(rollout.prompt_ids) - 1)
    return Datum(
        model_input=ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [*unscored, *rollout.logprobs],
            "advantages": [*unscored, *advantages],
        },
    )


def distillation_datums(rollouts: Sequence[SampledResponse]) -> list[Datum]:
    """Return hinted rollouts whose targets are the teacher's K most likely tokens at each position."""
    datums = []
    for rollout in rollouts:
        if rollout.teacher_ids_RK is None:
            continue
        ids = [*rollout.prompt_ids, *rollout.response_ids]
        n_before = len(rollout.prompt_ids) - 1
        # A prompt's targets are never looked at; token 0 stands in for them.
        targets_NK = torch.nn.functional.pad(rollout.teacher_ids_RK.long(), (0, 0, n_before, 0))
        datums.append(
            Datum(
                model_input=ModelInput.from_ints(ids[:-1]),
                # Dense: the SDK counts a sparse tensor's values where it needs its shape.
                loss_fn_inputs={"target_tokens": TensorData.from_torch(targets_NK)},
            )
        )
    return datums


def distillation_loss(
    rollouts: Sequence[SampledResponse], options: SDPOOptions, *, weight: float
) -> CustomLoss:
    """Make channel 2's loss on the log-probs of `distillation_datums(rollouts)`.

    It compares the teacher's K entries, and the rest of each side as one more entry. This equals
    the core's `teacher_topk`, as a mean over the hinted tokens.
    """
    hinted = [rollout for rollout in rollouts if rollout.teacher_logps_RK is not None]

    def loss(_: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        per_token = []
        for rollout, student_NK in zip(hinted, logprobs, strict=True):
            assert rollout.teacher_logps_RK is not None
            student_RK = student_NK[len(rollout.prompt_ids) - 1 :]
            teacher_RK = rollout.teacher_logps_RK.to(student_RK.dtype)
            per_token.append(
                divergence_per_token(with_tail(student_RK), with_tail(teacher_RK), options)
            )
        mean = torch.cat(per_token).mean()
        return weight * mean, {"sdpo/divergence": float(mean.detach())}

    return loss


def pair_datums(rows: Sequence[Mapping[str, Any]]) -> list[Datum]:
    """Return both sides of tokenized pairs: chosen, rejected, chosen, …."""
    datums = []
    for row in rows:
        for side in SIDES:
            ids = [*row["prompt_ids"], *row[side]]
            datums.append(
                Datum(
                    model_input=ModelInput.from_ints(ids[:-1]),
                    loss_fn_inputs={"target_tokens": ids[1:]},
                )
            )
    return datums


def pair_loss(
    rows: Sequence[Mapping[str, Any]],
    reference: Sequence[tuple[float, float]] | None,
    options: ReplayOptions,
    *,
    weight: float,
) -> CustomLoss:
    """Make channel 3's loss on the log-probs of `pair_datums(rows)`: the pairs' weighted mean.

    Args:
        rows: tokenized pairs.
        reference: summed log-probs of both sides under the policy at the start of the run.
        options: options of the preference loss.
        weight: weight of the channel.
    """

    def loss(_: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        starts = [len(row["prompt_ids"]) - 1 for row in rows for _ in SIDES]
        sums = torch.stack([lp[n:].sum() for lp, n in zip(logprobs, starts, strict=True)])
        lengths = torch.tensor([float(len(row[side])) for row in rows for side in SIDES])
        kept = None if reference is None else torch.tensor(reference).to(sums)
        losses = replay_per_pair(
            sums[0::2],
            sums[1::2],
            lengths[0::2],
            lengths[1::2],
            None if kept is None else kept[:, 0],
            None if kept is None else kept[:, 1],
            options,
        )
        weights = torch.tensor([float(row["weight"]) for row in rows])
        mean = (losses * weights).sum() / weights.sum()
        averages = (sums / lengths).detach()
        share = (averages[0::2] > averages[1::2]).float().mean()
        return weight * mean, {
            "replay/preference_loss": float(mean.detach()),
            "replay/accuracy": float(share),
        }

    return loss
