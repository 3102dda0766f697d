"""Channel 3, and SFT: which pairs a step sees, how they run, and what they are charged.

Dimensions in names: `B` pairs.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from trainer.data.budget import sides_of
from trainer.data.collator import ComposerDataCollator, add_reference_logps
from trainer.data.sampler import PairSampler, weight_of
from trainer.errors import TrainerConfigError
from trainer.losses.channels import replay_per_pair
from trainer.losses.compose import PairLogps
from trainer.model.causal_lm import causal_lm_of
from trainer.model.packing import (
    enable_tree_attention,
    packed_pair_logps,
    tree_pair_logps,
    trees_of,
)
from trainer.model.scoring import pair_logps
from trainer.model.tree_layout import PackedTree
from trainer.trl.config import ComposerConfig
from trainer.types import PairRow

__all__ = ["PairChannel", "Passes", "longest_of", "passes_of", "window_of"]

logger = logging.getLogger(__name__)

Passes = list[tuple[slice, Callable[[], PairLogps]]]
"""Forward passes of a batch of pairs: which of them, and what runs them."""

_SCORED = ("dpo_weight", "dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
"""What the preference loss reads of a batch beside the model's own log-probabilities."""


class PairChannel:
    """Draws pairs by step, runs them packed where that is exact, and charges them."""

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        args: ComposerConfig,
        collator: ComposerDataCollator,
        pairs: Sequence[PairRow | Mapping[str, Any]],
    ) -> None:
        """Order the pairs, score them by the untouched `model` where the loss needs that.

        Raises:
            TrainerConfigError: `pair_forward="packed"` and the model cannot.
        """
        self._model, self._accelerator, self._args = model, accelerator, args
        self._collator, self._options = collator, args.replay
        self._has_replay = args.beta_replay > 0
        self.pairs: Sequence[Mapping[str, Any]] = pairs
        if not self._has_replay:  # a tree has equal sides once
            self.pairs = [
                {**row, "sides": sides_of(row), "rejected": row["chosen"]} for row in pairs
            ]
        self.sampler = PairSampler(
            len(pairs),
            batch_size=args.pairs_per_step,
            seed=args.seed,
            groups=[str(row.get("session_id") or i) for i, row in enumerate(self.pairs)],
        )
        self.reference_logps = self._precompute_reference()
        self.forward = self._choose_forward()
        """How pairs run: packed, or padded with the reason."""

    def batch(self, step: int, *, part: int, n_parts: int, is_filled: bool) -> dict[str, Any]:
        """Return the pairs of one process and micro-batch, and the weights of all of the step.

        Args:
            step: optimizer step, counted from 0.
            part: which share of the step.
            n_parts: how many shares there are.
            is_filled: whether a share without a pair gets one of weight 0.
        """
        everything = self.sampler.step(step)
        mine = self.sampler.part(step, part=part, n_parts=n_parts)
        rows = [self.pairs[i] for i in everything]
        pairs: dict[str, Any] = {"n_parts": n_parts, "total_weight": sum(map(weight_of, rows))}
        if self._args.is_sft:
            ids_of = self._collator.renderer.response_ids
            pairs["total_tokens"] = sum(weight_of(row) * len(ids_of(row["chosen"])) for row in rows)
        is_filler = not mine and is_filled
        if is_filler:
            mine = everything[:1]
        if mine:
            # On the CPU, where trees are packed: what a pass needs is moved by the pass.
            pairs["batch"] = self._collator.pairs([self.pairs[i] for i in mine])
            if is_filler:
                pairs["batch"]["dpo_weight"].zero_()
            if self.reference_logps is not None:
                for k, side in enumerate(("chosen", "rejected")):
                    pairs["batch"][f"dpo_{side}_ref_logprobs"] = torch.tensor(
                        [self.reference_logps[i][k] for i in mine]
                    )
        return pairs

    def passes(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Passes:
        """Plan the forward passes of a batch of pairs."""
        n_pairs, max_tokens = len(batch["dpo_weight"]), self._args.max_packed_tokens
        if isinstance(model, FSDPModule):
            # Sharded ranks gather layers together: as many passes on each, so one.
            max_tokens = None
        # Within the window a sliding layer sees all there is; beyond it, trees are not exact.
        if self.forward == "packed" and longest_of(batch) <= window_of(model):
            return passes_of(model, trees_of(batch, max_tokens=max_tokens))
        step = n_pairs if max_tokens is None else max(max_tokens // (2 * longest_of(batch)), 1)
        parts = [slice(start, start + step) for start in range(0, n_pairs, step)]
        return [(rows, partial(self._padded_logps, model, batch, rows)) for rows in parts]

    def term(
        self, pairs: Mapping[str, Any], passes: Passes, *, is_kept: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Charge this rank's pairs, scaled so that DDP's mean over ranks is the mean of all.

        The backward pass of each forward pass follows at once where nothing else waits for the
        gradients, so that activations of `max_packed_tokens` are kept and not those of the batch.

        Args:
            pairs: of this micro-batch, as `batch` gives them.
            passes: which pairs run together, and what runs them.
            is_kept: whether the graph of the last pass must be left for the caller.

        Returns:
            What is charged, and by channel the figures of all ranks for the log.
        """
        accelerator = self._accelerator
        sums = torch.zeros(5, device=accelerator.device)
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
        figures = {"replay": sums[:4]} if self._has_replay else {}
        if self._args.is_sft:
            # The log averages micro-batches: their mean is to be the mean over the step's tokens.
            n_micro = pairs["n_parts"] / world
            loss = sums[4] * n_micro / max(pairs["total_tokens"], 1e-12)
            figures["policy"] = torch.stack([loss, torch.ones_like(loss)])
        return total, figures

    def charged(
        self, logps: PairLogps, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum what pairs are charged, by their weights.

        Returns:
            The preference loss; the negative log-likelihood of the chosen sides; and for the log
            loss, hits, margin and count of the pairs, and the same negative log-likelihood.
        """
        (chosen, n_chosen), (rejected, n_rejected) = logps
        weight = batch["dpo_weight"]
        unlikely = -(chosen * weight).sum()
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
        margin = (chosen / n_chosen.clamp_min(1) - rejected / n_rejected.clamp_min(1)).detach()
        measures = [losses.detach(), margin > 0, margin, torch.ones_like(margin)]
        is_real = weight > 0  # a filler has no weight and does not count
        noted = [measure.float().where(is_real, 0).sum() for measure in measures]
        noted.append(unlikely.detach().float())
        return (losses * weight).sum(), unlikely, torch.stack(noted)

    def _choose_forward(self) -> str:
        """Pack pairs where the model's attention can follow a tree and is seen to do so.

        Raises:
            TrainerConfigError: `pair_forward="packed"` and it cannot.
        """
        if self._args.pair_forward == "padded":
            return "padded: as set"
        try:
            enable_tree_attention(self._model)
            self._check_packed_equals_padded(self._model)
        except TrainerConfigError as error:
            if self._args.pair_forward == "packed":
                raise
            logger.warning("pairs run one at a time: %s", error)
            return f"padded: {error}"
        return "packed"

    @torch.no_grad()
    def _check_packed_equals_padded(self, model: nn.Module) -> None:
        """Run real pairs both ways on the real model, since no list of architectures is complete.

        Raises:
            TrainerConfigError: the log-probabilities per token differ.
        """
        rows = [self.pairs[i] for i in self.sampler.step(0)[:2]]
        batch = self._on_device(self._collator.pairs(rows))
        if longest_of(batch) > window_of(model):
            return  # such batches run padded anyway
        was_training = model.training
        model.eval()
        sides = [
            torch.cat([summed / n_tokens for summed, n_tokens in logps(model, batch)]).float()
            for logps in (packed_pair_logps, pair_logps)
        ]
        model.train(was_training)
        is_wide = next(model.parameters()).dtype.itemsize >= 4
        difference = float((sides[0] - sides[1]).abs().max())
        if not difference <= (1e-3 if is_wide else 0.1):
            raise TrainerConfigError(
                f"packed pairs differ from single ones by {difference:.2g} nats a token on "
                f"{type(model).__name__}"
            )

    def _precompute_reference(self) -> list[tuple[float, float]] | None:
        """Sum log-probs of both sides under the initial weights, once."""
        if not (self._has_replay and self._options.needs_reference):
            return None
        model = self._model
        was_training = model.training
        model.eval()
        logps: list[tuple[float, float]] = []
        for row in self.pairs:
            batch = self._on_device(self._collator.pairs([row]))
            batch = add_reference_logps(model, batch, forward=pair_logps)
            chosen, rejected = (
                float(batch[f"dpo_{side}_ref_logprobs"][0]) for side in ("chosen", "rejected")
            )
            logps.append((chosen, rejected))
        model.train(was_training)
        return logps

    def _padded_logps(
        self, model: nn.Module, batch: Mapping[str, Tensor], rows: slice
    ) -> PairLogps:
        part = {key: value[rows] for key, value in batch.items()}
        masks = {key: part.pop(key) for key in list(part) if key.endswith("response_mask")}
        return pair_logps(model, self._on_device(part) | masks)

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = self._accelerator.device
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def passes_of(model: nn.Module, trees: Sequence[PackedTree]) -> Passes:
    """Plan one forward pass a tree."""
    starts = itertools.accumulate((tree.n_pairs for tree in trees), initial=0)
    return [
        (slice(start, start + tree.n_pairs), partial(tree_pair_logps, model, tree))
        for start, tree in zip(starts, trees, strict=False)
    ]


def longest_of(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens of the longest sequence of a batch of pairs."""
    sides = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")
    return max(int(batch[name].sum(-1).max()) for name in sides)


def window_of(model: nn.Module) -> float:
    """Return the narrowest sliding window of a model's layers; infinite without one."""
    config = causal_lm_of(model).config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return float("inf")
    return getattr(config, "sliding_window", None) or float("inf")
