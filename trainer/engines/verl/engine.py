"""VeRL's FSDP engine with channels 2 and 3 in every training step.

VeRL passes the logits of a micro-batch (a hook for its own distillation) and all columns of the
batch to the loss function, so channel 2 needs no change of the trainer. Channel 3 is one more
forward and backward pass before the optimizer step. Channel 1 calls VeRL's own loss.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from trainer.engines.handover import (
    PairPart,
    TokenizedPairs,
    read_reference,
    write_reference,
)
from trainer.engines.verl.losses import (
    is_scored,
    pair_terms,
    share_of_mean,
    topk_divergence,
)
from trainer.engines.verl.options import PluginOptions, current_options
from trainer.errors import DatasetError, TrainerConfigError
from trainer.losses.channels import SDPOOptions

logger = logging.getLogger(__name__)

LossFunction = Callable[..., Any]
TEACHER_COLUMNS = ("teacher_ids", "teacher_logprobs")


class ComposerEngine(FSDPEngineWithLMHead):
    """A `FSDPEngineWithLMHead` that trains on three channels.

    Outside training (for log-probs of the policy or of a reference) it behaves as VeRL's engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._options: PluginOptions | None = None
        self._pairs: TokenizedPairs | None = None
        self._reference: Tensor | None = None

    @property
    def options(self) -> PluginOptions:
        """Return the options of this run."""
        if self._options is None:
            options = current_options()
            if options.alpha_sdpo > 0:
                self._check_logits()
            self._options = options
        return self._options

    def _check_logits(self) -> None:
        if self.engine_config.use_fused_kernels:
            raise TrainerConfigError(
                "channel 2 needs logits: set actor_rollout_ref.model.use_fused_kernels=False"
            )
        if self.ulysses_sequence_parallel_size > 1 or self.pad_to_length:
            raise TrainerConfigError(
                "channel 2 needs whole sequences on a rank: set ulysses_sequence_parallel_size=1 "
                "and pad_to_length=False under actor_rollout_ref.actor"
            )

    def forward_backward_batch(
        self,
        data: Any,
        loss_function: LossFunction,
        forward_only: bool = False,  # noqa: FBT001, FBT002 - VeRL's signature
    ) -> Any:
        """Run all three channels of one mini-batch, or VeRL's own pass outside training."""
        if forward_only or loss_function is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        options, step, own_loss = self.options, self.optimizer_steps(), loss_function

        def weighted(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, Any]:
            loss, found = own_loss(model_output=model_output, data=data, dp_group=dp_group)
            return options.policy_weight * loss, found

        loss_function = weighted
        metrics: dict[str, float] = {}
        if options.alpha_sdpo > 0:
            n_tokens = self._n_hinted_tokens(data)
            metrics["sdpo/n_tokens"] = n_tokens
            if n_tokens > 0:
                tu.assign_non_tensor(data, distillation_use_topk=True)
                loss_function = WithDistillation(
                    loss_function, options.sdpo_at(step), options.alpha_sdpo, n_tokens
                )
        output = super().forward_backward_batch(data, loss_function, forward_only)
        if isinstance(loss_function, WithDistillation):
            metrics["sdpo/loss"] = self._summed(loss_function.sum) / metrics["sdpo/n_tokens"]
            if loss_function.options.wrapper == "taid":
                metrics["sdpo/taid_t"] = float(loss_function.options.taid_t or 0.0)
        if options.beta_replay > 0:
            metrics |= self._replay(options, step)
        for name, value in metrics.items():
            output["metrics"][name] = [value]
        return output

    def optimizer_steps(self) -> int:
        """Count the optimizer steps, including earlier runs, from the optimizer's state."""
        for state in self.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return 0

    def _summed(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=get_device_id())
        dist.all_reduce(total, group=self.get_data_parallel_group())
        return float(total)

    # -- channel 2 -------------------------------------------------------------------------------

    def _n_hinted_tokens(self, data: Any) -> float:
        missing = [name for name in TEACHER_COLUMNS if name not in data]
        if missing:
            raise DatasetError(
                f"alpha_sdpo={self.options.alpha_sdpo} and the batch has no {missing[0]}: set "
                "actor_rollout_ref.rollout.agent.agent_loop_manager_class to "
                "trainer.engines.verl.agent_loop.HintedAgentLoopManager"
            )
        scored = is_scored(data["teacher_ids"].values()).float()
        return self._summed(float((no_padding_2_padding(scored, data) * response_mask(data)).sum()))

    # -- channel 3 -------------------------------------------------------------------------------

    @property
    def pairs(self) -> TokenizedPairs:
        """Return the run's pairs."""
        if self._pairs is None:
            self._pairs = TokenizedPairs(self.options.pairs)
        return self._pairs

    def _replay(self, options: PluginOptions, step: int) -> dict[str, float]:
        """Run forward and backward of this rank's share of the step's pairs; give the metrics."""
        pairs = self.pairs
        if options.preference.needs_reference and self._reference is None:
            self._reference = self._reference_logps(options, step)
        drawn = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed).step(step)
        part = self._part(drawn, options)
        loss = PairLoss(options, part.total_weight)
        super().forward_backward_batch(self._pair_batch(part, options), loss, False)
        n_pairs = self._summed(loss.n_pairs)
        return {
            "replay/loss": self._summed(loss.loss) / part.total_weight,
            "replay/accuracy": self._summed(loss.n_hits) / n_pairs,
            "replay/margin": self._summed(loss.margin) / n_pairs,
            "replay/n_pairs": n_pairs,
        }

    def _part(self, drawn: Sequence[int], options: PluginOptions) -> PairPart:
        n_ranks = self.get_data_parallel_size()
        longest = -(-len(drawn) // n_ranks)
        return self.pairs.part(
            drawn,
            rank=self.get_data_parallel_rank(),
            n_ranks=n_ranks,
            multiple=min(options.pairs_per_pass, longest),
        )

    def _pair_batch(self, part: PairPart, options: PluginOptions) -> Any:
        columns = self.pairs.tensors(part.indices)
        columns["pair_weight"] = torch.tensor(part.weights).repeat_interleave(2)
        if self._reference is not None:
            columns["reference_logps"] = self._reference[list(part.indices)].flatten()
        batch = DataProto.from_single_dict(columns, meta_info={"temperature": 1.0})
        data = left_right_2_no_padding(batch.to_tensordict())
        tu.assign_non_tensor(
            data,
            global_batch_size=len(part.indices) * 2 * self.get_data_parallel_size(),
            use_remove_padding=self.use_remove_padding,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2 * min(options.pairs_per_pass, len(part.indices)),
            use_fused_kernels=False,
        )
        return data

    def _reference_logps(self, options: PluginOptions, step: int) -> Tensor:
        """Sum log-probs of all pairs [n, 2] under the weights that the run began with.

        Raises:
            DatasetError: the reference file is missing or belongs to other pairs.
        """
        if (kept := read_reference(options.reference, self.pairs)) is not None:
            return torch.tensor(kept)
        if step > 0:
            raise DatasetError(
                f"{options.reference} does not hold the reference log-probs of these pairs, and the "
                f"weights have moved {step} steps since the start: restore the file, or start over"
            )
        everything = range(len(self.pairs))
        part = self._part(everything, options)
        sums: list[Tensor] = []

        def scores(model_output: Any, data: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            logps = no_padding_2_padding(model_output["log_probs"], data)
            sums.append((logps * response_mask(data)).sum(-1))
            return logps.sum(), {}

        with torch.no_grad():
            super().forward_backward_batch(self._pair_batch(part, options), scores, True)
        logps = torch.zeros(len(self.pairs), 2, device=get_device_id())
        summed = torch.cat(sums).view(-1, 2).to(logps)
        for index, weight, row in zip(part.indices, part.weights, summed, strict=True):
            if weight > 0:
                logps[index] = row
        dist.all_reduce(logps, group=self.get_data_parallel_group())
        logps = logps.cpu()
        if self.rank == 0:
            write_reference(options.reference, self.pairs, logps.tolist())
        return logps


class WithDistillation:
    """Another loss plus channel 2. VeRL calls it twice per micro-batch.

    The first call has `student_logits` and returns numbers per position. The second has the model's
    output, which contains these numbers, cut and padded like log-probs.
    """

    def __init__(
        self, inner: LossFunction, options: SDPOOptions, alpha: float, n_tokens: float
    ) -> None:
        """Keep the options; `n_tokens` are the hinted tokens of the mini-batch over all ranks."""
        self.inner, self.options, self.alpha, self.n_tokens = inner, options, alpha, n_tokens
        self.sum = 0.0
        """Divergence summed over this rank's hinted tokens."""

    def __call__(
        self,
        model_output: Any = None,
        data: Any = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
    ) -> Any:
        """Compute per-position columns, or loss and metrics."""
        teacher_ids = data["teacher_ids"].values()
        if student_logits is not None:
            per_token = topk_divergence(
                student_logits[0], teacher_ids, data["teacher_logprobs"].values(), self.options
            )
            return {"sdpo": per_token[None]}
        loss, metrics = self.inner(model_output=model_output, data=data, dp_group=dp_group)
        values = no_padding_2_padding(model_output["sdpo"], data)
        scored = is_scored(teacher_ids).to(values.dtype)
        mask = no_padding_2_padding(scored, data) * response_mask(data)
        self.sum += float((values.detach() * mask).sum())
        share = share_of_mean(values, mask, total=self.n_tokens, n_ranks=data["dp_size"])
        return loss + self.alpha * share, metrics


class PairLoss:
    """Channel 3 for a micro-batch of pairs, and its sums for the metrics."""

    def __init__(self, options: PluginOptions, total_weight: float) -> None:
        """Keep the options; `total_weight` is that of the step's pairs over all ranks."""
        self.options, self.total_weight = options, total_weight
        self.loss = self.n_hits = self.margin = self.n_pairs = 0.0

    def __call__(self, model_output: Any, data: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of these pairs."""
        logps = no_padding_2_padding(model_output["log_probs"], data)
        reference = data.get("reference_logps", None)
        losses, margins = pair_terms(logps, response_mask(data), reference, self.options.preference)
        weights = data["pair_weight"][0::2].to(losses.dtype)
        is_real = (weights > 0).to(losses.dtype)
        self.loss += float((losses.detach() * weights).sum())
        self.n_hits += float(((margins > 0) * is_real).sum())
        self.margin += float((margins * is_real).sum())
        self.n_pairs += float(is_real.sum())
        total = share_of_mean(
            losses, weights, total=self.total_weight, n_ranks=int(data["dp_size"])
        )
        return self.options.beta_replay * total, {}


def response_mask(data: Any) -> Tensor:
    """Return the response mask as a padded tensor."""
    mask = data["response_mask"]
    return (mask.to_padded_tensor(0) if mask.is_nested else mask).float()
