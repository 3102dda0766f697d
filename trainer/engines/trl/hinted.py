"""Channel 2: the context of the hinted teacher, the schedule of its target, and the loss of a step.

Dimensions in names: `B` sequences, `C` completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import pad

from trainer.data.hints import HintFunction
from trainer.data.rendering import Renderer
from trainer.engines.trl.config import ComposerConfig
from trainer.engines.trl.figures import Figures
from trainer.engines.trl.forward import HintedInputs
from trainer.engines.trl.teacher import Teacher
from trainer.losses.channels import SDPOOptions
from trainer.losses.taid import TAIDScheduler

ROLLOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
"""Names of the tensors of a batch of rollouts."""
HOST = "host_"
"""Prefix for the names of rollout tensors on the CPU, which can be read without waiting for the device."""

_HINTED = (*ROLLOUT[:4], "teacher_prompt_ids", "teacher_prompt_mask")


class HintChannel:
    """The channel, which builds the teacher's context and computes the trainee's distance from the teacher."""

    def __init__(
        self,
        teacher: Teacher | None,
        accelerator: Accelerator,
        args: ComposerConfig,
        figures: Figures,
        max_steps: Callable[[], int],
    ) -> None:
        """Follow `teacher`, or none where others give the teacher's probabilities."""
        self.teacher = teacher
        self._accelerator, self._args, self._figures = accelerator, args, figures
        self._max_steps = max_steps
        self._options = args.sdpo
        self.taid: TAIDScheduler | None = None
        self._taid_window: list[Tensor] = []

    @property
    def options(self) -> SDPOOptions:
        """Return the divergence at this step."""
        if self._options.wrapper != "taid":
            return self._options
        return self._options.at(self.schedule.t)

    @property
    def schedule(self) -> TAIDScheduler:
        """Return the position of TAID's target between student and teacher."""
        if self.taid is None:
            self.taid = TAIDScheduler(
                max(self._max_steps(), 1),
                t_start=self._args.taid_t_start,
                t_end=self._args.taid_t_end,
                alpha=self._args.taid_alpha,
            )
        return self.taid

    def hinted(
        self,
        rows: Sequence[Mapping[str, Any]],
        rollouts: Mapping[str, Any],
        renderer: Renderer,
        hint: HintFunction,
    ) -> dict[str, Tensor]:
        """Return hinted prompts, a mask of the rows with one, and the token count of the whole batch."""
        if self.teacher is None:
            return {}
        hints = [hint(row) for row in rows]
        prompts = [
            torch.tensor(renderer.row_prompt_ids(row, hint=found))
            for row, found in zip(rows, hints, strict=True)
        ]
        has_hint_B = torch.tensor([1.0 if found else 0.0 for found in hints])
        n_mine = (written_mask(on_host(rollouts)) * has_hint_B.unsqueeze(-1)).sum()
        n_mine = n_mine.to(self._accelerator.device)
        ones = [torch.ones_like(ids) for ids in prompts]
        return {
            "teacher_prompt_ids": pad(prompts, renderer.tokenizer.pad_token_id, "left"),
            "teacher_prompt_mask": pad(ones, 0, "left"),
            "sdpo_mask": has_hint_B,
            "n_sdpo_tokens": self._accelerator.reduce(n_mine, reduction="sum").cpu(),
        }

    @staticmethod
    def inputs(batch: Mapping[str, Any]) -> HintedInputs:
        """Return the student's batch with the same completions after hinted prompts."""
        lying = on_host(batch)
        mask_BC = (written_mask(lying) * batch["sdpo_mask"].unsqueeze(-1)) > 0
        lying |= {name: batch[name] for name in ("teacher_prompt_ids", "teacher_prompt_mask")}
        return HintedInputs(mask=mask_BC, **{name: lying[name] for name in _HINTED})

    def term(
        self, summed: Tensor, batch: Mapping[str, Any], *, mode: str, n_micro: int, step: int
    ) -> Tensor:
        """Return a micro-batch's loss: its sum divided by the tokens of one accumulation window."""
        normalizer = batch["n_sdpo_tokens"] / self._accelerator.num_processes
        if mode == "train":
            normalizer = (normalizer * n_micro) / (self._args.steps_per_generation or 1)
        mine = summed.detach().float()
        n_mine = written_mask(on_host(batch)) * batch["sdpo_mask"].unsqueeze(-1)
        totals = torch.stack([mine, torch.full_like(mine, float(n_mine.sum()))])
        totals = self._accelerator.reduce(totals, reduction="sum")
        self._figures.note(mode, "sdpo", totals, n_micro=n_micro if mode == "train" else 1)
        if mode == "train":
            self.advance(totals, step)
        return summed / normalizer

    def advance(self, totals: Tensor, step: int) -> None:
        """Advance TAID's schedule by the loss of an accumulation window, from its sum and tokens."""
        if self._options.wrapper != "taid":
            return
        self._figures.taid_t.append(self.schedule.t)
        self._taid_window.append(totals)
        if self._accelerator.sync_gradients:
            summed, n_tokens = torch.stack(self._taid_window).sum(0)
            self._taid_window = []
            self.schedule.update_t(summed / n_tokens.clamp_min(1.0), step)

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Write the teacher's moving average next to a checkpoint, and return the state of TAID's schedule."""
        if self.teacher is not None:
            self.teacher.save(folder)
        return self.taid.state_dict() if self.taid else None

    def load(self, folder: Path, taid: Mapping[str, Any] | None) -> None:
        """Restore the state that `save` wrote and returned."""
        if taid is not None:
            self.schedule.load_state_dict(dict(taid))
        if self.teacher is not None:
            self.teacher.load(folder)


def written_mask(inputs: Mapping[str, Any]) -> Tensor:
    """Return a mask of the tokens that the model wrote: completions without tool results and padding."""
    mask_BC = inputs["completion_mask"]
    return mask_BC * inputs["tool_mask"] if "tool_mask" in inputs else mask_BC


def on_host(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the CPU copies of rollout tensors by their plain names."""
    return {name: inputs[HOST + name] for name in ROLLOUT if HOST + name in inputs}
