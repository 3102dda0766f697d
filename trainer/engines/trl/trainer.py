"""policy + alpha * SDPO + beta * replay as one `GRPOTrainer`.

The policy objective, rewards, advantages, tools, environments, and generation are TRL's own code.
The other two channels run inside the *one* forward call that DDP and FSDP see, so that their hooks
fire only once.

Dimensions in names: `B` sequences, `C` completion tokens, `H` hidden, `V` vocabulary, `N` tokens.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from trl.models.utils import _ForwardRedirection
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import checked_rows
from trainer.data.folders import STATE_FILE
from trainer.data.hints import HintFunction, hint_for_row
from trainer.data.rollouts import RecordedRollouts, replay_rollouts
from trainer.data.tokens import TokenStore
from trainer.data.types import PairRow
from trainer.engines.trl.config import ComposerConfig
from trainer.engines.trl.drift import Drift, make_drift
from trainer.engines.trl.figures import Figures
from trainer.engines.trl.forward import (
    HintedInputs,
    SharedForward,
    policy_and_distillation,
    policy_of_states,
    token_sequences,
)
from trainer.engines.trl.hinted import HOST, ROLLOUT, HintChannel, on_host
from trainer.engines.trl.pairs import PairChannel, Passes, at_epoch, passes_of
from trainer.engines.trl.teacher import Teacher, make_teacher
from trainer.errors import DivergedError, TrainerConfigError
from trainer.model.causal_lm import has_plain_head
from trainer.model.packing import trees_of

logger = logging.getLogger(__name__)


class ComposerReplicationTrainer(GRPOTrainer):
    """`GRPOTrainer` with hint-conditioned self-distillation and trace-replay preference pairs.

    `train_dataset` is TRL's (column `prompt`). Rows with a `hint` are used for channel 2. With
    `recorded`, nothing is generated: the rollouts are recorded decisions, with exact importance
    ratios. `pairs` are the rows of channel 3: `prompt`, `chosen`, `rejected`.
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
            TrainerConfigError: channel 2 with a model that it cannot serve, an objective without
                pairs, or DeepSpeed.
            DatasetError: a row of `pairs` is at fault; the message names it and the column.
        """
        args = args or ComposerConfig()
        self.recorded = recorded
        if recorded is not None:
            options |= {
                "train_dataset": Dataset.from_list(recorded.rows()),
                "rollout_func": replay_rollouts,
            }
        super().__init__(model, reward_funcs, args, **options)
        rows: Any = self.train_dataset
        n_at_once = (args.generation_batch_size or 1) // (args.num_generations or 1)
        if isinstance(rows, Dataset) and 0 < (n_rows := len(rows)) < n_at_once:
            # TRL leaves out what fills no batch, and would make no step.
            repeated: Any = rows.select([i % n_rows for i in range(n_at_once)])
            self.train_dataset = repeated
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise TrainerConfigError(
                "DeepSpeed gathers weights in its own forward call alone, and this trainer calls a model's "
                "layers and its head apart: use DDP, FSDP2, or adapters (peft.rank=16)"
            )
        self.composer: ComposerConfig = args
        self.hint = hint
        tokenizer: Any = self._tokenizer
        self.collator = ComposerDataCollator(tokenizer, hint=hint, **args.rendering)
        # For what TRL renders itself: the prompts of an environment.
        self.chat_template_kwargs = dict(self.collator.renderer.features.options)
        if tokens is not None:
            self.collator.renderer.store = tokens
        self.pairs = checked_rows(pairs or (), "pairs")
        bare = self.accelerator.unwrap_model(self.model)
        self.figures = Figures(has_policy=args.policy_weight > 0)
        self.pair_channel = (
            PairChannel(bare, self.accelerator, args, self.collator, self.pairs)
            if self.draws_pairs
            else None
        )
        teacher = None
        if args.alpha_sdpo > 0:
            teacher = make_teacher(args, bare, has_router_loss=self.aux_loss_enabled)
            self.add_callback(teacher)
        self.hint_channel = HintChannel(
            teacher,
            self.accelerator,
            args,
            self.figures,
            lambda: self.state.max_steps,
        )
        self.drift = (
            make_drift(bare, self.collator.renderer, kept, args) if args.drift_weight > 0 else None
        )
        self._shared: SharedForward | None = None
        """The pass that a micro-batch's channels share, if they do."""
        self._hinted: HintedInputs | None = None
        """What channel 2 reads, while TRL computes the loss of a micro-batch with hints."""
        self._sdpo_sum: Tensor | None = None
        if args.beta_replay > 0 and not self.pairs:
            logger.warning("channel replay is off: no pairs were given")
        if args.is_sft and not self.pairs:
            raise TrainerConfigError("objective=sft needs pairs, and none were given")

    @property
    def draws_pairs(self) -> bool:
        """Return whether steps draw pairs, for channel 3 or for cross-entropy on their chosen sides."""
        return (self.composer.has_preference or self.composer.is_sft) and bool(self.pairs)

    @property
    def pair_forward(self) -> str:
        """Return how pairs run: packed, padded with the reason, or None."""
        return self.pair_channel.forward if self.pair_channel else "none"

    @property
    def n_live_steps(self) -> dict[str, int]:
        """Return the number of micro-batches in which a channel had an effect, up to the last log."""
        return self.figures.n_live_steps

    @property
    def teacher(self) -> Teacher | None:
        """Return the teacher of channel 2."""
        return self.hint_channel.teacher

    @property
    def _mode(self) -> str:
        return "train" if self.model is not None and self.model.training else "eval"

    # -- what TRL calls --------------------------------------------------------------------------

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Render prompts as those of pairs are: budget, tools, and text for what has no place.

        An environment's tools are TRL's concern, and so are its prompts.
        """
        if self.environment_factories is not None or self.tools:
            return super()._tokenize_prompts(prompts)
        rows = zip(prompts, self.rollout_rows, strict=True)
        ids_of = self.collator.renderer.row_prompt_ids
        return [ids_of({**row, "prompt": prompt}) for prompt, row in rows], None, {}

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.recorded is not None:
            first = self.accelerator.process_index * len(inputs)
            inputs = self.recorded.expand(inputs, first=first, n=self.num_generations or 1)
        self.rollout_rows = inputs  # a rollout_func sees only prompts
        output = super()._generate_and_score_completions(inputs)
        if all(row.get("old_logps") is not None for row in inputs):
            output["old_per_token_logps"] = _recorded_logps(inputs, output["completion_ids"])
        if self.composer.alpha_sdpo > 0 or self.draws_pairs:
            # Here the host waits for the device in any case; in the steps to come it need not.
            output |= {HOST + name: output[name].cpu() for name in ROLLOUT if name in output}
        return output | self.hint_channel.hinted(inputs, output, self.collator.renderer, self.hint)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._mode == "train" and self.draws_pairs and not self.composer.needs_rollouts:
            return {"pairs": self._next_pairs()}  # nothing is generated or scored for no one
        inputs = super()._prepare_inputs(generation_batch)
        if self._mode == "train" and self.pair_channel is not None:
            inputs = {**inputs, "pairs": self._next_pairs()}
        return inputs

    def _next_pairs(self) -> dict[str, Any]:
        assert self.pair_channel is not None
        n_micro = self.args.gradient_accumulation_steps
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return self.pair_channel.batch(
            self.state.global_step,
            part=self._step % n_micro * world + rank,
            n_parts=n_micro * world,
            # Every rank must gather the same layers in the same order; and pairs of weight 0 are
            # the graph of a rank that has nothing else to send back.
            is_filled=isinstance(self.model, FSDPModule)
            or self.composer.policy_weight == 0
            or self.composer.is_sft,
        )

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        unwrapped = self.accelerator.unwrap_model(model)
        # FSDP2 shards in place: there is nothing to unwrap, but its hooks sit on the forward call.
        if unwrapped is model and not isinstance(model, FSDPModule):
            return self._three_channels(model, inputs)
        return _ForwardRedirection()(model, unwrapped, self._three_channels, unwrapped, inputs)

    def _three_channels(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        has_sdpo = self.teacher is not None and float(inputs.get("n_sdpo_tokens", 0)) > 0
        is_sft = self.composer.is_sft and "pairs" in inputs
        needs_policy = has_sdpo or "pairs" not in inputs
        needs_policy |= self.composer.policy_weight > 0 and not is_sft
        payload = self.hint_channel.inputs(inputs) if has_sdpo else None
        loss = torch.zeros((), device=self.accelerator.device)
        if self.drift is not None and self._mode == "train":
            loss = loss + self._drift_term(self.drift, model)
        passes = self._planned(model, inputs, payload) if needs_policy else None
        if "pairs" in inputs:
            loss = loss + self._pairs_term(model, inputs["pairs"], passes)
        if not needs_policy:  # its forward pass would be multiplied by 0
            return loss
        # TRL asks for log-probs, and gets those of the planned passes, with channel 2 beside them.
        self._hinted, self._sdpo_sum = payload, None
        try:
            policy = super()._compute_loss(model, inputs)
        finally:
            self._hinted, self._shared = None, None
        if not is_sft:
            loss = loss + self.composer.policy_weight * policy
            self._note_policy(policy, inputs)
        if payload is not None:
            assert self._sdpo_sum is not None
            loss = loss + self.composer.alpha_sdpo * self.hint_channel.term(
                self._sdpo_sum,
                inputs,
                mode=self._mode,
                n_micro=self.current_gradient_accumulation_steps,
                step=self.state.global_step + 1,
            )
        return loss

    def _pairs_term(self, model: nn.Module, pairs: dict[str, Any], passes: Passes | None) -> Tensor:
        """Charge the pairs of a micro-batch in passes of their own, or in those with the policy's."""
        assert self.pair_channel is not None
        shared = self._shared
        if shared is None and pairs.get("batch"):
            passes_of_pairs = self.pair_channel.passes(model, pairs["batch"])
        else:
            passes_of_pairs = passes or []
        charged, figures = self.pair_channel.term(
            pairs,
            passes_of_pairs,
            # A shared pass has the policy's graph as well, and pairs alone must leave one.
            is_kept=passes is None or (shared is not None and shared.tree.n_pairs > 0),
        )
        n_micro = self.current_gradient_accumulation_steps
        for channel, noted in figures.items():
            self.figures.note("train", channel, noted, n_micro=n_micro)
        return charged

    def _drift_term(self, drift: Drift, model: nn.Module) -> Tensor:
        """Charge a micro-batch for what the model left of its first weights."""
        n_micro = self.current_gradient_accumulation_steps
        draw = self.state.global_step * n_micro + self._step % n_micro
        term = drift.term(model, draw, self.accelerator.autocast)
        self.figures.note("train", "drift", torch.stack([term.detach(), torch.ones_like(term)]))
        return self.composer.drift_weight * term / n_micro

    def _note_policy(self, policy: Tensor, inputs: Mapping[str, Any]) -> None:
        n_micro = self.current_gradient_accumulation_steps if self._mode == "train" else 1
        is_live = (inputs["advantages"] != 0).any()
        noted = torch.stack([policy.detach().float(), is_live.float()])
        noted = self.accelerator.reduce(noted, reduction="mean")  # as ranks' gradients are
        self.figures.note(self._mode, "policy", noted, n_micro=n_micro)

    # -- the forward passes of a micro-batch -----------------------------------------------------

    def _planned(
        self, model: nn.Module, inputs: Mapping[str, Any], payload: HintedInputs | None
    ) -> Passes:
        """Plan one pass for the completions and as many pairs as fit, then passes for the other pairs.

        If completions and pairs can't form one tree, nothing is planned, and `_shared` is None.
        """
        if not self._can_share(model, inputs):
            return []
        sequences = token_sequences(*(on_host(inputs)[name] for name in ROLLOUT[:4]))
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
        max_tokens = self.composer.max_packed_tokens
        tree, *others = trees_of(batch, max_tokens=max_tokens, sequences=sequences)
        self._shared = SharedForward(model, tree, inputs["completion_ids"], is_live=is_live)
        (rows, _), *passes = passes_of(model, [tree, *others])
        # Last, when the graphs of the others have been sent back and are gone.
        return [*passes, (rows, self._shared.pair_logps)] if tree.n_pairs else passes

    def _can_share(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        return (
            self.pair_forward == "packed"
            and not isinstance(model, FSDPModule)
            and not self.aux_loss_enabled
            and all(value is None for name, value in inputs.items() if "image" in name)
            and has_plain_head(model)
        )

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
        if self._hinted is None and self._shared is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        with self.accelerator.autocast():
            if self._hinted is not None:
                assert self.teacher is not None
                logps_BC, entropy_BC, self._sdpo_sum = policy_and_distillation(
                    model,
                    self.teacher.weights,
                    self._hinted,
                    self.hint_channel.options,
                    is_fused=self.composer.is_fused,
                    shared=self._shared,
                )
            else:
                assert self._shared is not None
                states_BCH, ids_BC = self._shared.student_states(), input_ids[:, -logits_to_keep:]
                logps_BC, entropy_BC = policy_of_states(
                    model, states_BCH, ids_BC, temperature=self.composer.temperature
                )
        # TRL reduces the entropy across processes in place, unless it is part of the loss.
        is_charged = self._entropy_bonus_enabled
        return logps_BC, entropy_BC if is_charged else entropy_BC.detach(), None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the figures since the last call, of all micro-batches and ranks.

        Raises:
            DivergedError: the loss is no longer a number.
        """
        self.figures.log_into(self._metrics)
        super().log(logs, *args, **kwargs)
        if not math.isfinite(loss := logs.get("loss", 0.0)):
            raise DivergedError(
                f"step {self.state.global_step}: the loss is {loss}, and the weights are lost. Lower "
                "learning_rate or max_grad_norm; a checkpoint of an earlier step can still be used"
            )

    # -- order of the data, checkpoints ----------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        at_epoch(self._train_sampler, options["epoch"], seed=self.args.seed)
        super()._run_epoch(*arguments, **options)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.figures.read()
        super()._save_checkpoint(model, trial)
        if not self.args.should_save:
            return
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        # Last: a folder that has this file is a whole checkpoint.
        state = {"taid": self.hint_channel.save(folder), "n_live_steps": self.n_live_steps}
        (folder / STATE_FILE).write_text(json.dumps(state), "utf-8")

    def save_step(self) -> None:
        """Save the last whole step as a checkpoint, after a later one was left halfway."""
        assert self.model is not None
        self.figures.forget()
        self._save_checkpoint(self.model, None)

    def take_up_end(self, folder: Path) -> bool:
        """Take up a checkpoint of the last step, and return whether it is one: no step is to be made."""
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        if state.global_step < state.max_steps:
            return False
        self.state = state
        self._load_from_checkpoint(str(folder))
        self._load_own_state(folder)
        self.callback_handler.on_train_begin(self.args, state, self.control)
        self.callback_handler.on_train_end(self.args, state, self.control)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE_FILE).exists():
            self._load_own_state(Path(checkpoint))

    def _load_own_state(self, folder: Path) -> None:
        state = json.loads((folder / STATE_FILE).read_text("utf-8"))
        self.n_live_steps.update(state.get("n_live_steps", {}))
        self.hint_channel.load(folder, state["taid"])


def _recorded_logps(rows: Sequence[Mapping[str, Any]], ids_BC: Tensor) -> Tensor:
    found = [torch.tensor(row["old_logps"], dtype=torch.float32) for row in rows]
    logps_BC = pad(found, padding_value=0, padding_side="right").to(ids_BC.device)
    if logps_BC.shape != ids_BC.shape:
        raise TrainerConfigError(
            f"recorded log-probs {tuple(logps_BC.shape)} do not fit the completions "
            f"{tuple(ids_BC.shape)}: raise max_completion_length"
        )
    return logps_BC
