"""The controller, which starts the ranks of a run, watches them, and starts them again if one dies.

Each rank runs the usual TRL run in a Monarch actor. If a process dies, all ranks are stopped and
started again, from the last checkpoint that every rank has finished.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from typing import Any

import monarch.actor
import torch
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, ProcMesh, endpoint, this_host
from monarch.spmd import SPMDActor

from trainer.diloco.environment import ReplicaPlace
from trainer.engines.monarch.placement import (
    Placement,
    RestartBudget,
    latest_checkpoint,
    with_checkpoints,
)
from trainer.engines.settings_file import read_settings
from trainer.errors import ReplicaFailedError, TrainerError
from trainer.settings import section_of, without_engines

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STOP_S = 60.0
"""Longest wait for the processes to end, so that a hanging one doesn't block the restart."""


Outcome = dict[str, Any] | TrainerError
"""How a rank ended: with a report, or with a user's error that no restart can fix."""


class TrainerActor(Actor):
    """One rank, which runs the usual TRL run."""

    def __init__(self, values: dict[str, Any], n_deaths: int) -> None:
        self.values, self.n_deaths = values, n_deaths

    @endpoint
    def train(self, resume_from: str | None) -> Outcome:
        """Run to the end. A wrong setting or dataset is an outcome, and any other error raises."""
        # TRL takes seconds to load, and the controller does without.
        from trainer.engines.trl.run import RunParts, run  # noqa: PLC0415

        if self.values.get("model") is None:
            torch.set_num_threads(1)  # the products of a tiny model only lose by sharing
        try:
            config = read_settings(self.values | {"resume_from": resume_from})
            place = ReplicaPlace(0, 1, self.n_deaths)
            return run(config, parts=RunParts(place=place))
        except TrainerError as error:
            return error


def train_on_mesh(values: Mapping[str, Any]) -> dict[str, Any]:
    """Run a settings file whose section `engines.monarch` says how many ranks there are.

    Returns:
        The `report` of rank 0, and the `restarts`, each with `resumed_from`, `seconds` of its run,
            and `cause`.
    """
    own = (values.get("engines") or {}).get("monarch") or {}
    placement = section_of(Placement, own, "engines.monarch.")
    placement.check(read_settings(values))
    monarch.actor.unhandled_fault_hook = _note_fault
    told = with_checkpoints(without_engines(values), placement)
    return asyncio.run(_keep_alive(told, placement))


async def _keep_alive(values: dict[str, Any], placement: Placement) -> dict[str, Any]:
    """Run to the end, through as many deaths as there may be.

    Raises:
        ReplicaFailedError: the run died more often than it may.
    """
    restarts, budget = list[dict[str, Any]](), RestartBudget(placement.max_restarts)
    resume_from = values.get("resume_from")
    while True:
        started = time.perf_counter()
        try:
            outcome = await _run_ranks(values, placement, budget.n_deaths, resume_from)
        except (SupervisionError, ActorError) as error:
            checkpoint = latest_checkpoint(values["output"])
            cause = str(error).strip()
            if not budget.allows(checkpoint):
                raise ReplicaFailedError(
                    f"the run died {budget.n_deaths} times, without a new checkpoint "
                    f"since the last {placement.max_restarts} restarts; last: {cause}"
                ) from error
            resume_from = str(checkpoint) if checkpoint else values.get("resume_from")
            seconds = round(time.perf_counter() - started, 2)
            row = {"resumed_from": resume_from, "seconds": seconds}
            restarts.append(row | {"cause": cause.splitlines()[-1]})
            logger.warning("a rank died, continuing from %s: %s", resume_from, cause)
            continue
        if isinstance(outcome, TrainerError):
            raise outcome
        return {"report": outcome, "restarts": restarts}


async def _run_ranks(
    values: dict[str, Any], placement: Placement, n_deaths: int, resume_from: str | None
) -> Outcome:
    """Start the ranks, train, and stop them; the outcome of rank 0."""
    procs = this_host().spawn_procs(per_host={"procs": placement.ranks})
    try:
        actors: Any = procs.spawn("trainer", TrainerActor, values, n_deaths)
        if placement.ranks > 1:
            await _join_ranks(procs)
        outcomes = await actors.train.call(resume_from)
        return next(iter(outcomes.values()))
    finally:
        try:
            async with asyncio.timeout(STOP_S):
                await procs.stop()
        except TimeoutError:
            logger.warning("processes did not end within %.0f seconds", STOP_S)


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
