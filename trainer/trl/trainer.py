"""policy + alpha * SDPO + beta * replay as one `GRPOTrainer`.

The policy objective, rewards, advantages, tools, environments and generation are TRL's own code.
Two channels are added inside the *one* forward call that DDP and FSDP see, so that their hooks fire
once however many channels a rank has.

Dimensions in names: `B` sequences, `C` completion tokens, `H` hidden, `V` vocabulary, `N` tokens.
"""

import itertools
import json
import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from trl.models.utils import _ForwardRedirection
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler, pad

from trainer.data.acting import general_texts
from trainer.data.budget import sides_of
from trainer.data.collator import ComposerDataCollator, add_reference_logps
from trainer.data.rollouts import RecordedRollouts, replay_rollouts
from trainer.data.sampler import PairSampler, RolloutOrder, weight_of
from trainer.data.tokens import TokenStore
from trainer.errors import DivergedError, TrainerConfigError
from trainer.folders import STATE_FILE
from trainer.hints import HintFunction, hint_for_row
from trainer.losses.channels import replay_per_pair
from trainer.losses.compose import PairLogps
from trainer.losses.taid import TAIDScheduler
from trainer.model.causal_lm import cache_obstacle, causal_lm_of, has_plain_head
from trainer.model.packing import (
    enable_tree_attention,
    packed_pair_logps,
    tree_pair_logps,
    trees_of,
)
from trainer.model.scoring import pair_logps
from trainer.model.tree_layout import PackedTree
from trainer.trl.config import ComposerConfig
from trainer.trl.drift import Drift
from trainer.trl.forward import (
    HintedInputs,
    SharedForward,
    policy_alone,
    policy_and_distillation,
    policy_of_states,
    token_sequences,
)
from trainer.trl.teacher import Teacher
from trainer.types import PairRow

logger = logging.getLogger(__name__)

