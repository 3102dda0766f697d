"""Run the trainer in its own process: start it, watch it, ask it to stop, and kill it only if it doesn't."""

import json
import logging
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay_pipeline.errors import TrainError
from replay_pipeline.storage.locks import take_lock
from replay_pipeline.storage.processes import start_environment
from replay_pipeline.types import Progress

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_N_LAST_WORDS = 3
_MAX_POINTS = 200
TRAINER_LOCK = "trainer.lock"
"""File in the output folder in which the trainer names its process."""
CURVES = (
    "train/loss",
    "policy/loss",
    "sdpo/loss",
    "replay/loss",
    "replay/accuracy",
    "train/reward",
    "train/grad_norm",
)
"""The metrics of a run that people look at."""


@dataclass(frozen=True, kw_only=True)
class TrainerJob:
    """A trainer process to run."""

    command: Sequence[str]
    output: Path
    """Folder for the trainer's `metrics.jsonl` and `report.json`. Its output goes to `trainer.log`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set, besides the few that every program gets."""
    variables: Sequence[str] = ()
    """Names of variables of this process to pass on."""
    stop_timeout_s: float = 300.0
    """Seconds to save a checkpoint after a request to stop. Then it is killed."""


Launch = Callable[[TrainerJob, Callable[[Progress], None]], None]
"""Runs a job to its end, and reports progress."""


def run_trainer(
    job: TrainerJob,
    on_progress: Callable[[Progress], None],
    *,
    on_metrics: Callable[[dict[str, float]], None] | None = None,
) -> None:
    """Run the trainer on this machine and wait for it.

    `on_metrics` gets the step and the newest value of each of the `CURVES`, again and again.

    An interrupt asks the trainer to stop (SIGTERM) and waits for its checkpoint. A second
    interrupt, or the timeout, kills it.

    Raises:
        TrainError: the trainer failed or was stopped (the message ends with its last output), or
            another trainer is using the folder.
    """
    job.output.mkdir(parents=True, exist_ok=True)
    log_path = job.output / "trainer.log"
    metrics = _Metrics(job.output / "metrics.jsonl")
    with _alone(job.output), log_path.open("wb") as log:
        # A group of its own: Ctrl-C in the terminal is ours to pass on, once.
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=start_environment(also=job.variables, **job.environment),
            process_group=0,
        )
        try:
            code = None
            while code is None:
                code = _wait(process, _POLL_S)
                metrics.read()
                n_done = metrics.n_steps
                on_progress(Progress(stage="train", n_done=n_done, n_total=metrics.n_total))
                if on_metrics is not None and metrics.newest:
                    on_metrics(metrics.newest)
        except BaseException:
            _stop(process, job.stop_timeout_s)
            raise
    if code != 0:
        lines = log_path.read_text("utf-8", "replace").strip().splitlines()[-_N_LAST_WORDS:]
        words = " | ".join(lines) or "it said nothing"
        raise TrainError(f"the trainer ended with code {code}; see {log_path}: {words}")


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Hold others off: while this process trains here, and while a trainer does whose starter has died.

    Raises:
        TrainError: another trainer uses the folder.
    """
    try:
        mine = take_lock(output / "starter.lock")
        trainers = take_lock(output / TRAINER_LOCK) if mine else None
    except OSError as error:  # a file system without locks
        logger.warning("%s: cannot be locked (%s), so nothing prevents a second one", output, error)
        yield
        return
    if mine is None or trainers is None:
        who = output / TRAINER_LOCK
        owner = who.read_text("utf-8", "replace").strip() if who.exists() else ""
        if mine:
            mine.release()
        raise TrainError(
            f"{output}: another trainer is at work here ({owner or 'it has just begun'}); wait until it ends, stop it, or set `train.output` to another folder"
        )
    trainers.release()  # the trainer takes it itself
    try:
        yield
    finally:
        mine.release()


def _stop(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    logger.warning("asking the trainer to stop; it may take %.0f s to save itself", timeout_s)
    process.terminate()
    try:
        _wait(process, timeout_s)
    finally:
        if process.poll() is None:
            logger.warning("the trainer did not stop in time and was killed")
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


class _Metrics:
    """The metrics file of this run, as it grows: what an earlier run left there does not count."""

    def __init__(self, path: Path) -> None:
        self.n_steps = 0
        self.n_total: int | None = None
        self.newest: dict[str, float] = {}
        self._path = path
        self._before = self._stamp()

    def read(self) -> None:
        """Read the lines that are whole by now."""
        if self._stamp() == self._before:
            return
        lines = self._path.read_bytes().split(b"\n")[:-1]
        known = self.n_steps if self.n_steps <= len(lines) else 0
        self.n_steps = len(lines)
        for line in lines[known:]:
            with suppress(ValueError):  # of a trainer that is not ours
                row = json.loads(line)
                self.n_total = row.get("train/max_steps")
                self.newest |= {name: row[name] for name in ("step", *CURVES) if name in row}

    def _stamp(self) -> int | None:
        return self._path.stat().st_mtime_ns if self._path.exists() else None


def training_curves(path: Path) -> dict[str, list[float]]:
    """Return the metrics to plot, by name, with one value per step or a few hundred.

    Raises:
        TrainError: the file cannot be read.
    """
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: not the metrics of a run ({error})") from error
    curves = {
        name: [row[name] for row in rows if isinstance(row.get(name), int | float)]
        for name in CURVES
    }
    step = {name: -(-len(values) // _MAX_POINTS) for name, values in curves.items()}
    return {
        name: values if step[name] == 1 else [*values[: -1 : step[name]], values[-1]]
        for name, values in curves.items()
        if values
    }
