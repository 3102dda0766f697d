"""The placement of processes on the mesh, the settings of each replica, and the rule for restarts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.folders import STATE_FILE
from trainer.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The number of processes of each kind."""

    replicas: int = 1
    """Replicas that exchange only through the outer loop. Each has its own mesh."""
    ranks: int = 1
    """Data-parallel processes per replica."""
    generators: int = 0
    """Processes that sample from the policy (`rollouts=generate`). With 0, the trainer samples."""
    rewarders: int = 0
    """Processes that score completions. With 0, the trainer does it."""
    max_restarts: int = 3
    """Allowed number of a replica's deaths in a row without a new checkpoint."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints, if the settings don't say."""

    def check(self, config: RunConfig) -> None:
        """Check that every process of the placement has work.

        Raises:
            TrainerConfigError: a number is out of range, helpers have no work, nothing joins the
                replicas, or an outer loop has no replicas.
        """
        for name, least in (("replicas", 1), ("ranks", 1), ("generators", 0), ("rewarders", 0)):
            if getattr(self, name) < least:
                raise TrainerConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.max_restarts < 0 or self.checkpoint_every < 1:
            raise TrainerConfigError(
                f"max_restarts={self.max_restarts} must not be negative and "
                f"checkpoint_every={self.checkpoint_every} must be at least 1"
            )
        if self.generators and config.rollouts != "generate":
            raise TrainerConfigError(
                f"generators={self.generators} would have no work: rollouts={config.rollouts} come from the dataset; set rollouts=generate or generators=0"
            )
        if self.replicas > 1 and config.outer == "none":
            raise TrainerConfigError(
                f"{self.replicas} replicas need an outer loop to combine them: set outer=object_store, or use ranks for data parallelism"
            )
        if self.replicas > 1 and self.ranks > 1:
            raise TrainerConfigError(
                f"replicas={self.replicas} with ranks={self.ranks}: a replica of the outer loop "
                "is one process"
            )
        if self.replicas == 1 and config.outer != "none":
            raise TrainerConfigError(
                f"outer={config.outer} with one replica averages nothing: set replicas or "
                "outer=none"
            )


def replica_settings(
    values: Mapping[str, Any], placement: Placement, replica: int
) -> dict[str, Any]:
    """Return the settings of a replica, with its own output folder and checkpoints to resume from."""
    told = dict(values)
    if placement.replicas > 1:
        told["output"] = str(Path(values["output"]) / f"replica-{replica}")
    elif placement.max_restarts:
        every = {"save_strategy": "steps", "save_steps": placement.checkpoint_every}
        told["trl"] = every | {"save_total_limit": 2} | dict(values.get("trl") or {})
    return told


def latest_checkpoint(output: str | Path, *, n_ranks: int = 1) -> Path | None:
    """Return the last checkpoint that every rank has completely written, if any."""
    found = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in (Path(output) / "steps").glob("checkpoint-*")
        if _is_whole(folder, n_ranks)
    }
    return found[max(found)] if found else None


def _is_whole(folder: Path, n_ranks: int) -> bool:
    if n_ranks == 1:
        return (folder / STATE_FILE).exists()
    names = [STATE_FILE, *(f"rng_state_{rank}.pth" for rank in range(n_ranks))]
    return all((folder / name).exists() for name in names)


@dataclass
class RestartBudget:
    """The count of deaths. A new checkpoint resets it."""

    max_restarts: int
    n_deaths: int = field(default=0, init=False)
    """Number of deaths over the whole run."""
    _in_a_row: int = field(default=0, init=False)
    _last: Path | None = field(default=None, init=False)

    def allows(self, checkpoint: Path | None) -> bool:
        """Count one failure, and return whether to restart from `checkpoint`."""
        self.n_deaths += 1
        self._in_a_row = 1 if checkpoint != self._last else self._in_a_row + 1
        self._last = checkpoint
        return self._in_a_row <= self.max_restarts
