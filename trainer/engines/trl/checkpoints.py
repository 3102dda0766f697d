"""Stop a run at any step, and continue it: from the newest complete checkpoint of the same mathematics."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from trainer.data.types import StopRequest
from trainer.engines.trl.config import ComposerConfig
from trainer.errors import TrainerConfigError, TrainingStoppedError
from trainer.settings import RunConfig

logger = logging.getLogger(__name__)

LAST = "last"
"""Value of `resume_from` for the newest complete checkpoint in the output folder."""

STAMP_FILE = "run.json"
"""File that completes a checkpoint. It describes the run and lists the files."""

FINISHED_FILE = "finished.json"
"""File next to the checkpoints of a run that came to its end. It describes the run."""

NOT_MATHEMATICS = (
    # Where results go, what is looked at, and what is only refused or told.
    *("output", "resume_from", "again", "push_to_hub", "agreement", "evaluation.*", "peft.merge"),
    *("preflight.max_*", "engine", "own.*"),
    *("trl.disable_tqdm", "trl.report_to", "trl.run_name", "trl.project", "trl.trackio_*"),
    *("trl.log*", "trl.save_*", "trl.eval_*", "trl.hub_*", "trl.push_to_hub", "trl.output_dir"),
    *("trl.num_completions_to_print", "trl.skip_memory_metrics", "trl.debug"),
    # How fast the same sums are made, up to the order in which they are added.
    *("trl.max_packed_tokens", "trl.pair_forward"),
    *("trl.use_cpu", "trl.torch_compile*", "trl.torch_empty_cache_steps"),
    *("trl.activation_checkpointing*", "trl.gradient_checkpointing*", "trl.dataloader_*"),
    *("trl.ddp_*", "trl.ds3_gather_for_generation", "attention"),
    *("trl.vllm_server_*", "trl.vllm_gpu_memory_utilization", "trl.vllm_group_port"),
)
"""Settings that may differ between a checkpoint and the run that continues from it."""


@dataclass(frozen=True)
class RunStamp:
    """Everything that decides the steps of a run. Equal stamps mean equal steps."""

    mathematics: Mapping[str, Any]
    """Every setting that changes what is learned, by its dotted name."""
    dataset: str
    """Digest of the dataset's files. Empty for a Hub dataset, which its revision identifies."""
    n_processes: int

    def changes_from(self, other: "RunStamp") -> list[str]:
        """Return the differences from `other`, one phrase for each setting."""
        names = sorted({*self.mathematics, *other.mathematics})
        changes = [
            f"{name} (there {other.mathematics.get(name)!r}, now {self.mathematics.get(name)!r})"
            for name in names
            if self.mathematics.get(name) != other.mathematics.get(name)
        ]
        if self.dataset != other.dataset:
            changes.append("the rows of the dataset")
        if self.n_processes != other.n_processes:
            changes.append(f"processes (there {other.n_processes}, now {self.n_processes})")
        return changes


def stamp_of(config: RunConfig, *, n_processes: int = 1) -> RunStamp:
    """Return the stamp of a run with these settings. An explicit default equals an omitted one."""
    flat = _flat(asdict(config), "")
    known = {f"trl.{name}": field for name, field in ComposerConfig.__dataclass_fields__.items()}
    kept = {
        name: value
        for name, value in flat.items()
        if not any(fnmatch(name, pattern) for pattern in NOT_MATHEMATICS)
        and value is not None
        and not (name in known and known[name].default == value)
    }
    # As a file gives them back.
    return RunStamp(json.loads(json.dumps(kept, default=str)), _digest(config.dataset), n_processes)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _digest(dataset: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(Path(dataset).rglob("*.parquet")) if Path(dataset).is_dir() else []
    for path in files:
        digest.update(str(path.relative_to(dataset)).encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if files else ""


def write_stamp(folder: Path, stamp: RunStamp) -> None:
    """Mark a checkpoint as complete, with the size of each of its files."""
    sizes = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != STAMP_FILE
    }
    told = {**asdict(stamp), "files": sizes, "is_finished": False}
    (folder / STAMP_FILE).write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def mark_finished(folder: Path, stamp: RunStamp) -> None:
    """Mark a finished run and its checkpoints, so that no later run continues from them."""
    (folder / FINISHED_FILE).write_text(json.dumps(asdict(stamp), indent=1) + "\n", "utf-8")
    for path in folder.glob(f"checkpoint-*/{STAMP_FILE}"):
        told = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps(told | {"is_finished": True}, indent=1) + "\n", "utf-8")


def is_finished(folder: Path, stamp: RunStamp, *, again: bool) -> bool:
    """Return whether the run in a folder has come to its end, and is not to be started anew.

    Raises:
        TrainerConfigError: the finished run had other settings. Nothing was changed.
    """
    path = folder / FINISHED_FILE
    if again or not path.exists():
        path.unlink(missing_ok=True)
        return False
    if changes := stamp.changes_from(RunStamp(**json.loads(path.read_text("utf-8")))):
        raise TrainerConfigError(
            f"{folder} has a finished run with other settings: {'; '.join(changes)}. Start anew with "
            "these (--again), or name another output folder"
        )
    return True


