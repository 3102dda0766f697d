"""A run that can be stopped at any step, or killed, and goes on as if nothing had happened."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from trainer.errors import TrainingStoppedError

LAST = "last"
"""Value of `resume_from` for the newest checkpoint of the very same run."""

_STAMP = "run.json"
"""Written into a checkpoint when all else is there: what run it is of."""


class StopAtStep(TrainerCallback):
    """Stamps every checkpoint as complete; on request, saves one and stops.

    Args:
        identity: what the run is, as `identity_of` gives it.
        should_stop: asked after each step.
    """

    def __init__(self, identity: str, should_stop: Callable[[], bool]) -> None:
        self.identity, self.should_stop = identity, should_stop
        self.stopped_in: Path | None = None
        """The checkpoint at which the run was stopped."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for a checkpoint and the end, at a step where TRL starts on a new batch."""
        per_batch = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
        is_boundary = state.global_step % (per_batch * args.num_iterations) == 0
        is_last = state.global_step >= state.max_steps
        if self._is_asked(args) and is_boundary and not is_last:
            control.should_save = control.should_training_stop = True
            self.stopped_in = _folder(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark the checkpoint as complete, and take TRL's pickled arguments out of it."""
        if state.is_world_process_zero:
            folder = _folder(args, state)
            (folder / "training_args.bin").unlink(missing_ok=True)
            (folder / _STAMP).write_text(json.dumps({"identity": self.identity}), "utf-8")

    def raise_if_stopped(self, n_steps: int, max_steps: int) -> None:
        """Tell the caller that the run has not reached its end.

        Raises:
            TrainingStoppedError: it was stopped.
        """
        if self.stopped_in is not None:
            raise TrainingStoppedError(
                f"stopped at step {n_steps} of {max_steps}, as asked; {self.stopped_in} is "
                f"complete: the same command with resume_from={LAST} goes on from there"
            )

    def _is_asked(self, args: Any) -> bool:
        """Tell whether any rank was asked: all of them must stop at the same step."""
        asked = self.should_stop()
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return asked
        flag = torch.tensor(float(asked), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)


def identity_of(settings: Mapping[str, Any]) -> str:
    """Digest the settings and the dataset's files: equal for runs that are the same.

    Where the results go and where the run starts from do not count.
    """
    kept = {key: settings[key] for key in settings if key not in ("output", "resume_from")}
    digest = hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode())
    dataset = Path(str(settings["dataset"]))
    for path in sorted(dataset.rglob("*.parquet")):
        digest.update(str(path.relative_to(dataset)).encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def last_checkpoint(folder: Path, identity: str) -> Path | None:
    """Find the newest complete checkpoint of the run with this identity, if there is one."""
    found = {
        int(stamp.parent.name.removeprefix("checkpoint-")): stamp.parent
        for stamp in folder.glob(f"checkpoint-*/{_STAMP}")
        if json.loads(stamp.read_text("utf-8")).get("identity") == identity
    }
    return found[max(found)] if found else None


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
