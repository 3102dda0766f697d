"""Channel 3 as distillation from frozen teachers, at each token that the trainee wrote.

It is on-policy if TRL samples the rollouts. Otherwise it uses recorded actions. Each teacher has
its own weighted divergence. For KL(teacher || trainee), the sum is the divergence from the mean of
the teachers' distributions, and for KL(trainee || teacher) from their geometric mean, both up to a
constant.

Source: on-policy distillation, GKD, arXiv:2306.13649; soft targets of several models,
arXiv:1503.02531, sec. 2; the divergence at each token: `trainer.losses.distill`.

Dimensions in names: `B` rollouts, `T` tokens, `H` hidden, `N` tokens or groups of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from trainer.data.collator import padded
from trainer.errors import TrainerConfigError
from trainer.losses.channels import SDPOOptions
from trainer.losses.distill import common_support_per_token, span_per_group
from trainer.losses.divergence import log_probs, taken
from trainer.losses.recorded_teacher import NO_ENTRY, recorded_teacher_per_token
from trainer.model.scoring import CHUNK, project, response_states
from trainer.model.teachers import FrozenTeacher, TeacherView
from trainer.trl.config import ComposerConfig
from trainer.trl.figures import Figures
from trainer.trl.forward import token_sequences
from trainer.trl.hinted import ROLLOUT, on_host, written_mask

__all__ = ["DistillChannel", "Rollout", "distilled", "rollouts_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The trainee's response to a prompt, in its own tokens and in each teacher's."""

    prompt_ids: list[int]
    answer_ids: list[int]
    views: list[TeacherView]
    counted: list[bool]
    """For each token of the answer, whether the trainee wrote it, and not a tool."""


