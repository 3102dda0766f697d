"""Channel 3 and SFT: the pairs of a step, their forward passes, their loss, and the order of both.

Dimensions in names: `B` pairs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import RepeatSampler

from trainer.data.budget import sides_of
from trainer.data.collator import ComposerDataCollator
from trainer.data.sampler import (
    PairSampler,
    balance_of,
    groups_of,
    imitation_weight,
    preference_weight,
)
from trainer.data.types import PairRow
from trainer.engines.trl.config import ComposerConfig
from trainer.losses.channels import replay_per_pair
from trainer.losses.compose import PairLogps
from trainer.model.packing import tree_pair_logps, trees_of
from trainer.model.scoring import (
    PairForward,
    choose_pair_forward,
    chunked_pair_logps,
    longest_of,
)
from trainer.model.tree_layout import PackedTree

Passes = list[tuple[slice, Callable[[], PairLogps]]]
"""The forward passes of a batch of pairs: the pairs of each pass, and the function that runs it."""

_SCORED = (
    "imitation_weight",
    "preference_weight",
    "balance",
    "dpo_chosen_ref_logprobs",
    "dpo_rejected_ref_logprobs",
)
"""What the preference loss reads of a batch beside the model's own log-probabilities."""


class PairChannel:
    """The channel, which draws pairs by step, runs them packed if that is exact, and computes their loss."""

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        args: ComposerConfig,
        collator: ComposerDataCollator,
        pairs: Sequence[PairRow | Mapping[str, Any]],
    ) -> None:
        """Order the pairs, score them by the untouched `model` where the loss needs that."""
        self._model, self._accelerator, self._args = model, accelerator, args
        self._collator, self._options = collator, args.preference
        self._has_replay = args.has_preference
        self.pairs: Sequence[Mapping[str, Any]] = pairs
        if not self._has_replay:  # a tree has equal sides once
            self.pairs = [
                {**row, "sides": sides_of(row), "rejected": row["chosen"]} for row in pairs
            ]
        self.sampler = PairSampler(
            len(pairs),
            batch_size=args.pairs_per_step,
            seed=args.seed,
            groups=groups_of(pairs, args.group_pairs_by),
        )
        rows = [self.pairs[i] for i in self.sampler.step(0)[:2]]
        self._forward = choose_pair_forward(
            model,
            self._on_device(collator.pairs(rows)),
            setting=args.pair_forward,
            max_tokens=args.max_packed_tokens,
            autocast=accelerator.autocast,
        )
        self.reference_logps: Tensor | None = None
        """Summed log-probs of both sides under the untouched model, [pairs, 2]."""
        if self._has_replay and self._options.needs_reference:
            self.reference_logps = reference_logps(
                model, self.pairs, collator, self._forward, accelerator
            )

    @property
    def forward(self) -> str:
        """Return how pairs run: packed, or padded with the reason."""
        return self._forward.choice

    def batch(self, step: int, *, part: int, n_parts: int, is_filled: bool) -> dict[str, Any]:
        """Return the pairs of one process and micro-batch, and the weights of all pairs of the step."""
        everything = self.sampler.step(step)
        mine = self.sampler.part(step, part=part, n_parts=n_parts)
        rows = [self.pairs[i] for i in everything]
        pairs: dict[str, Any] = {"total_weight": sum(map(preference_weight, rows))}
        if self._args.is_sft:
            ids_of = self._collator.renderer.side_ids
            pairs["total_tokens"] = sum(
                imitation_weight(row) * len(ids_of(row, "chosen")) for row in rows
            )
        is_filler = not mine and is_filled
        if is_filler:
            mine = everything[:1]
        if mine:
            # On the CPU, where trees are packed: what a pass needs is moved by the pass.
            rows = [self.pairs[i] for i in mine]
            pairs["batch"] = self._collator.pairs(rows) | {
                "preference_weight": torch.tensor([preference_weight(row) for row in rows]),
                "imitation_weight": torch.tensor([imitation_weight(row) for row in rows]),
                "balance": torch.tensor([balance_of(row) for row in rows]),
            }
            if is_filler:
                pairs["batch"]["preference_weight"].zero_()
                pairs["batch"]["imitation_weight"].zero_()
            if self.reference_logps is not None:
                for k, side in enumerate(("chosen", "rejected")):
                    pairs["batch"][f"dpo_{side}_ref_logprobs"] = self.reference_logps[mine, k]
        return pairs

    def passes(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Passes:
        """Plan the forward passes of a batch of pairs."""
        n_pairs, max_tokens = len(batch["preference_weight"]), self._args.max_packed_tokens
        if isinstance(model, FSDPModule):
            # Sharded ranks gather layers together: as many passes on each, so one.
            max_tokens = None
        if self.forward == "packed":
            return passes_of(model, trees_of(batch, max_tokens=max_tokens))
        step = n_pairs if max_tokens is None else max(max_tokens // (2 * longest_of(batch)), 1)
        parts = [slice(start, start + step) for start in range(0, n_pairs, step)]
        return [(rows, partial(self._padded_logps, model, batch, rows)) for rows in parts]

    def term(
        self, pairs: Mapping[str, Any], passes: Passes, *, is_kept: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of this rank's pairs, scaled so that DDP's mean over ranks is the mean of all pairs.

        If nothing else waits for the gradients, each forward pass is followed by its backward pass
        at once. So only the activations of `max_packed_tokens` are kept, and not those of the
        batch.

        Returns:
            The loss, and the figures of all ranks for the log, by channel.
        """
        accelerator = self._accelerator
        sums = torch.zeros(6, device=accelerator.device)
        total = sums.new_zeros(())
        world = accelerator.num_processes
        batch: dict[str, Tensor] = pairs.get("batch") or {}
        is_alone = accelerator.distributed_type == DistributedType.NO
        for which, (rows, forward) in enumerate(passes):
            with accelerator.autocast():
                # A wrapper reduces gradients once, in the one backward pass that it is told of.
                logps = (
                    forward()
                    if is_alone or len(passes) == 1 or (which == len(passes) - 1 and is_kept)
                    else checkpoint(forward, use_reentrant=False)
                )
            scored = {name: batch[name][rows] for name in _SCORED if name in batch}
            preference, unlikely, measures = self.charged(logps, self._on_device(scored))
            sums += measures
            term = total.new_zeros(())
            if self._has_replay:
                scale = self._args.beta_replay * world / max(pairs["total_weight"], 1e-12)
                term = scale * preference
            if self._args.is_sft:
                scale = self._args.policy_weight * world / max(pairs["total_tokens"], 1e-12)
                term = term + scale * unlikely
            if is_alone and (which < len(passes) - 1 or not is_kept):
                accelerator.backward(term)
                term = term.detach()
            total = total + term
        sums = accelerator.reduce(sums, reduction="sum")
        figures = {"replay": sums[:5]} if self._has_replay else {}
        if self._args.is_sft:
            loss = sums[5] / max(pairs["total_tokens"], 1e-12)
            figures["policy"] = torch.stack([loss, torch.ones_like(loss)])
        return total, figures

    def charged(
        self, logps: PairLogps, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted sum of the pairs' losses.

        Returns:
            The preference loss and the negative log-likelihood of the chosen sides. For the log,
            also the loss, weights, hits, margins, and count of the pairs, and the same likelihood.
        """
        (chosen, n_chosen), (rejected, n_rejected) = logps
        unlikely = -(chosen * batch["imitation_weight"]).sum()
        weight = batch["preference_weight"]
        losses = torch.zeros_like(chosen)
        if self._has_replay:
            losses = replay_per_pair(
                chosen,
                rejected,
                n_chosen,
                n_rejected,
                batch.get("dpo_chosen_ref_logprobs"),
                batch.get("dpo_rejected_ref_logprobs"),
                self._options,
            )
            losses = losses * batch["balance"]  # the mean is over weights without it, so it shrinks
        margin = (chosen / n_chosen.clamp_min(1) - rejected / n_rejected.clamp_min(1)).detach()
        measures = [losses.detach() * weight, weight, margin > 0, margin, torch.ones_like(margin)]
        is_real = weight > 0  # a filler has no weight and does not count
        noted = [measure.float().where(is_real, 0).sum() for measure in measures]
        noted.append(unlikely.detach().float())
        return (losses * weight).sum(), unlikely, torch.stack(noted)

    def _padded_logps(
        self, model: nn.Module, batch: Mapping[str, Tensor], rows: slice
    ) -> PairLogps:
        part = {key: value[rows] for key, value in batch.items()}
        masks = {key: part.pop(key) for key in list(part) if key.endswith("response_mask")}
        return chunked_pair_logps(model, self._on_device(part) | masks)

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = self._accelerator.device
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def passes_of(model: nn.Module, trees: Sequence[PackedTree]) -> Passes:
    """Plan one forward pass per tree."""
    starts = itertools.accumulate((tree.n_pairs for tree in trees), initial=0)
    return [
        (slice(start, start + tree.n_pairs), partial(tree_pair_logps, model, tree))
        for start, tree in zip(starts, trees, strict=False)
    ]


def reference_logps(
    model: nn.Module,
    pairs: Sequence[Mapping[str, Any]],
    collator: ComposerDataCollator,
    forward: PairForward,
    accelerator: Accelerator,
) -> Tensor:
    """Return the summed log-probs of both sides of each pair, [pairs, 2], on the CPU.

    Ranks share the work. Pairs of one trace run together, under the policy's autocast, so that both
    models agree before the first step.
    """
    was_training = model.training
    model.eval()
    device = accelerator.device
    found_B2 = torch.zeros(len(pairs), 2, device=device)
    order = sorted(range(len(pairs)), key=lambda i: str(pairs[i].get("session_id") or ""))
    n_ranks, rank = accelerator.num_processes, accelerator.process_index
    mine = order[len(order) * rank // n_ranks : len(order) * (rank + 1) // n_ranks]
    for start in range(0, len(mine), forward.batch_size):
        rows = mine[start : start + forward.batch_size]
        batch = collator.pairs([pairs[i] for i in rows])
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        (chosen, _), (rejected, _) = forward(model, batch)
        found_B2[rows] = torch.stack([chosen, rejected], -1).float()
    model.train(was_training)
    return accelerator.reduce(found_B2, reduction="sum").cpu()


def at_epoch(sampler: Any, epoch: int, *, seed: int) -> None:
    """Set a sampler to the order of an epoch.

    TRL's sampler draws the orders of all epochs from one generator. A run that resumes in a later
    epoch must skip the earlier orders, or it would repeat the first one.
    """
    if isinstance(sampler, RepeatSampler) and sampler.shuffle:
        sampler.generator.manual_seed(seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
