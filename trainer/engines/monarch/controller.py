"""The controller, which starts the meshes, watches them, restarts dead replicas, and collects reports.

If a process of a replica dies, the whole replica is stopped and started again, while the others
keep working. It continues from its last complete checkpoint (ranks) or from the state of the outer
loop (replicas).
"""

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh, this_host
from monarch.spmd import SPMDActor

from trainer.engines.monarch.actors import (
    GeneratorActor,
    RankOutcome,
    RewarderActor,
    StoreActor,
    TrainerActor,
)
from trainer.engines.monarch.placement import (
    Placement,
    RestartBudget,
    latest_checkpoint,
    replica_settings,
)
from trainer.engines.settings_file import read_settings
from trainer.errors import ReplicaFailedError
from trainer.outer.environment import ReplicaPlace
from trainer.settings import RunConfig, section_of, without_engines

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STOP_S = 60.0
"""Longest wait for the processes of a replica to end, so that a hanging process doesn't block its restart."""


@dataclass
class MonarchReport:
    """The results of a run on the mesh."""

    reports: list[dict[str, Any]]
    """The report of rank 0 of each replica."""
    n_restarts: int = 0
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """The restarts, each with `replica`, `resumed_from`, `seconds` of its run, and `cause`."""


def train_on_mesh(values: Mapping[str, Any]) -> dict[str, Any]:
    """Run a settings file whose section `engines.monarch` says who runs where, and return its report.

    Raises:
        TrainerConfigError: a setting is wrong, or leaves a process without work.
        DatasetError: the dataset lacks what a channel needs.
        ReplicaFailedError: a replica died more often than allowed.
    """
    own = (values.get("engines") or {}).get("monarch") or {}
    placement = section_of(Placement, own, "engines.monarch.")
    return asdict(asyncio.run(train(without_engines(values), placement)))


async def train(values: Mapping[str, Any], placement: Placement) -> MonarchReport:
    """Train on meshes of this host with the settings of `replay-train`.

    Raises:
        TrainerConfigError: a setting is wrong, or leaves a process without work.
        DatasetError: the dataset lacks what a channel needs.
        ReplicaFailedError: a replica died more often than allowed.
    """  # noqa: DOC501 - `_first_of` returns one of these
    config = read_settings(values)
    placement.check(config)
    monarch.actor.unhandled_fault_hook = _note_fault
    report = MonarchReport(reports=[{} for _ in range(placement.replicas)])
    shared = await _shared_store(config, placement)
    try:
        async with asyncio.TaskGroup() as group:
            for replica in range(placement.replicas):
                group.create_task(_keep_alive(values, placement, replica, shared, report))
    except* Exception as errors:
        raise _first_of(errors) from errors
    finally:
        if shared is not None:
            await _stop(shared)
    report.n_restarts = len(report.restarts)
    return report


@dataclass
class _Mesh:
    """Actors and the processes that end with them."""

    actors: Any
    procs: ProcMesh


async def _shared_store(config: RunConfig, placement: Placement) -> _Mesh | None:
    """Return the store of the outer loop, unless the settings name one outside."""
    if placement.replicas == 1 or config.outer != "object_store" or config.outer_options.get("uri"):
        return None
    return _spawn("store", 1, StoreActor)


async def _keep_alive(
    values: Mapping[str, Any],
    placement: Placement,
    replica: int,
    shared: _Mesh | None,
    report: MonarchReport,
) -> None:
    """Run one replica to its end, through as many deaths as it may suffer.

    Raises:
        ReplicaFailedError: the replica died more often than it may.
    """
    told = replica_settings(values, placement, replica)
    find = functools.partial(latest_checkpoint, told["output"], n_ranks=placement.ranks)
    budget = RestartBudget(placement.max_restarts)
    resume_from = values.get("resume_from")
    while True:
        place = ReplicaPlace(replica, placement.replicas, budget.n_deaths)
        started = time.perf_counter()
        try:
            outcome = await _run_replica(told, placement, place, shared, resume_from)
        except (SupervisionError, ActorError) as error:
            checkpoint = find() if placement.replicas == 1 else None
            cause = str(error).strip()
            if not budget.allows(checkpoint):
                raise ReplicaFailedError(
                    f"replica {replica} died {budget.n_deaths} times, without a new checkpoint "
                    f"since the last {placement.max_restarts} restarts; last: {cause}"
                ) from error
            resume_from = str(checkpoint) if checkpoint else values.get("resume_from")
            seconds = round(time.perf_counter() - started, 2)
            row = {"replica": replica, "resumed_from": resume_from, "seconds": seconds}
            report.restarts.append(row | {"cause": cause.splitlines()[-1]})
            logger.warning("replica %d died, continuing from %s: %s", replica, resume_from, cause)
            continue
        if outcome.error is not None:
            raise outcome.error
        report.reports[replica] = outcome.report or {}
        return


async def _run_replica(
    values: dict[str, Any],
    placement: Placement,
    place: ReplicaPlace,
    shared: _Mesh | None,
    resume_from: str | None,
) -> RankOutcome:
    """Spawn a replica with its helpers, train, stop everything; the outcome of its rank 0.

    Raises:
        SupervisionError: a process died.
        ActorError: an endpoint raised.
    """
    meshes: list[_Mesh] = []
    try:
        generators = rewarders = None
        if placement.generators:
            generators = _spawn("generator", placement.generators, GeneratorActor, values)
            meshes.append(generators)
        if placement.rewarders:
            reward = values.get("reward", "consensus")
            rewarders = _spawn("rewarder", placement.rewarders, RewarderActor, reward)
            meshes.append(rewarders)
        helpers = [mesh and mesh.actors for mesh in (shared, generators, rewarders)]
        trainers = _spawn("trainer", placement.ranks, TrainerActor, values, place, *helpers)
        meshes.append(trainers)
        if placement.ranks > 1:
            await _join_ranks(trainers.procs)
        outcomes = await trainers.actors.train.call(resume_from)
        return next(iter(outcomes.values()))
    finally:
        for mesh in reversed(meshes):
            await _stop(mesh)


async def _stop(mesh: _Mesh) -> None:
    """End a mesh's processes; those that do not answer in time are told of and left behind."""
    try:
        async with asyncio.timeout(STOP_S):
            await mesh.procs.stop()
    except TimeoutError:
        logger.warning("processes of a mesh did not end within %.0f seconds", STOP_S)


def _spawn(name: str, n: int, kind: Any, *arguments: Any) -> _Mesh:
    procs = this_host().spawn_procs(per_host={"procs": n})
    return _Mesh(procs.spawn(name, kind, *arguments), procs)


async def _join_ranks(procs: ProcMesh) -> None:
    """Set torchrun's variables in every process: its rank, and where rank 0 listens."""
    spmd = procs.spawn("ranks", SPMDActor)
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
    await spmd.setup_env.call(LOOPBACK, port)


def _note_fault(failure: Any) -> None:
    """Log what the awaited call also raises; Monarch's own hook would end this process."""
    logger.info("mesh fault: %s", failure)


def _first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
