"""Run a micro-batch through the model: completions, hinted contexts, and pairs, together or separately.

Dimensions in names: `B` sequences, `C` completion tokens, `T` tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer.model.causal_lm import has_plain_head
from trainer.model.packing import trees_of
from trainer.model.pair_forward import longest_of, window_of
from trainer.trl.config import ComposerConfig
from trainer.trl.forward import (
    HintedInputs,
    SharedForward,
    policy_and_distillation,
    policy_in_parts,
    policy_of_states,
    token_sequences,
)
from trainer.trl.hinted import ROLLOUT, HintChannel, on_host
from trainer.trl.pairs import Passes, passes_of

__all__ = ["StepForward"]


class StepForward:
    """The planner of a micro-batch's passes, which also provides the policy's numbers for TRL."""

    def __init__(
        self,
        accelerator: Accelerator,
        args: ComposerConfig,
        hint_channel: HintChannel,
        *,
        packs_pairs: bool,
        has_router_loss: bool,
    ) -> None:
        """Keep what stays the same from step to step."""
        self._accelerator, self._args, self._hint_channel = accelerator, args, hint_channel
        self._packs_pairs, self._has_router_loss = packs_pairs, has_router_loss
        self.shared: SharedForward | None = None
        """The pass that this micro-batch's channels share, if they do."""
        self._payload: HintedInputs | None = None
        self._sdpo_sum: Tensor | None = None
        self._is_in_loss = False

    @property
    def sdpo_sum(self) -> Tensor:
        """Return the divergence of the last micro-batch, summed over its hinted tokens."""
        assert self._sdpo_sum is not None
        return self._sdpo_sum

    @contextlib.contextmanager
    def in_loss(self, payload: HintedInputs | None) -> Iterator[None]:
        """Serve TRL's requests for log-probs from the planned passes, which include channel 2."""
        self._payload, self._sdpo_sum, self._is_in_loss = payload, None, True
        try:
            yield
        finally:
            self._payload, self.shared, self._is_in_loss = None, None, False

    def plan(
        self, model: nn.Module, inputs: Mapping[str, Any], payload: HintedInputs | None
    ) -> Passes:
        """Plan one pass for the completions and as many pairs as fit, then passes for the other pairs.

        If completions and pairs can't form one tree, nothing is planned, and `shared` is None.
        """
        if not self._can_share(model, inputs):
            return []
        sequences = token_sequences(*(on_host(inputs)[name] for name in ROLLOUT[:4]))
        teacher = self._hint_channel.teacher
        is_live = (
            payload is not None
            and teacher is not None
            and teacher.kind == "live"
            # The teacher is in eval mode, the student is not.
            and not any(isinstance(one, nn.Dropout) and one.p > 0 for one in model.modules())
        )
        if is_live:
            assert payload is not None
            sequences += payload.teacher_sequences
        batch = inputs.get("pairs", {}).get("batch") or {}
        if batch and longest_of(batch) > window_of(model):
            return []
        max_tokens = self._args.max_packed_tokens
        tree, *others = trees_of(batch, max_tokens=max_tokens, sequences=sequences)
        self.shared = SharedForward(model, tree, inputs["completion_ids"], is_live=is_live)
        (rows, _), *passes = passes_of(model, [tree, *others])
        # Last, when the graphs of the others have been sent back and are gone.
        return [*passes, (rows, self.shared.pair_logps)] if tree.n_pairs else passes

    def _can_share(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        return (
            self._args.share_prefixes
            and self._packs_pairs
            and not isinstance(model, FSDPModule)
            and self._has_fused_head(model, inputs)
            and inputs["prompt_mask"].shape[1] + inputs["completion_mask"].shape[1]
            <= window_of(model)
        )

    def fuses(self, model: nn.Module, options: Mapping[str, Any]) -> bool:
        """Return whether `policy` gives the same result as TRL for a call with these options."""
        return self._payload is not None or self._has_fused_head(model, options)

    def _has_fused_head(self, model: nn.Module, options: Mapping[str, Any]) -> bool:
        """Return whether the policy's own pass can do without the logits of its batch."""
        is_text = all(value is None for name, value in options.items() if "image" in name)
        if self._args.head == "reference" or self._has_router_loss or not is_text:
            return False
        if isinstance(model, FSDPModule) and not self._is_in_loss:
            return False  # only its own forward call gathers the head
        return has_plain_head(model)

    def policy(
        self, model: nn.Module, ids_BT: Tensor, mask_BT: Tensor, n_last: int, *, n_rows: int | None
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies of the last tokens, [B, C], and channel 2 if needed.

        Args:
            model: the trainee.
            ids_BT: prompts and completions.
            mask_BT: 0 at padding.
            n_last: number of tokens of a completion.
            n_rows: rows per pass, if nothing is shared.
        """
        temperature = self._args.temperature
        with self._accelerator.autocast():
            if self._payload is not None:
                return self._with_distillation(model, self._payload)
            if self.shared is None:
                return policy_in_parts(
                    model, ids_BT, mask_BT, n_last, n_rows=n_rows, temperature=temperature
                )
            states_BCH, ids_BC = self.shared.student_states(), ids_BT[:, -n_last:]
            return policy_of_states(model, states_BCH, ids_BC, temperature=temperature)

    def _with_distillation(self, model: nn.Module, payload: HintedInputs) -> tuple[Tensor, Tensor]:
        teacher = self._hint_channel.teacher
        assert teacher is not None
        output = policy_and_distillation(
            model,
            teacher.weights,
            payload,
            self._hint_channel.options,
            is_fused=self._args.is_fused,
            shared=self.shared,
        )
        self._sdpo_sum = output.sdpo_sum
        return output.logps_BC, output.entropy_BC
