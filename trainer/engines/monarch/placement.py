"""The number of ranks, the checkpoints that they need, and the rule for restarts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.engines.trl.checkpoints import STAMP_FILE
from trainer.errors import TrainerConfigError
from trainer.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a run is hosted."""

    ranks: int = 1
    """Data-parallel processes."""
    max_restarts: int = 3
    """Allowed number of deaths in a row without a new checkpoint."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints, if the settings don't say."""

    def check(self, config: RunConfig) -> None:
        """Check the numbers.

        Raises:
            TrainerConfigError: a number is out of range, or the settings ask for an outer loop.
        """
        for name, least in (("ranks", 1), ("max_restarts", 0), ("checkpoint_every", 1)):
            if getattr(self, name) < least:
                raise TrainerConfigError(f"{name}={getattr(self, name)} must be at least {least}")
        if config.outer != "none":
            raise TrainerConfigError(
                f"outer={config.outer}: one run on a mesh averages nothing; set outer=none, and "
                "start replicas by `replay-train launch`"
            )


def with_checkpoints(values: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """Return the settings with checkpoints to resume from, unless they speak of them."""
    told = dict(values)
    if placement.max_restarts:
        every = {"save_strategy": "steps", "save_steps": placement.checkpoint_every}
        told["trl"] = every | {"save_total_limit": 2} | dict(values.get("trl") or {})
    return told


def latest_checkpoint(output: str | Path) -> Path | None:
    """Return the last checkpoint that every rank has completely written, if any."""
    stamps = (Path(output) / "steps").glob(f"checkpoint-*/{STAMP_FILE}")
    found = {int(stamp.parent.name.rpartition("-")[2]): stamp.parent for stamp in stamps}
    return found[max(found)] if found else None


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
