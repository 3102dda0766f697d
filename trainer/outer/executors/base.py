"""The interface of executors, which start, watch, collect, restart, and cancel N replicas of one command.

A platform implements five methods for one replica (`_start`, `_find`, `_inspect`, `logs`, `_stop`),
its errors and its price. The common parts are here. Handles are plain data, so another process can
take over the watch. If a platform doesn't answer, the executor waits, because its jobs go on and
cost money.
"""

import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import TypeVar

import msgspec
import tenacity

from trainer.errors import (
    OuterLoopError,
    OuterTimeoutError,
    PlatformUnreachableError,
    ReplicaFailedError,
    TrainerConfigError,
)
from trainer.outer.executors.ledger import JobLedger

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOG_TAIL_LINES = 20
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Seconds between two attempts at a platform that doesn't answer."""


class ReplicaState(Enum):
    """The state of a replica."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Return whether the replica has ended for good."""
        return self not in (ReplicaState.STARTING, ReplicaState.RUNNING)


@dataclass(frozen=True)
class ReplicaHandle:
    """One started replica. It can be serialized, and has enough data to find the replica again.

    `command` and `env` are kept for a restart, but not secrets. Without a `job_id`, the replica is
    about to start, or its launcher was killed before the platform answered.
    """

    run_id: str
    rank: int
    world_size: int
    attempt: int
    job_id: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    timeout_s: float

    @property
    def label(self) -> str:
        """Return the name of this start, which is the same in every process."""
        return f"{self.run_id}-{self.rank}-{self.attempt}"

    def to_json(self) -> str:
        """Return the handle as JSON."""
        return msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def from_json(cls, text: str) -> "ReplicaHandle":
        """Read a handle back.

        Raises:
            TrainerConfigError: The text isn't a handle.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise TrainerConfigError(f"not a replica's handle: {text[:80]!r}: {error}") from error


@dataclass(frozen=True)
class ReplicaStatus:
    """The state of a replica. `exit_code` is None while it runs, or if the platform reports none.

    `billed_s` is the run time in seconds that the platform reports, or None.
    """

    rank: int
    state: ReplicaState
    exit_code: int | None = None
    message: str = ""
    billed_s: float | None = None


@dataclass(frozen=True)
class ReplicaResult:
    """A replica that succeeded, with its outputs."""

    rank: int
    attempt: int
    log: str


class ServerlessExecutor(ABC):
    """The base class of executors. All implementations pass the same contract tests.

    A platform implements the methods for one replica that begin with an underscore.
    """

    python: str = "python"
    outlives_launcher: bool = True
    """Whether replicas go on if their watching process is interrupted."""
    billing_step_s: float = 1.0
    """Number of seconds in one billing step of the platform."""
    arrives_s: float = 60.0
    """Seconds during which a request of a killed process may still start something."""
    ledger: JobLedger | None = None
    """Ledger that reserves money before each start, and settles it after the end."""
    patience_s: float = math.inf
    """Seconds to wait for a platform that doesn't answer."""
    now: Callable[[], float] = staticmethod(lambda: datetime.now(UTC).timestamp())
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    @property
    def usd_per_hour(self) -> float:
        """Return the cost of one replica, in dollars per hour.

        Raises:
            TrainerConfigError: The platform's price list doesn't contain the hardware.
        """
        return 0.0

    def bound_usd(self, life_s: float) -> float:
        """Return the most that a replica can cost in some seconds, in dollars."""
        # The platform ends a replica at its limit, in the step that it has begun.
        steps = math.ceil(life_s / self.billing_step_s) + 1
        return steps * self.billing_step_s * self.usd_per_hour / 3600

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
        run_id: str | None = None,
    ) -> list[ReplicaHandle]:
        """Start one command N times.

        The replica finds `REPLICA_RANK`, `REPLICA_COUNT`, `REPLICA_ATTEMPT` and `REPLICA_RUN_ID` in
        its environment. If one can't be started, those already started are canceled.

        Args:
            n_replicas: Number of replicas.
            entrypoint: A program, or `python:package.module` for `python -m package.module`.
            entrypoint_args: Its arguments, in which `{rank}` and `{world_size}` are replaced.
            env: Further variables.
            secrets: Variables that go through the platform's secret store, if it has one.
            timeout_s: Longest run time of one replica.
            run_id: Name of the run, generated by default.

        Raises:
            TrainerConfigError: The number of replicas or the timeout isn't positive.
            ReplicaFailedError: The platform refused to start a replica, or the ledger has no money
                for it.
        """
        if n_replicas < 1 or timeout_s <= 0:
            raise TrainerConfigError(
                f"n_replicas={n_replicas}, timeout_s={timeout_s}: not positive"
            )
        name = run_id or f"run-{uuid.uuid4().hex[:12]}"
        handles: list[ReplicaHandle] = []
        for rank in range(n_replicas):
            argv = self.command_of(entrypoint, entrypoint_args, rank, n_replicas)
            handle = ReplicaHandle(name, rank, n_replicas, 0, "", argv, dict(env or {}), timeout_s)
            try:
                handles.append(self.start(handle, secrets))
            except ReplicaFailedError:
                self.cancel(handles)
                raise
        return handles

    def relaunch(
        self, handle: ReplicaHandle, *, secrets: Mapping[str, str] | None = None
    ) -> ReplicaHandle:
        """Start a replica again under the same rank, as its next attempt."""
        self.cancel([handle])
        return self.start(replace(handle, attempt=handle.attempt + 1, job_id=""), secrets)

    def start(self, handle: ReplicaHandle, secrets: Mapping[str, str] | None) -> ReplicaHandle:
        """Start one replica, book it before and after, and return it with its job.

        Raises:
            ReplicaFailedError: The platform refused, or the ledger has no money for it.
            PlatformUnreachableError: The platform didn't answer. The replica may run.
        """
        variables = {
            **handle.env,
            "REPLICA_RANK": str(handle.rank),
            "REPLICA_COUNT": str(handle.world_size),
            "REPLICA_ATTEMPT": str(handle.attempt),
            "REPLICA_RUN_ID": handle.run_id,
        }
        if self.ledger is not None:
            bound = self.bound_usd(handle.timeout_s)
            self.ledger.reserve(handle.rank, handle.attempt, handle.to_json(), bound, self.now())
        is_first = True

        def start() -> str:
            # Starting is not idempotent: a request without an answer may have started the job.
            nonlocal is_first
            known = None if is_first else self._find(handle)
            is_first = False
            return known or self._start(handle, variables, secrets or {})

        try:
            job_id = self.asked(start)
        except PlatformUnreachableError:
            raise
        except OuterLoopError as error:
            if self.ledger is not None:
                self.ledger.settle(handle.rank, handle.attempt, 0.0, "refused", self.now())
            raise ReplicaFailedError(f"replica {handle.rank} was refused: {error}") from error
        started = replace(handle, job_id=job_id)
        if self.ledger is not None:
            self.ledger.note_started(handle.rank, handle.attempt, started.to_json(), self.now())
        return started

    def found(self, handle: ReplicaHandle) -> ReplicaHandle | None:
        """Return a replica whose start got no reply, if the platform knows it."""
        job_id = self.asked(lambda: self._find(handle))
        if job_id is None:
            return None
        known = replace(handle, job_id=job_id)
        if self.ledger is not None:
            self.ledger.note_started(handle.rank, handle.attempt, known.to_json(), self.now())
        return known

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Return the status of each replica, and settle the ended ones in the ledger."""
        return [
            self._settled(handle, self.asked(lambda handle=handle: self._inspect(handle)))
            for handle in handles
        ]

    def _settled(self, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaStatus:
        if status.state.is_final and self.ledger is not None:
            began = self.ledger.reserved_at(handle.rank, handle.attempt)
            if began is not None:
                # A platform that does not tell is believed to have run it until just now.
                told = status.billed_s
                ran_s = min(self.now() - began, handle.timeout_s) if told is None else told
                cost = self.bound_usd(max(0.0, ran_s))
                outcome = status.state.value
                self.ledger.settle(handle.rank, handle.attempt, cost, outcome, self.now())
        return status

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout_s: float = 3600.0, poll_s: float = 1.0
    ) -> list[ReplicaResult]:
        """Wait until all replicas have succeeded.

        Raises:
            ReplicaFailedError: A replica failed. The others go on.
            OuterTimeoutError: Some still run after `timeout_s`, and go on.
        """
        until = self.now() + timeout_s
        while True:
            statuses = self.poll(handles)
            for handle, status in zip(handles, statuses, strict=True):
                if status.state.is_final and status.state is not ReplicaState.SUCCEEDED:
                    raise ReplicaFailedError(self._obituary(handle, status))
            if all(status.state.is_final for status in statuses):
                return [ReplicaResult(h.rank, h.attempt, self.logs(h)) for h in handles]
            if self.now() > until:
                running = [status.rank for status in statuses if not status.state.is_final]
                raise OuterTimeoutError(f"ranks {running} still run after {timeout_s:g} s")
            self.sleep(poll_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Stop replicas that still run."""
        for handle in handles:
            if not self.poll([handle])[0].state.is_final:
                self.asked(lambda handle=handle: self._stop(handle))
                self.poll([handle])

    def _obituary(self, handle: ReplicaHandle, status: ReplicaStatus) -> str:
        tail = "\n".join(self.logs(handle).splitlines()[-LOG_TAIL_LINES:])
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        return (
            f"replica {handle.rank} of {handle.run_id} (attempt {handle.attempt}) "
            f"{status.state.value}{code}: {status.message}\n{tail}"
        )

    def command_of(
        self, entrypoint: str, arguments: Sequence[str], rank: int, world_size: int
    ) -> tuple[str, ...]:
        """Return the program and arguments of one replica. See `launch_replicas`.

        Raises:
            TrainerConfigError: A text alone would become its letters.
        """
        if isinstance(arguments, str):
            raise TrainerConfigError(f"entrypoint_args={arguments!r}: expected a sequence")
        scheme, _, module = entrypoint.partition(":")
        start = [self.python, "-m", module] if scheme == "python" and module else [entrypoint]
        filled = [
            a.replace("{rank}", str(rank)).replace("{world_size}", str(world_size))
            for a in arguments
        ]
        return (*start, *filled)

    @abstractmethod
    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        """Start one replica; return the platform's name for it."""

    @abstractmethod
    def _find(self, handle: ReplicaHandle) -> str | None:
        """Return the platform's name for the replica of a handle's label, if there is one."""

    @abstractmethod
    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return how a replica is, without waiting."""

    def logs(self, handle: ReplicaHandle) -> str:
        """Return the output of a replica."""
        return self.asked(lambda: self._logs(handle))

    @abstractmethod
    def _logs(self, handle: ReplicaHandle) -> str:
        """Return the output of a replica."""

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Stop a replica that runs."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise a platform's errors as ours: without an answer, or refused."""
        yield

    def asked(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request that may be repeated, until the platform answers.

        Raises:
            PlatformUnreachableError: It didn't answer for `patience_s`.
            OuterLoopError: It refused.
        """
        began = self.now()

        def ask() -> Result:
            with self._translated():
                return request()

        def say(state: tenacity.RetryCallState) -> None:
            why = state.outcome.exception() if state.outcome is not None else None
            logger.warning(
                "%s; waiting for the platform (for %.0f s so far) while its jobs go on",
                why,
                self.now() - began,
            )

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(PlatformUnreachableError),
            stop=lambda _: self.now() - began >= self.patience_s,
            wait=tenacity.wait_exponential(FIRST_WAIT_S, max=MAX_WAIT_S),
            sleep=self.sleep,
            before_sleep=say,
            reraise=True,
        )
        return attempts(ask)


def supervise(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    *,
    max_restarts: int = 10,
    poll_s: float = 1.0,
    secrets: Mapping[str, str] | None = None,
    renewed: Callable[[ReplicaHandle], ReplicaHandle] = lambda handle: handle,
) -> list[ReplicaHandle]:
    """Watch replicas until all have succeeded, and restart dead ones.

    A replica that reached its time limit is restarted only once, because a hanging one would hang
    again.

    `max_restarts` counts for all replicas together. `renewed` may give a dead replica another time
    limit before its restart, and an error there ends the watch.

    Returns:
        The handles of the attempts that succeeded.

    Raises:
        ReplicaFailedError: A replica died and can't be restarted, or was canceled. The others are
            stopped.
    """
    current = list(handles)
    n_restarts = 0
    hung: set[int] = set()
    try:
        while True:
            statuses = executor.poll(current)
            if all(status.state is ReplicaState.SUCCEEDED for status in statuses):
                return current
            for index, status in enumerate(statuses):
                if not status.state.is_final or status.state is ReplicaState.SUCCEEDED:
                    continue
                is_lost = status.state is ReplicaState.CANCELLED or status.rank in hung
                if is_lost or n_restarts >= max_restarts:
                    # It has failed for good: this raises, with the end of its log.
                    executor.collect([current[index]], timeout_s=0)
                n_restarts += 1
                if status.state is ReplicaState.TIMED_OUT:
                    hung.add(status.rank)
                logger.warning("replica %d %s: starting it again", status.rank, status.state.value)
                current[index] = executor.relaunch(renewed(current[index]), secrets=secrets)
            executor.sleep(poll_s)
    except BaseException as error:
        # Whatever else happens here says nothing about the replicas: jobs in a cloud go on.
        if isinstance(error, ReplicaFailedError) or not executor.outlives_launcher:
            executor.cancel(current)
        raise
