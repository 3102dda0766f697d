"""Stop a run at any step so that it can continue exactly. A killed run can continue too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trainer.errors import TrainingStoppedError
from trainer.trl.checkpoints import LAST, RunStamp, write_stamp


class StopAtStep(TrainerCallback):
    """The callback that stamps every checkpoint as complete and, on request, saves one and stops.

    Args:
        stamp: stamp of the run.
        should_stop: called after each step.
    """

    def __init__(self, stamp: RunStamp, should_stop: Callable[[], bool]) -> None:
        self.stamp, self.should_stop = stamp, should_stop
        self.stopped_in: Path | None = None
        """The checkpoint at which the run was stopped."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request a checkpoint and the end, at a step where TRL starts a new batch."""
        per_batch = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
        is_boundary = state.global_step % (per_batch * args.num_iterations) == 0
        is_last = state.global_step >= state.max_steps
        if self._is_asked(args) and is_boundary and not is_last:
            control.should_save = control.should_training_stop = True
            self.stopped_in = _folder(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark the checkpoint as complete, and remove TRL's pickled arguments."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank writes files of its own
        if state.is_world_process_zero:
            folder = _folder(args, state)
            (folder / "training_args.bin").unlink(missing_ok=True)
            write_stamp(folder, self.stamp)

    def raise_if_stopped(self, n_steps: int, max_steps: int) -> None:
        """Raise if the run has not reached its end.

        Raises:
            TrainingStoppedError: it was stopped.
        """
        if self.stopped_in is not None:
            raise TrainingStoppedError(
                f"stopped at step {n_steps} of {max_steps}, as requested; {self.stopped_in} is complete. To continue, run the same command with resume_from={LAST}"
            )

    def _is_asked(self, args: Any) -> bool:
        """Return whether any rank was asked: all of them must stop at the same step."""
        asked = self.should_stop()
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return asked
        flag = torch.tensor(float(asked), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