_SCORED = ("dpo_weight", "dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
"""What the preference loss reads of a batch beside the model's own log-probabilities."""

_ROLLOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
_HINTED = (*_ROLLOUT[:4], "teacher_prompt_ids", "teacher_prompt_mask")
_HOST = "host_"
"""Before the names of rollouts' tensors on the CPU: reading them there waits for no device."""


class ComposerReplicationTrainer(GRPOTrainer):
    """`GRPOTrainer` with hint-conditioned self-distillation and trace-replay preference pairs.

    `train_dataset` is TRL's (column `prompt`); rows with a `hint` feed channel 2. With `recorded`
    nothing is generated: the rollouts are decisions on record, with true importance ratios.
    `pairs` are the rows of channel 3: `prompt`, `chosen`, `rejected`.
    """

    _tag_names = ["trl", "grpo", "composer-replication"]  # noqa: RUF012 - TRL's own attribute
    _name = "Composer replication"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: ComposerConfig | None = None,
        *,
        pairs: Sequence[PairRow | Mapping[str, Any]] | None = None,
        recorded: RecordedRollouts | None = None,
        hint: HintFunction = hint_for_row,
        tokens: TokenStore | None = None,
        kept: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> None:
        """Build TRL's trainer, then the teacher, the pair sampler and the TAID schedule.

        With `tokens` no step renders what was rendered before.

        Raises:
            TrainerConfigError: channel 2 with a model that it cannot serve.
        """
        args = args or ComposerConfig()
        self.recorded = recorded
        if recorded is not None:
            options |= {
                "train_dataset": Dataset.from_list(recorded.rows()),
                "rollout_func": replay_rollouts,
            }
        super().__init__(model, reward_funcs, args, **options)
        self.composer: ComposerConfig = args
        self._sdpo_options, self._replay_options = args.sdpo, args.replay
        self.hint = hint
        tokenizer: Any = self._tokenizer
        self.collator = ComposerDataCollator(
            tokenizer,
            max_prompt_tokens=args.max_prompt_tokens,
            max_response_tokens=args.max_response_tokens,
            with_tools=args.render_tools,
            window=args.prompt_window,
            hint=hint,
        )
        if tokens is not None:
            self.collator.renderer.store = tokens
        self.pairs = list(pairs or ())
        self._pair_sampler = self._make_sampler() if self.has_replay else None
        self._reference_logps = self._precompute_reference() if self.has_replay else None
        self.pair_forward = self._choose_pair_forward() if self.has_replay else "none"
        """How pairs run: packed, or padded with the reason."""
        self.teacher = self._make_teacher() if args.alpha_sdpo > 0 else None
        self.drift = self._make_drift(kept) if args.drift_weight > 0 else None
        self.taid: TAIDScheduler | None = None
        self._taid_window: list[Tensor] = []
        self._payload: HintedInputs | None = None
        self._shared: SharedForward | None = None
        self._sdpo_sum: Tensor | None = None
        self._is_in_loss = False
        self._noted: list[tuple[str, str, Tensor]] = []
        self.n_live_steps = {"policy": 0, "sdpo": 0, "replay": 0}
        """Micro-batches in which a channel contributed something, up to the last log."""
        self._explain_off_channels()

    @property
    def has_replay(self) -> bool:
        """Whether channel 3 has a weight and pairs."""
        return self.composer.beta_replay > 0 and bool(self.pairs)

    @property
    def _mode(self) -> str:
        return "train" if self.model is not None and self.model.training else "eval"

    # -- set-up ---------------------------------------------------------------------------------

    def _explain_off_channels(self) -> None:
        if self.composer.alpha_sdpo == 0:
            logger.info("channel sdpo is off: alpha_sdpo is 0")
        if self.composer.beta_replay == 0:
            logger.info("channel replay is off: beta_replay is 0")
        elif not self.pairs:
            logger.warning("channel replay is off: no pairs were given")

    def _make_sampler(self) -> PairSampler:
        return PairSampler(
            len(self.pairs),
            batch_size=self.composer.pairs_per_step,
            seed=self.args.seed,
            groups=[row.get("session_id") or i for i, row in enumerate(self.pairs)],
        )

    def _make_teacher(self) -> Teacher | None:
        if self.aux_loss_enabled:
            raise TrainerConfigError(
                "channel 2 does not serve models with a router loss: set alpha_sdpo=0 or "
                "router_aux_loss_coef=0"
            )
        student = self.accelerator.unwrap_model(self.model)
        kind = self.composer.teacher
        if kind == "auto":
            kind = "base" if hasattr(student, "peft_config") else "ema"
        teacher = Teacher(kind, student, ema_rate=self.composer.teacher_ema_rate)
        self.add_callback(teacher)
        return teacher

    def _make_drift(self, kept: Sequence[Mapping[str, Any]]) -> Drift:
        renderer = self.collator.renderer
        acted = [
            renderer.prompt_ids(row["prompt"], row.get("tools"))
            + renderer.response_ids(row["completion"])
            for row in kept
        ]
        return Drift(
            self.accelerator.unwrap_model(self.model),
            acted,
            general_texts(self._tokenizer)[1::2],
            n_tokens=self.composer.drift_tokens,
            seed=self.args.seed,
        )

    @property
    def _reuses_prefix(self) -> bool:
        """A live teacher goes on from the student's cache, which checkpointing would drop."""
        return (
            self.composer.reuse_prefix
            and self.teacher is not None
            and self.teacher.kind == "live"
            and not self.args.activation_checkpointing
            and cache_obstacle(self.accelerator.unwrap_model(self.model)) is None
        )

    def _choose_pair_forward(self) -> str:
        """Pack pairs where the model's attention can follow a tree and is seen to do so.

        Raises:
            TrainerConfigError: `pair_forward="packed"` and it cannot.
        """
        if self.composer.pair_forward == "padded":
            return "padded: as set"
        model = self.accelerator.unwrap_model(self.model)
        try:
            enable_tree_attention(model)
            self._check_packed_equals_padded(model)
        except TrainerConfigError as error:
            if self.composer.pair_forward == "packed":
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
        assert self._pair_sampler is not None
        rows = [self.pairs[i] for i in self._pair_sampler.step(0)[:2]]
        batch = self._on_device(self.collator.pairs(rows))
        if _longest(batch) > _window(model):
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

    def _pair_passes(self, model: nn.Module, batch: Mapping[str, Tensor]) -> "Passes":
        """Plan the forward passes of a batch of pairs."""
        n_pairs, max_tokens = len(batch["dpo_weight"]), self.composer.max_packed_tokens
        if isinstance(model, FSDPModule):
            # Sharded ranks gather layers together: as many passes on each, so one.
            max_tokens = None
        # Within the window a sliding layer sees all there is; beyond it, trees are not exact.
        if self.pair_forward == "packed" and _longest(batch) <= _window(model):
            return _passes_of(model, trees_of(batch, max_tokens=max_tokens))
        step = n_pairs if max_tokens is None else max(max_tokens // (2 * _longest(batch)), 1)
        parts = [slice(start, start + step) for start in range(0, n_pairs, step)]
        return [(rows, partial(self._padded_logps, model, batch, rows)) for rows in parts]

    def _padded_logps(
        self, model: nn.Module, batch: Mapping[str, Tensor], rows: slice
    ) -> PairLogps:
        part = {key: value[rows] for key, value in batch.items()}
        masks = {key: part.pop(key) for key in list(part) if key.endswith("response_mask")}
        return pair_logps(model, self._on_device(part) | masks)

    def _shares_prefixes(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Whether completions and pairs of this batch may run as one tree."""
        return (
            self.composer.share_prefixes
            and self.pair_forward == "packed"
            and not isinstance(model, FSDPModule)
            and self._fuses_policy(model, inputs)
            and inputs["prompt_mask"].shape[1] + inputs["completion_mask"].shape[1]
            <= _window(model)
        )

    def _share(
        self, model: nn.Module, inputs: Mapping[str, Any], payload: HintedInputs | None
    ) -> "Passes":
        """Plan one pass for the completions and as many pairs as fit; then those of other pairs."""
        sequences = token_sequences(*(_on_host(inputs)[name] for name in _ROLLOUT[:4]))
        is_live = (
            payload is not None
            and self.teacher is not None
            and self.teacher.kind == "live"
            # The teacher is in eval mode, the student is not.
            and not any(isinstance(one, nn.Dropout) and one.p > 0 for one in model.modules())
        )
        if is_live:
            assert payload is not None
            sequences += payload.teacher_sequences
        batch = inputs.get("pairs", {}).get("batch") or {}
        if batch and _longest(batch) > _window(model):
            return []
        max_tokens = self.composer.max_packed_tokens
        tree, *others = trees_of(batch, max_tokens=max_tokens, sequences=sequences)
        self._shared = SharedForward(model, tree, inputs["completion_ids"], is_live=is_live)
        (rows, _), *passes = _passes_of(model, [tree, *others])
        # Last, when the graphs of the others have been sent back and are gone.
        return [*passes, (rows, self._shared.pair_logps)] if tree.n_pairs else passes

    def _precompute_reference(self) -> list[tuple[float, float]] | None:
        """Sum log-probs of both sides under the initial weights, once."""
        if not self._replay_options.needs_reference:
            return None
        model = self.accelerator.unwrap_model(self.model)
        was_training = model.training
        model.eval()
        logps: list[tuple[float, float]] = []
        for row in self.pairs:
            batch = self._on_device(self.collator.pairs([row]))
            batch = add_reference_logps(model, batch, forward=pair_logps)
            chosen, rejected = (
                float(batch[f"dpo_{side}_ref_logprobs"][0]) for side in ("chosen", "rejected")
            )
            logps.append((chosen, rejected))
        model.train(was_training)
        return logps

    def _on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = self.accelerator.device
        return {key: value.to(device, non_blocking=True) for key, value in batch.items()}

    # -- what TRL calls --------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Render prompts as those of pairs are: budget, tools, and text for what has no place.

        An environment's tools are TRL's concern, and so are its prompts.
        """
        if self.environment_factories is not None or self.tools:
            return super()._tokenize_prompts(prompts)
        renderer = self.collator.renderer
        rows = zip(prompts, self.rollout_rows, strict=True)
        ids = [
            renderer.prompt_ids(prompt, row.get("tools"), sides=sides_of(row))
            for prompt, row in rows
        ]
        return ids, None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.recorded is not None:
            first = self.accelerator.process_index * len(inputs)
            inputs = self.recorded.expand(inputs, first=first, n=self.num_generations or 1)
        self.rollout_rows = inputs  # a rollout_func sees only prompts
        output = super()._generate_and_score_completions(inputs)
        if all(row.get("old_logps") is not None for row in inputs):
            output["old_per_token_logps"] = self._recorded_logps(inputs, output["completion_ids"])
        if self.composer.alpha_sdpo > 0 or self.has_replay:
            # Here the host waits for the device in any case; in the steps to come it need not.
            output |= {_HOST + name: output[name].cpu() for name in _ROLLOUT if name in output}
        if self.composer.alpha_sdpo > 0:
            output |= self._hinted(inputs, output)
        return output

    def _recorded_logps(self, inputs: list[dict[str, Any]], ids_BC: Tensor) -> Tensor:
        rows = [torch.tensor(row["old_logps"], dtype=torch.float32) for row in inputs]
        logps_BC = pad(rows, padding_value=0, padding_side="right").to(ids_BC.device)
        if logps_BC.shape != ids_BC.shape:
            raise TrainerConfigError(
                f"recorded log-probs {tuple(logps_BC.shape)} do not fit the completions "
                f"{tuple(ids_BC.shape)}: raise max_completion_length"
            )
        return logps_BC

    def _hinted(self, inputs: list[dict[str, Any]], output: dict[str, Any]) -> dict[str, Tensor]:
        """Build hinted prompts, which rows have one, and the token count of the whole batch."""
        hints = [self.hint(row) for row in inputs]
        prompts = [
            torch.tensor(
                self.collator.renderer.prompt_ids(
                    row["prompt"],
                    row.get("tools"),
                    hint=hint.text if hint else None,
                    sides=sides_of(row),
                )
            )
            for row, hint in zip(inputs, hints, strict=True)
        ]
        has_hint_B = torch.tensor([1.0 if hint else 0.0 for hint in hints])
        n_mine = (_response_mask(_on_host(output)) * has_hint_B.unsqueeze(-1)).sum()
        n_mine = n_mine.to(self.accelerator.device)
        pad_id = self._tokenizer.pad_token_id
        ones = [torch.ones_like(ids) for ids in prompts]
        return {
            "teacher_prompt_ids": pad(prompts, pad_id, "left"),
            "teacher_prompt_mask": pad(ones, 0, "left"),
            "sdpo_mask": has_hint_B,
            "n_sdpo_tokens": self.accelerator.reduce(n_mine, reduction="sum").cpu(),
        }

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._mode == "train" and self.has_replay and self.composer.is_replay_alone:
            return {"pairs": self._next_pairs()}  # nothing is generated or scored for no one
        inputs = super()._prepare_inputs(generation_batch)
        if self._mode == "train" and self._pair_sampler is not None:
            inputs = {**inputs, "pairs": self._next_pairs()}
        return inputs

    def _next_pairs(self) -> dict[str, Any]:
        assert self._pair_sampler is not None
        n_micro = self.args.gradient_accumulation_steps
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        step = self.state.global_step
        everything = self._pair_sampler.step(step)
        part = self._step % n_micro * world + rank
        mine = self._pair_sampler.part(step, part=part, n_parts=n_micro * world)
        pairs: dict[str, Any] = {"total_weight": sum(weight_of(self.pairs[i]) for i in everything)}
        # Every rank must gather the same layers in the same order; and pairs of weight 0 are the
        # graph of a rank that has nothing else to send back.
        is_filler = not mine and (
            isinstance(self.model, FSDPModule) or self.composer.policy_weight == 0
        )
        if is_filler:
            mine = everything[:1]
        if mine:
            # On the CPU, where trees are packed: what a pass needs is moved by the pass.
            pairs["batch"] = self.collator.pairs([self.pairs[i] for i in mine])
            if is_filler:
                pairs["batch"]["dpo_weight"].zero_()
            if self._reference_logps is not None:
                for k, side in enumerate(("chosen", "rejected")):
                    pairs["batch"][f"dpo_{side}_ref_logprobs"] = torch.tensor(
                        [self._reference_logps[i][k] for i in mine]
                    )
        return pairs

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        unwrapped = self.accelerator.unwrap_model(model)
        # FSDP2 shards in place: there is nothing to unwrap, but its hooks sit on the forward call.
        if unwrapped is model and not isinstance(model, FSDPModule):
            return self._three_channels(model, inputs)
        return _ForwardRedirection()(model, unwrapped, self._three_channels, unwrapped, inputs)

    def _three_channels(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        has_sdpo = self.teacher is not None and float(inputs.get("n_sdpo_tokens", 0)) > 0
        needs_policy = self.composer.policy_weight > 0 or has_sdpo or "pairs" not in inputs
        payload = self._teacher_inputs(inputs) if has_sdpo else None
        loss = torch.zeros((), device=self.accelerator.device)
        if self.drift is not None and self._mode == "train":
            loss = loss + self._drift_term(model)
        passes: Passes = []
        if needs_policy and self._shares_prefixes(model, inputs):
            passes = self._share(model, inputs, payload)
        if "pairs" in inputs:
            pairs = inputs["pairs"]
            if self._shared is None and pairs.get("batch"):
                passes = self._pair_passes(model, pairs["batch"])
            loss = loss + self._replay_term(pairs, passes, is_all=not needs_policy)
        if not needs_policy:  # its forward pass would be multiplied by 0
            return loss
        self._payload, self._sdpo_sum, self._is_in_loss = payload, None, True
        try:
            policy = super()._compute_loss(model, inputs)
        finally:
            self._payload, self._shared, self._is_in_loss = None, None, False
        loss = loss + self.composer.policy_weight * policy
        self._note_policy(policy, inputs)
        if payload is not None:
            loss = loss + self.composer.alpha_sdpo * self._sdpo_term(inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute TRL's numbers; with a hinted batch, channel 2 from the same forward as well."""
        if self._payload is None and not self._fuses_policy(model, kwargs):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if self._payload is None and self._shared is not None:
            with self.accelerator.autocast():
                logps_BC, entropy_BC = policy_of_states(
                    model,
                    self._shared.student_states(),
                    input_ids[:, -logits_to_keep:],
                    temperature=self.temperature,
                )
            return logps_BC, self._logged_or_charged(entropy_BC), None
        if self._payload is None:
            rows = args[0] if args else kwargs.get("batch_size")
            with self.accelerator.autocast():
                parts = [
                    policy_alone(model, ids, mask, logits_to_keep, temperature=self.temperature)
                    for ids, mask in zip(
                        input_ids.split(rows or len(input_ids)),
                        attention_mask.split(rows or len(input_ids)),
                        strict=True,
                    )
                ]
            logps_BC, entropy_BC = (torch.cat(one) for one in zip(*parts, strict=True))
            return logps_BC, self._logged_or_charged(entropy_BC), None
        assert self.teacher is not None
        with self.accelerator.autocast():
            output = policy_and_distillation(
                model,
                self.teacher.weights,
                self._payload,
                self._options_now(),
                is_fused=self.composer.is_fused,
                reuses_prefix=self._reuses_prefix,
                pad_token_id=self._tokenizer.pad_token_id,
                shared=self._shared,
            )
        self._sdpo_sum = output.sdpo_sum
        return output.logps_BC, self._logged_or_charged(output.entropy_BC), None

    def _logged_or_charged(self, entropy_BC: Tensor) -> Tensor:
        # TRL reduces the entropy across processes in place, unless it is part of the loss.
        return entropy_BC if self._entropy_bonus_enabled else entropy_BC.detach()

    def _fuses_policy(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Whether the policy's own pass can do without the logits of its batch."""
        is_text = all(value is None for name, value in inputs.items() if "image" in name)
        if self.composer.head == "reference" or self.aux_loss_enabled or not is_text:
            return False
        if isinstance(model, FSDPModule) and not self._is_in_loss:
            return False  # only its own forward call gathers the head
        return has_plain_head(model)

    # -- channel 2 -------------------------------------------------------------------------------

    def _teacher_inputs(self, inputs: dict[str, Any]) -> HintedInputs:
        on_host = _on_host(inputs)
        mask_BC = (_response_mask(on_host) * inputs["sdpo_mask"].unsqueeze(-1)) > 0
        on_host |= {name: inputs[name] for name in ("teacher_prompt_ids", "teacher_prompt_mask")}
        return HintedInputs(mask=mask_BC, **{name: on_host[name] for name in _HINTED})

    def _options_now(self) -> Any:
        if self._sdpo_options.wrapper != "taid":
            return self._sdpo_options
        return self._sdpo_options.at(self._taid_scheduler().t)

    def _taid_scheduler(self) -> TAIDScheduler:
        if self.taid is None:
            self.taid = TAIDScheduler(
                max(self.state.max_steps, 1),
                t_start=self.composer.taid_t_start,
                t_end=self.composer.taid_t_end,
                alpha=self.composer.taid_alpha,
            )
        return self.taid

    def _sdpo_term(self, inputs: dict[str, Any]) -> Tensor:
        """Sum over this micro-batch's tokens, divided by those of one accumulation window."""
        assert self._sdpo_sum is not None
        mode = self._mode
        normalizer = inputs["n_sdpo_tokens"] / self.accelerator.num_processes
        if mode == "train":
            normalizer = (
                normalizer * self.current_gradient_accumulation_steps
            ) / self.composer.steps_per_generation
        mine = self._sdpo_sum.detach().float()
        n_mine = _response_mask(_on_host(inputs)) * inputs["sdpo_mask"].unsqueeze(-1)
        totals = torch.stack([mine, torch.full_like(mine, float(n_mine.sum()))])
        totals = self.accelerator.reduce(totals, reduction="sum")
        self._noted.append((mode, "sdpo", totals))
        if mode == "train":
            self._advance_taid(totals)
        return self._sdpo_sum / normalizer

    def _advance_taid(self, totals: Tensor) -> None:
        if self._sdpo_options.wrapper != "taid":
            return
        self._metrics["train"]["sdpo/taid_t"].append(self._taid_scheduler().t)
        self._taid_window.append(totals)
        if self.accelerator.sync_gradients:
            summed, n_tokens = torch.stack(self._taid_window).sum(0)
            self._taid_window = []
            self._taid_scheduler().update_t(
                summed / n_tokens.clamp_min(1.0), self.state.global_step + 1
            )

    # -- channel 1, channel 3 --------------------------------------------------------------------

    def _note_policy(self, policy: Tensor, inputs: dict[str, Any]) -> None:
        scale = self.current_gradient_accumulation_steps if self._mode == "train" else 1
        is_live = (inputs["advantages"] != 0).any()
        noted = torch.stack([policy.detach().float() * scale, is_live.float()])
        self._noted.append((self._mode, "policy", noted))

    def _replay_term(self, pairs: dict[str, Any], passes: "Passes", *, is_all: bool) -> Tensor:
        """Charge this rank's pairs, scaled so that DDP's mean over ranks is the mean of all.

        The backward pass of each forward pass follows at once where nothing else waits for the
        gradients, so that activations of `max_packed_tokens` are kept and not those of the batch.

        Args:
            pairs: of this micro-batch, with the weight of all pairs of the step.
            passes: which pairs run together, and what runs them; the last is the shared one if
                there is one, whose graph the policy needs as well.
            is_all: whether nothing else has a graph, so that one must be left for the caller.
        """
        sums = torch.zeros(4, device=self.accelerator.device)
        total = sums.new_zeros(())
        scale = self.composer.beta_replay * self.accelerator.num_processes
        scale /= max(pairs["total_weight"], 1e-12)
        batch: dict[str, Tensor] = pairs.get("batch") or {}
        is_kept = is_all or (self._shared is not None and self._shared.tree.n_pairs > 0)
        is_alone = self.accelerator.distributed_type == DistributedType.NO
        for which, (rows, forward) in enumerate(passes):
            with self.accelerator.autocast():
                # A wrapper reduces gradients once, in the one backward pass that it is told of.
                logps = (
                    forward()
                    if is_alone or len(passes) == 1 or (which == len(passes) - 1 and is_kept)
                    else checkpoint(forward, use_reentrant=False)
                )
            scored = {name: batch[name][rows] for name in _SCORED if name in batch}
            charged, measures = self._charged(logps, self._on_device(scored))
            sums += measures
            term = scale * charged
            if is_alone and (which < len(passes) - 1 or not is_kept):
                self.accelerator.backward(term)
                term = term.detach()
            total = total + term
        self._noted.append(("train", "replay", self.accelerator.reduce(sums, reduction="sum")))
        return total

    def _charged(self, logps: PairLogps, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum what pairs are charged by weight; and loss, hits, margin and count for the log."""
        (chosen, n_chosen), (rejected, n_rejected) = logps
        losses = replay_per_pair(
            chosen,
            rejected,
            n_chosen,
            n_rejected,
            batch.get("dpo_chosen_ref_logprobs"),
            batch.get("dpo_rejected_ref_logprobs"),
            self._replay_options,
        )
        margin = (chosen / n_chosen.clamp_min(1) - rejected / n_rejected.clamp_min(1)).detach()
        measures = [losses.detach(), margin > 0, margin, torch.ones_like(margin)]
        is_real = batch["dpo_weight"] > 0  # a filler has no weight and does not count
        noted = torch.stack([measure.float().where(is_real, 0).sum() for measure in measures])
        return (losses * batch["dpo_weight"]).sum(), noted

    def _drift_term(self, model: nn.Module) -> Tensor:
        """Charge what the model left of its first weights, averaged over an accumulation window.

        Raises:
            TrainerConfigError: the weights are sharded, so that no rank has the untouched model.
        """
        assert self.drift is not None
        if isinstance(model, FSDPModule):
            raise TrainerConfigError("drift_weight does not serve sharded models: set it to 0")
        n_micro = self.current_gradient_accumulation_steps
        draw = self.state.global_step * n_micro + self._step % n_micro
        term = self.drift.term(model, draw, self.accelerator.autocast)
        self._noted.append(("train", "drift", torch.stack([term.detach(), torch.ones_like(term)])))
        return self.composer.drift_weight * term / n_micro

    # -- what is logged ---------------------------------------------------------------------------

    def _settle_metrics(self) -> None:
        """Read the figures of the steps since the last log.

        Only here: within a step the host would wait for the device at each of them.
        """
        noted, self._noted = self._noted, []
        for mode, channel, figures in noted:
            metrics = self._metrics[mode]
            loss, *others = figures.tolist()
            n_counted = others[-1]
            if channel == "drift":
                metrics["drift/kl"].append(loss)
                continue
            if mode == "train":
                is_weighed = channel != "policy" or self.composer.policy_weight > 0
                self.n_live_steps[channel] += int(n_counted > 0 and is_weighed)
            if channel == "policy":
                metrics["policy/loss"].append(loss)
            elif channel == "sdpo":
                metrics["sdpo/loss"].append(loss / max(n_counted, 1.0))
                metrics["sdpo/n_tokens"].append(n_counted)
            elif n_counted:
                metrics["replay/loss"].append(loss / n_counted)
                metrics["replay/accuracy"].append(others[0] / n_counted)
                metrics["replay/margin"].append(others[1] / n_counted)
                metrics["replay/n_pairs"].append(n_counted)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what was noted since the last time.

        Raises:
            DivergedError: the loss is no longer a number.
        """
        self._settle_metrics()
        super().log(logs, *args, **kwargs)
        if not math.isfinite(loss := logs.get("loss", 0.0)):
            raise DivergedError(
                f"step {self.state.global_step}: the loss is {loss}, and the weights are lost. Lower "
                "learning_rate or max_grad_norm; a checkpoint of an earlier step can still be used"
            )

    # -- order of the data -----------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = sampler = super()._get_train_sampler(dataset)
        sessions = self._sessions_of_rollouts(dataset or self.train_dataset)
        if isinstance(sampler, RepeatSampler) and sampler.shuffle and sessions:
            order = RolloutOrder(
                sessions,
                batch_size=sampler.batch_size,
                within=self.composer.align_within,
                seed=self.args.seed,
            )
            self._train_sampler = AlignedSampler(sampler, order, self._sessions_of_pairs)
        return self._train_sampler

    def _sessions_of_rollouts(self, dataset: Any) -> list[str | None]:
        """Return the session of every row; nothing where rows need not follow the pairs."""
        is_alone = self.composer.is_replay_alone
        if self._pair_sampler is None or is_alone or self.composer.align_within == 0:
            return []
        has_sessions = "session_id" in (getattr(dataset, "column_names", None) or ())
        return list(dataset["session_id"]) if has_sessions else []

    def _sessions_of_pairs(self, epoch: int, batch: int, n_batches: int) -> list[str]:
        """Return the sessions of the pairs that are trained on while a batch of rollouts is."""
        assert self._pair_sampler is not None
        n_micro = self.args.gradient_accumulation_steps
        n_of_batch = (self.composer.steps_per_generation or 1) * self.num_iterations
        first = epoch * max(-(-n_batches * n_of_batch // n_micro), 1)
        begin, end = batch * n_of_batch // n_micro, -(-(batch + 1) * n_of_batch // n_micro)
        steps = range(first + begin, first + end)
        drawn = [self.pairs[i] for step in steps for i in self._pair_sampler.step(step)]
        return [str(row["session_id"]) for row in drawn if row.get("session_id")]

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        # TRL's sampler draws the orders of all epochs from one generator: a run that goes on in a
        # later epoch must skip those of its past, or it sees the first epoch's order again.
        sampler = self._train_sampler
        if isinstance(sampler, AlignedSampler):
            sampler.epoch = options["epoch"]
        elif isinstance(sampler, RepeatSampler) and sampler.shuffle:
            sampler.generator.manual_seed(self.args.seed)
            for _ in range(options["epoch"]):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        super()._run_epoch(*arguments, **options)

    # -- checkpoints -----------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._settle_metrics()
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.teacher is not None:
            self.teacher.save(folder)
        # Last: a folder that has this file is a whole checkpoint.
        state = {
            "taid": self.taid.state_dict() if self.taid else None,
            "n_live_steps": self.n_live_steps,
        }
        (folder / STATE_FILE).write_text(json.dumps(state), "utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not (Path(checkpoint) / STATE_FILE).exists():
            return
        state = json.loads((Path(checkpoint) / STATE_FILE).read_text("utf-8"))
        self.n_live_steps |= state.get("n_live_steps", {})
        if state["taid"] is not None:
            self._taid_scheduler().load_state_dict(state["taid"])
        if self.teacher is not None:
            self.teacher.load(Path(checkpoint))


class AlignedSampler(RepeatSampler):
    """Repeats rows as TRL's sampler does, which would shuffle them, in the order of our own."""

    epoch = 0

    def __init__(
        self,
        sampler: RepeatSampler,
        order: RolloutOrder,
        sessions: Callable[[int, int, int], Sequence[str]],
    ) -> None:
        """Take the place of `sampler`; `sessions` of the pairs by epoch, batch, and their number."""
        super().__init__(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            shuffle=False,
        )
        self.order, self.sessions = order, sessions

    def __iter__(self) -> Generator[int, None, None]:
        """Go through the rows of the epoch."""
        n_batches = self.order.n_batches
        rows = self.order.epoch(
            self.epoch, lambda batch: self.sessions(self.epoch, batch, n_batches)
        )
        yield from (rows[place] for place in super().__iter__())


Passes = list[tuple[slice, Callable[[], PairLogps]]]
"""Forward passes of a batch of pairs: which of them, and what runs them."""


def _passes_of(model: nn.Module, trees: Sequence[PackedTree]) -> Passes:
    starts = itertools.accumulate((tree.n_pairs for tree in trees), initial=0)
    return [
        (slice(start, start + tree.n_pairs), partial(tree_pair_logps, model, tree))
        for start, tree in zip(starts, trees, strict=False)
    ]


def _response_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Mark every token that the model wrote: completions without tool results and padding."""
    mask_BC = inputs["completion_mask"]
    return mask_BC * inputs["tool_mask"] if "tool_mask" in inputs else mask_BC


def _on_host(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the rollouts' tensors that lie on the CPU, by their plain names."""
    return {name: inputs[_HOST + name] for name in _ROLLOUT if _HOST + name in inputs}


def _longest(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens of the longest sequence of a batch of pairs."""
    sides = ("dpo_chosen_attention_mask", "dpo_rejected_attention_mask")
    return max(int(batch[name].sum(-1).max()) for name in sides)


def _window(model: nn.Module) -> float:
    """Return the narrowest sliding window of a model's layers; infinite without one."""
    config = causal_lm_of(model).config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return float("inf")
    return getattr(config, "sliding_window", None) or float("inf")
