"""Channel 2 with recorded token probabilities of teachers, instead of the hinted self-teacher.

It is off-policy: the tokens are the teachers', and nothing is sampled. It is a subclass, so that
other runs have none of this code in their steps.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from trainer.data.collator import padded
from trainer.data.dataset import load_teacher_logprobs
from trainer.data.rendering import Renderer
from trainer.data.sampler import PairSampler
from trainer.data.teacher_logprobs import AnswerReader, ScoredAnswer
from trainer.errors import DatasetError, TrainerConfigError
from trainer.losses.channels import SDPOOptions
from trainer.losses.recorded_teacher import NO_ENTRY, recorded_teacher_per_token
from trainer.model.scoring import CHUNK, project, response_states
from trainer.settings import RunConfig
from trainer.trl.teacher import Teacher
from trainer.trl.trainer import ComposerReplicationTrainer

logger = logging.getLogger(__name__)


def recorded_answers(
    config: RunConfig, renderer: Renderer
) -> tuple[list[ScoredAnswer], dict[str, int]]:
    """Read the teachers' answers that this run learns from, with their counts.

    They are only read if channel 2 has a weight and `teacher` is `recorded`.

    Raises:
        DatasetError: the dataset has none, or they share no token with the student.
    """
    if config.shared.teacher != "recorded" or config.shared.alpha_sdpo == 0:
        return [], {}
    reader = AnswerReader(renderer)
    answers = reader.read(load_teacher_logprobs(config.dataset, revision=config.revision))
    counts = dict(sorted(reader.counts.items()))
    logger.info("recorded teachers: %s", counts)
    if not answers:
        raise DatasetError(
            f"{config.dataset}: no token of a teacher's answer is one of the student's "
            f"({counts}): do teacher and student have the same kind of tokenizer?"
        )
    return answers, counts


class RecordedTeacherTrainer(ComposerReplicationTrainer):
    """The trainer whose channel 2 is the divergence from recorded teachers."""

    def __init__(self, *arguments: Any, answers: Sequence[ScoredAnswer], **options: Any) -> None:
        """Build the trainer; `answers` are drawn as pairs are, `pairs_per_step` a step.

        Raises:
            TrainerConfigError: the model is sharded, whose head only its own forward call gathers.
        """
        super().__init__(*arguments, **options)
        if self.is_fsdp_enabled:
            raise TrainerConfigError("teacher='recorded' does not support FSDP: use DDP")
        self.answers = list(answers)
        self._answer_sampler = PairSampler(
            len(self.answers), batch_size=self.composer.pairs_per_step, seed=self.args.seed
        )

    def _make_teacher(self) -> Teacher | None:
        return None

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        return {**inputs, "answers": self._next_answers()} if self._mode == "train" else inputs

    def _next_answers(self) -> dict[str, Any]:
        n_micro = self.args.gradient_accumulation_steps
        n_parts = n_micro * self.accelerator.num_processes
        part = self._step % n_micro * self.accelerator.num_processes
        part += self.accelerator.process_index
        step = self.state.global_step
        mine = self._answer_sampler.part(step, part=part, n_parts=n_parts)
        n_tokens = sum(len(self.answers[i].places) for i in self._answer_sampler.step(step))
        return {"mine": [self.answers[i] for i in mine], "n_tokens": n_tokens}

    def _three_channels(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._three_channels(model, inputs)
        if "answers" not in inputs:
            return loss
        return loss + self.composer.alpha_sdpo * self._recorded_term(model, inputs["answers"])

    def _recorded_term(self, model: nn.Module, drawn: Mapping[str, Any]) -> Tensor:
        """Sum over this rank's tokens, scaled so that DDP's mean over ranks is the mean of all."""
        mine: Sequence[ScoredAnswer] = drawn["mine"]
        charged = torch.zeros((), device=self.accelerator.device)
        if mine:
            with self.accelerator.autocast():
                pad_id = int(self._tokenizer.pad_token_id)
                charged = recorded_distillation(
                    model, mine, self.hint_channel.options, pad_id=pad_id
                )
        summed = charged.detach().float()
        n_mine = torch.full_like(summed, sum(len(answer.places) for answer in mine))
        totals = self.accelerator.reduce(torch.stack([summed, n_mine]), reduction="sum")
        n_micro = self.current_gradient_accumulation_steps
        self.figures.note("train", "sdpo", totals, n_micro=n_micro)
        self.hint_channel.advance(totals, self.state.global_step + 1)
        return charged * (self.accelerator.num_processes / max(drawn["n_tokens"], 1))


def recorded_distillation(
    model: nn.Module, answers: Sequence[ScoredAnswer], options: SDPOOptions, *, pad_id: int
) -> Tensor:
    """Return the sum of channel 2's loss over these answers, with logits computed one chunk at a time.

    Raises:
        TrainerConfigError: the layers of the model are sharded.
    """
    if isinstance(model, FSDPModule):
        raise TrainerConfigError("teacher='recorded' does not support FSDP: use DDP")
    on_device = partial(Tensor.to, device=next(model.parameters()).device, non_blocking=True)
    rows = [answer.prompt_ids + answer.answer_ids for answer in answers]
    states_BTH = response_states(
        model,
        on_device(padded(rows, pad_id)),
        on_device(padded([[1] * len(row) for row in rows], 0)),
    )
    predicting = [
        (row, len(answer.prompt_ids) + place - 1)
        for row, answer in enumerate(answers)
        for place in answer.places
    ]
    rows_N, places_N = on_device(torch.tensor(predicting)).T
    support_NK = padded([ids for answer in answers for ids in answer.support], NO_ENTRY)
    teacher_NK = torch.zeros_like(support_NK, dtype=torch.float32)
    teacher_NK[support_NK != NO_ENTRY] = torch.tensor(
        [logp for answer in answers for logps in answer.logps for logp in logps]
    )

    def charge(hidden: Tensor, support: Tensor, teacher: Tensor) -> Tensor:
        logits = project(model, hidden)
        return recorded_teacher_per_token(logits, support, teacher, options).sum()

    chunks = zip(
        states_BTH[rows_N, places_N].split(CHUNK),
        on_device(support_NK).split(CHUNK),
        on_device(teacher_NK).split(CHUNK),
        strict=True,
    )
    charged = [checkpoint(charge, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(charged).sum()
