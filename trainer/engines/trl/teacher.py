"""The teacher of channel 2: a moving average of the student, its first weights, or the student itself."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trainer.errors import TrainerConfigError
from trainer.settings import SharedSettings

FILE_NAME = "teacher.safetensors"


class Teacher(TrainerCallback):
    """The model that sees the hint.

    `ema` and `base` keep a frozen copy of the student from the start. Under PEFT, `base` is the
    student with its adapter off. `live` is the student itself, without gradient. Every rank has a
    whole copy, even if the student is sharded.
    """

    def __init__(self, kind: str, student: nn.Module, *, ema_rate: float) -> None:
        """Make the copy if this kind needs one.

        Raises:
            TrainerConfigError: an EMA of a PEFT model, whose copy would hold the base twice.
        """
        self.kind, self.ema_rate = kind, ema_rate
        self._is_peft = hasattr(student, "peft_config")
        if kind == "ema" and self._is_peft:
            raise TrainerConfigError("teacher='ema' does not support PEFT: use 'base' or 'live'")
        self.copy: nn.Module | None = None
        if kind == "ema" or (kind == "base" and not self._is_peft):
            self.copy = _frozen_copy(student)

    @contextlib.contextmanager
    def weights(self, student: nn.Module) -> Iterator[nn.Module]:
        """Yield the teacher as a module in eval mode, for use without gradient."""
        if self.copy is not None:
            yield self.copy
            return
        was_training = student.training
        student.eval()
        try:
            if self.kind == "base":
                with student.disable_adapter():  # type: ignore[operator]
                    yield student
            else:
                yield student
        finally:
            student.train(was_training)

    @torch.no_grad()
    def follow(self, student: nn.Module) -> None:
        """Update the moving average by one step."""
        if self.kind != "ema" or self.copy is None:
            return
        for kept, current in zip(self.copy.parameters(), student.parameters(), strict=True):
            whole = current.full_tensor() if isinstance(current, DTensor) else current
            kept.lerp_(whole.to(kept.device, kept.dtype), self.ema_rate)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Update the teacher after each optimizer step."""
        model = kwargs["model"]
        self.follow(model.module if hasattr(model, "module") else model)

    def save(self, folder: Path) -> None:
        """Write the moving average next to the student's checkpoint."""
        if self.kind == "ema" and self.copy is not None:
            tensors = {name: value.contiguous() for name, value in self._parameters().items()}
            save_file(tensors, folder / FILE_NAME)

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote. If the checkpoint has none, the copy stays."""
        path = folder / FILE_NAME
        if self.kind != "ema" or self.copy is None or not path.exists():
            return
        kept = load_file(path)
        with torch.no_grad():
            for name, value in self._parameters().items():
                value.copy_(kept[name])

    def _parameters(self) -> dict[str, Tensor]:
        assert self.copy is not None
        return {name: value.detach() for name, value in self.copy.named_parameters()}


def make_teacher(args: SharedSettings, student: nn.Module, *, has_router_loss: bool) -> Teacher:
    """Make the teacher that the settings name for this student.

    Raises:
        TrainerConfigError: the model has a router loss, or doesn't support this kind of teacher.
    """
    if has_router_loss:
        raise TrainerConfigError(
            "channel 2 does not support models with a router loss: set alpha_sdpo=0 or "
            "router_aux_loss_coef=0"
        )
    kind = args.teacher
    if kind == "auto":
        kind = "base" if hasattr(student, "peft_config") else "ema"
    return Teacher(kind, student, ema_rate=args.teacher_ema_rate)


def _frozen_copy(model: nn.Module) -> nn.Module:
    # TRL binds a patched forward to the instance; a copy must not call back into the original.
    patched = model.__dict__.pop("forward", None)
    try:
        copied = copy.deepcopy(model)
    finally:
        if patched is not None:
            model.__dict__["forward"] = patched
    return copied.eval().requires_grad_(requires_grad=False)
