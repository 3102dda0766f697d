"""The only module of the trainer that reads or passes on environment variables."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.errors import TrainerConfigError


@dataclass(frozen=True)
class ReplicaPlace:
    """The rank of this process among the replicas, and the number of starts before it."""

    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    run_id: str = ""


def replica_place() -> ReplicaPlace | None:
    """Return the place that an executor gave this process, or None if there is no executor.

    Raises:
        TrainerConfigError: The variables have invalid values.
    """
    if "REPLICA_RANK" not in os.environ:
        return None
    try:
        place = ReplicaPlace(
            rank=int(os.environ["REPLICA_RANK"]),
            world_size=int(os.environ["REPLICA_COUNT"]),
            attempt=int(os.environ.get("REPLICA_ATTEMPT", "0")),
            run_id=os.environ.get("REPLICA_RUN_ID", ""),
        )
    except (KeyError, ValueError) as error:
        raise TrainerConfigError(
            f"REPLICA_RANK and REPLICA_COUNT must be numbers: {error}"
        ) from error
    if not 0 <= place.rank < place.world_size:
        raise TrainerConfigError(f"REPLICA_RANK={place.rank} is not below {place.world_size}")
    return place


def variables_named(names: Iterable[str]) -> dict[str, str]:
    """Return variables of this process, such as keys that replicas need.

    Raises:
        TrainerConfigError: A variable isn't set.
    """
    wanted = list(names)
    if missing := [name for name in wanted if not os.environ.get(name)]:
        raise TrainerConfigError(f"--secret {missing[0]}: the variable is not set here")
    return {name: os.environ[name] for name in wanted}


def replica_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with some variables set."""
    return {**os.environ, **extra}
