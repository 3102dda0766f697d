"""Measure the run's own objective on a fixed batch, to see whether it falls."""

import torch
from torch import Tensor, nn

from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import PreferenceData
from trainer.data.sampler import balance_of, preference_weight
from trainer.engines.trl.config import ComposerConfig
from trainer.losses.channels import replay_per_pair
from trainer.losses.logps import align_responses
from trainer.model.scoring import (
    chunked_distillation,
    logps_of_states,
    response_states,
    summed_by_row,
)

_SIDES = (("chosen", 1.0), ("rejected", -1.0))
"""Side of a pair, and the advantage of its action."""


class FixedBatchObjective:
    """The objective of all three channels on up to `n_rows` pairs, those with a hint first.

    The policy term is the clipped surrogate of the pairs' actions against their log-probs at the
    start of the run, with advantage +1 for chosen and -1 for rejected (near 0 at the start). With
    `objective: sft`, it is the cross-entropy of the chosen actions. Added are alpha times the
    self-distillation, with the model itself as teacher, and beta times the preference loss.
    """

    def __init__(
        self,
        model: nn.Module,
        collator: ComposerDataCollator,
        data: PreferenceData,
        args: ComposerConfig,
        *,
        n_rows: int = 8,
    ) -> None:
        """Fix the batch, and the log-probs that the policy is held against."""
        # Rows that are only imitated say nothing about a preference.
        pairs = [row for row in data.pairs if preference_weight(row)] or data.pairs
        order = sorted(range(len(pairs)), key=lambda i: not pairs[i].get("hint"))
        self.model, self.args = model, args
        rows = [pairs[i] for i in order[:n_rows]]
        self.batch = collator(rows)
        self._balance = torch.tensor([balance_of(row) for row in rows])
        self._old: dict[str, Tensor] = {}
        self._reference: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def __call__(self) -> float:
        """Measure the objective now, wherever the model is."""
        was_training = self.model.training
        self.model.eval()
        device = next(self.model.parameters()).device
        batch = {key: value.to(device) for key, value in self.batch.items()}
        states = {side: self._states(batch, f"dpo_{side}_") for side, _ in _SIDES}
        value = self.args.policy_weight * self._policy(states, batch)
        if self.args.has_preference:
            value += self.args.beta_replay * self._replay(states, batch)
        if self.args.alpha_sdpo and "sdpo_mask" in batch:
            value += self.args.alpha_sdpo * self._distillation(states["chosen"], batch)
        self.model.train(was_training)
        return value

    def _states(self, batch: dict[str, Tensor], prefix: str) -> Tensor:
        return response_states(
            self.model, batch[f"{prefix}input_ids"], batch[f"{prefix}attention_mask"]
        )

    def _logps(
        self, states: dict[str, Tensor], batch: dict[str, Tensor], side: str, temperature: float
    ) -> Tensor:
        ids, mask = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
        return logps_of_states(self.model, states[side], ids, mask, temperature=temperature)

    def _policy(self, states: dict[str, Tensor], batch: dict[str, Tensor]) -> float:
        total, n_tokens, args = 0.0, 0, self.args
        if args.is_sft:
            return -float(self._logps(states, batch, "chosen", 1.0).mean())
        for side, advantage in _SIDES:
            logps_N = self._logps(states, batch, side, args.temperature)
            old_N = self._old.setdefault(side, logps_N).to(logps_N.device)
            ratio_N = (logps_N - old_N).exp()
            high = args.epsilon if args.epsilon_high is None else args.epsilon_high
            clipped_N = ratio_N.clamp(1 - args.epsilon, 1 + high)
            total -= float(torch.min(ratio_N * advantage, clipped_N * advantage).sum())
            n_tokens += len(logps_N)
        return total / max(n_tokens, 1)

    def _replay(self, states: dict[str, Tensor], batch: dict[str, Tensor]) -> float:
        (chosen, n_chosen), (rejected, n_rejected) = (
            summed_by_row(self._logps(states, batch, side, 1.0), batch[f"dpo_{side}_response_mask"])
            for side, _ in _SIDES
        )
        self._reference = self._reference or (chosen, rejected)
        before = [one.to(chosen.device) for one in self._reference]
        losses = replay_per_pair(
            chosen, rejected, n_chosen, n_rejected, before[0], before[1], self.args.preference
        )
        weights, balance = batch["dpo_weight"], self._balance.to(losses.device)
        return float((losses * weights * balance).sum() / weights.sum())

    def _distillation(self, student: Tensor, batch: dict[str, Tensor]) -> float:
        teacher = self._states(batch, "ctx_teacher_")
        same = align_responses(
            batch["input_ids"],
            batch["response_mask"],
            batch["ctx_teacher_input_ids"],
            batch["ctx_teacher_response_mask"],
            row_mask_B=batch["sdpo_mask"],
        )
        options = self.args.sdpo
        if options.wrapper == "taid":
            options = options.at(self.args.taid_t_end)
        charged = chunked_distillation(
            self.model,
            student[same.rows, same.student_positions - 1],
            teacher[same.rows, same.teacher_positions - 1],
            same.ids,
            options,
        )
        return float(charged) / max(len(same), 1)