def checkpoint_to_resume(resume_from: str | None, folder: Path, stamp: RunStamp) -> Path | None:
    """Return the checkpoint to continue from, or None for a new run.

    A checkpoint with an incomplete file is skipped with a warning. A named checkpoint is used even
    if settings have changed, and the changes are logged.

    Args:
        resume_from: `last`, a checkpoint's folder, or None.
        folder: folder with the run's checkpoints.
        stamp: stamp of the run.

    Raises:
        TrainerConfigError: the folder has a run with other settings, or no complete checkpoint.
            Nothing was changed.
    """
    if resume_from is None:
        return None
    if resume_from != LAST:
        named = Path(resume_from)
        if fault := _fault(named):
            raise TrainerConfigError(f"resume_from={named}: {fault}; name a whole checkpoint")
        if (told := _told(named)) and (changes := stamp.changes_from(_stamp(told))):
            logger.warning("%s continues with other settings: %s", named, "; ".join(changes))
        return named
    stamped = {
        path.parent: _told(path.parent) for path in folder.glob(f"checkpoint-*/{STAMP_FILE}")
    }
    newest_first = sorted(stamped, key=lambda path: -int(path.name.removeprefix("checkpoint-")))
    faults = {path: fault for path in newest_first if (fault := _fault(path))}
    for path, fault in faults.items():
        logger.warning("%s is skipped: %s", path, fault)
    whole = [
        path for path in newest_first if path not in faults and not stamped[path].get("is_finished")
    ]
    changes_of = {path: stamp.changes_from(_stamp(stamped[path])) for path in whole}
    if own := next((path for path in whole if not changes_of[path]), None):
        return own
    if whole:
        begun = whole[0]
        raise TrainerConfigError(
            f"{begun} belongs to a run with other settings: {'; '.join(changes_of[begun])}. Set "
            f"them back, continue with the new ones (resume_from={begun}), or name another folder"
        )
    if faults and len(faults) == len(stamped):
        path, fault = next(iter(faults.items()))
        raise TrainerConfigError(
            f"{folder} has no whole checkpoint ({path.name}: {fault}): delete it to start over"
        )
    return None


def _told(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / STAMP_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) and "files" in told else {}


def _stamp(told: Mapping[str, Any]) -> RunStamp:
    return RunStamp(told["mathematics"], told["dataset"], told["n_processes"])


def _fault(folder: Path) -> str | None:
    """Return what a checkpoint lacks, if it lacks anything; what has no stamp is not looked into."""
    if not folder.is_dir():
        return "there is no such folder"
    if not (folder / STAMP_FILE).exists():
        return None if (folder / "trainer_state.json").exists() else "it is no checkpoint"
    told = _told(folder)
    if not told:
        return f"{STAMP_FILE} cannot be read, or is of an earlier version"
    for name, size in told["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            return f"{name} is missing" if found is None else f"{name} has {found} of {size} bytes"
    return None


class StopAtStep(TrainerCallback):
    """The callback that stamps every checkpoint as complete and, on request, saves one and stops.

    One process alone may leave a step halfway: nothing of it is kept. Several must end at the same
    step, so a wish waits for its end.
    """

    def __init__(self, stamp: RunStamp, stop: StopRequest, *, is_alone: bool) -> None:
        self.stamp, self.stop, self._is_alone = stamp, stop, is_alone
        self.stopped_in: Path | None = None
        """The checkpoint at which the run was stopped."""
        self._before_step: tuple[Tensor, list[Tensor]] | None = None
        """States of torch's random numbers at the beginning of this step or the last one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Let a wish wait, if others make the same steps."""
        self.stop.is_held = not self._is_alone

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Keep what a step changes before its end, and allow to leave it."""
        if self._is_alone and _is_boundary(args, state):
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self._before_step = torch.get_rng_state(), cuda
            self.stop.is_held = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Let a wish wait while weights change."""
        self.stop.is_held = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request a checkpoint and the end, at a step where TRL starts a new batch."""
        is_last = state.global_step >= state.max_steps
        if self._is_asked(args) and _is_boundary(args, state) and not is_last:
            control.should_save = control.should_training_stop = True
            self.stopped_in = _folder(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Allow to leave what comes after the last step."""
        self.stop.is_held = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Mark the checkpoint as complete, and remove TRL's pickled arguments."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank writes files of its own
        if state.is_world_process_zero:
            folder = _folder(args, state)
            (folder / "training_args.bin").unlink(missing_ok=True)
            write_stamp(folder, self.stamp)

    def leave(self, trainer: Any) -> None:
        """Save the last whole step, if this process made one, after the run was interrupted.

        Raises:
            TrainingStoppedError: a step is saved. It says how to go on.
        """
        folder = _folder(trainer.args, trainer.state)
        if self._before_step is None or trainer.state.global_step == 0:
            return
        if not (folder / STAMP_FILE).exists():
            cpu, cuda = self._before_step
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
            trainer.save_step()
            self.on_save(trainer.args, trainer.state, trainer.control)
        self.stopped_in = folder
        self.raise_if_stopped(trainer.state.global_step, trainer.state.max_steps)

    def raise_if_stopped(self, n_steps: int, max_steps: int) -> None:
        """Raise if the run has not reached its end.

        Raises:
            TrainingStoppedError: it was stopped.
        """
        if self.stopped_in is not None:
            raise TrainingStoppedError(
                f"stopped after step {n_steps} of {max_steps}, as requested; {self.stopped_in} is "
                f"complete. To go on, run the same command with --resume (resume_from={LAST})"
            )

    def _is_asked(self, args: Any) -> bool:
        """Return whether any rank was asked: all of them must stop at the same step."""
        asked = self.stop()
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return asked
        flag = torch.tensor(float(asked), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag)


def _is_boundary(args: Any, state: Any) -> bool:
    """Return whether TRL starts a new batch after the steps that are made."""
    per_batch = max(1, args.steps_per_generation // args.gradient_accumulation_steps)
    return state.global_step % (per_batch * args.num_iterations) == 0


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