class DistillChannel:
    """The channel. It lets the teachers read new rollouts, and computes the trainee's distance from them."""

    def __init__(
        self,
        teachers: Sequence[FrozenTeacher],
        accelerator: Accelerator,
        args: ComposerConfig,
        figures: Figures,
    ) -> None:
        """Follow `teachers`."""
        self.teachers = list(teachers)
        self._accelerator, self._args, self._figures = accelerator, args, figures

    def read(self, rows: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> dict[str, Any]:
        """Let the teachers read a batch of rollouts, and count its tokens over all ranks.

        Raises:
            TrainerError: a teacher's server doesn't answer.
        """
        lying = on_host(batch)
        sequences = token_sequences(*(lying[name] for name in ROLLOUT[:4]))
        answers = [(list(prompt), list(ids)) for prompt, ids in sequences]
        mask_BC = written_mask(lying)
        counted = [
            mask[: len(ids)].bool().tolist()
            for mask, (_, ids) in zip(mask_BC, answers, strict=True)
        ]
        n_mine = mask_BC.sum().to(self._accelerator.device)
        return {
            "distill": rollouts_of(self.teachers, rows, answers, counted),
            "n_distill_tokens": self._accelerator.reduce(n_mine, reduction="sum").cpu(),
        }

    def term(
        self, model: nn.Module, batch: Mapping[str, Any], *, mode: str, n_micro: int
    ) -> Tensor:
        """Return the loss of a micro-batch, scaled so that DDP's mean over ranks is the mean over all tokens.

        Args:
            model: the trainee.
            batch: the micro-batch, after `read`.
            mode: `train` or `eval`.
            n_micro: number of micro-batches in the optimizer step.

        Raises:
            TrainerConfigError: the layers of the model are sharded.
        """
        rollouts: Sequence[Rollout] = batch["distill"]
        with self._accelerator.autocast():
            charged, n_covered = distilled(
                model,
                self.teachers,
                rollouts,
                self._args.sdpo,
                pad_id=self.teachers[0].reader.tokenizer.pad_token_id,
            )
        mine = charged.detach().float()
        n_mine = sum(sum(one.counted) for one in rollouts)
        totals = torch.stack(
            [mine, *(torch.full_like(mine, float(n)) for n in (n_covered, n_mine))]
        )
        totals = self._accelerator.reduce(totals, reduction="sum")
        self._figures.note(mode, "replay", totals, n_micro=n_micro if mode == "train" else 1)
        normalizer = batch["n_distill_tokens"] / self._accelerator.num_processes
        if mode == "train":
            normalizer = normalizer * n_micro / (self._args.steps_per_generation or 1)
        return charged / normalizer


def rollouts_of(
    teachers: Sequence[FrozenTeacher],
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[tuple[list[int], list[int]]],
    counted: Sequence[list[bool]],
) -> list[Rollout]:
    """Let every teacher read the answers (ids of prompt and answer) of these rows."""
    views = [teacher.views(rows, answers) for teacher in teachers]
    return [
        Rollout(prompt_ids=prompt, answer_ids=answer, counted=marks, views=[*of_row])
        for (prompt, answer), marks, *of_row in zip(answers, counted, *views, strict=True)
    ]


def distilled(
    model: nn.Module,
    teachers: Sequence[FrozenTeacher],
    rollouts: Sequence[Rollout],
    options: SDPOOptions,
    *,
    pad_id: int,
) -> tuple[Tensor, float]:
    """Return the summed loss and the token count of rollouts, both weighted by teacher.

    Raises:
        TrainerConfigError: the layers of the model are sharded, so that only its own forward call
            gathers its head.
    """
    if isinstance(model, FSDPModule):
        raise TrainerConfigError("replay=distill does not support FSDP: use DDP")
    states_BTH = _states(model, [(one.prompt_ids, one.answer_ids) for one in rollouts], pad_id)
    total, n_covered = states_BTH.sum() * 0.0, 0.0
    for which, teacher in enumerate(teachers):
        places = _Places(rollouts, which)
        charge = _charge_here if teacher.model is not None else _charge_served
        total = total + teacher.weight * charge(
            model, teacher, rollouts, places, states_BTH, options
        )
        n_covered += teacher.weight * places.n_covered
    return total, n_covered


def _states(
    model: nn.Module, sequences: Sequence[tuple[list[int], list[int]]], pad_id: int
) -> Tensor:
    """Compute the last hidden states of prompts with their answers, [B, T, H]."""
    rows = [prompt + answer for prompt, answer in sequences]
    move = partial(Tensor.to, device=next(model.parameters()).device, non_blocking=True)
    mask = padded([[1] * len(row) for row in rows], 0)
    return response_states(model, move(padded(rows, pad_id)), move(mask))


class _Places:
    """Where the groups of a batch lie, for one teacher: tokens that stand alone, and spans of several.

    A place is a rollout, the position that predicts the token, and the token's place in the answer.
    """

    def __init__(self, rollouts: Sequence[Rollout], which: int) -> None:
        self.views = [one.views[which] for one in rollouts]
        self.mine: list[tuple[int, int, int]] = []
        self.theirs: list[tuple[int, int, int]] = []
        self.my_spans: list[tuple[int, int, int, int]] = []
        self.their_spans: list[tuple[int, int, int, int]] = []
        self.n_covered = self.n_spans = 0
        for row, rollout in enumerate(rollouts):
            view = self.views[row]
            shifts = len(rollout.prompt_ids) - 1, len(view.prompt_ids) - 1
            for mine, theirs in view.groups:
                if not all(rollout.counted[i] for i in mine):
                    continue
                self.n_covered += len(mine)
                if len(mine) == len(theirs) == 1:
                    self.mine.append((row, shifts[0] + mine[0], mine[0]))
                    self.theirs.append((row, shifts[1] + theirs[0], theirs[0]))
                    continue
                number, self.n_spans = self.n_spans, self.n_spans + 1
                self.my_spans += [(row, shifts[0] + i, i, number) for i in mine]
                self.their_spans += [(row, shifts[1] + i, i, number) for i in theirs]


def _charge_here(
    model: nn.Module,
    teacher: FrozenTeacher,
    rollouts: Sequence[Rollout],
    places: _Places,
    states_BTH: Tensor,
    options: SDPOOptions,
) -> Tensor:
    """Charge what a teacher on this machine finds likely, from the logits of both."""
    assert teacher.model is not None
    other = teacher.model
    with torch.no_grad():
        theirs_BTH = _states(
            other,
            [(one.prompt_ids, one.answer_ids) for one in places.views],
            teacher.renderer.tokenizer.pad_token_id,
        )
    common = _common(model, teacher, states_BTH.device)

    def charge(mine_NH: Tensor, theirs_NH: Tensor) -> Tensor:
        with torch.no_grad():
            theirs_NW = project(other, theirs_NH)
        return common_support_per_token(project(model, mine_NH), theirs_NW, *common, options).sum()

    total = _in_chunks(charge, _picked(states_BTH, places.mine), _picked(theirs_BTH, places.theirs))
    if not places.n_spans:
        return total
    their_ids = [places.views[row].answer_ids[i] for row, _, i, _ in places.their_spans]
    with torch.no_grad():
        theirs_N = _span_logps(
            other, theirs_BTH, places.their_spans, their_ids, places.n_spans, options.temperature
        )
    return total + _span_term(model, rollouts, places, states_BTH, theirs_N, options)


def _charge_served(
    model: nn.Module,
    teacher: FrozenTeacher,
    rollouts: Sequence[Rollout],
    places: _Places,
    states_BTH: Tensor,
    options: SDPOOptions,
) -> Tensor:
    """Charge what a teacher at a server finds likely: its top-k, and the rest as one more entry."""
    device = states_BTH.device
    known = {there: here for here, there in teacher.alignment.common}
    scores = [one.scores or [] for one in places.views]
    entries = [
        [(known[i], logp) for i, logp in scores[row][place].items() if i in known]
        for row, _, place in places.theirs
    ]
    support_NK = padded([[i for i, _ in of_token] for of_token in entries] or [[]], NO_ENTRY)
    logp_NK = torch.zeros_like(support_NK, dtype=torch.float32)
    logp_NK[support_NK != NO_ENTRY] = torch.tensor(
        [logp for of_token in entries for _, logp in of_token], dtype=torch.float32
    )

    def charge(mine_NH: Tensor, support: Tensor, logp: Tensor) -> Tensor:
        return recorded_teacher_per_token(project(model, mine_NH), support, logp, options).sum()

    total = _in_chunks(
        charge, _picked(states_BTH, places.mine), support_NK.to(device), logp_NK.to(device)
    )
    if not places.n_spans:
        return total
    logps = [0.0] * places.n_spans
    for row, _, i, number in places.their_spans:
        logps[number] += scores[row][i][places.views[row].answer_ids[i]]
    theirs_N = torch.tensor(logps).to(device)
    return total + _span_term(model, rollouts, places, states_BTH, theirs_N, options)


def _common(
    model: nn.Module, teacher: FrozenTeacher, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of shared tokens in both heads; none where the heads have the same rows."""
    heads: list[Any] = [model, teacher.model]
    sizes = [one.get_output_embeddings().weight.size(0) for one in heads]
    if teacher.alignment.is_same and sizes[0] == sizes[1]:
        return None, None
    pairs = [pair for pair in teacher.alignment.common if pair[0] < sizes[0] and pair[1] < sizes[1]]
    here_K, there_K = torch.tensor(pairs, device=device).T
    return here_K, there_K


def _span_term(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    places: _Places,
    states_BTH: Tensor,
    theirs_N: Tensor,
    options: SDPOOptions,
) -> Tensor:
    my_ids = [rollouts[row].answer_ids[i] for row, _, i, _ in places.my_spans]
    mine_N = _span_logps(
        model, states_BTH, places.my_spans, my_ids, places.n_spans, options.temperature
    )
    return span_per_group(mine_N, theirs_N, options).sum()


def _span_logps(
    model: nn.Module,
    states_BTH: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    ids: Sequence[int],
    n_spans: int,
    temperature: float,
) -> Tensor:
    """Sum the log-probabilities of each span's tokens, [N]."""
    device = states_BTH.device
    ids_N, number_N = torch.tensor(ids), torch.tensor([number for *_, number in spans])
    ids_N, number_N = ids_N.to(device), number_N.to(device)

    def of_chunk(hidden: Tensor, wanted: Tensor) -> Tensor:
        return taken(log_probs(project(model, hidden), temperature), wanted)

    chunks = zip(_picked(states_BTH, spans).split(CHUNK), ids_N.split(CHUNK), strict=True)
    logps = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    logps_N = torch.cat(logps)
    return logps_N.new_zeros(n_spans).index_add(0, number_N, logps_N)


def _picked(states_BTH: Tensor, places: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the states at rollout and position of each place, [N, H]."""
    at = torch.tensor([place[:2] for place in places], dtype=torch.long).view(-1, 2)
    rows_N, columns_N = at.to(states_BTH.device, non_blocking=True).T
    return states_BTH[rows_N, columns_N]


def _in_chunks(charge: Any, *columns: Tensor) -> Tensor:
    """Sum what a function charges for rows of these tensors; a chunk's logits exist at a time."""
    if not len(columns[0]):
        return columns[0].sum() * 0.0
    chunks = zip(*(column.split(CHUNK) for column in columns), strict=True)
    return torch.stack([checkpoint(charge, *chunk, use_reentrant=False) for chunk in chunks]).sum()
