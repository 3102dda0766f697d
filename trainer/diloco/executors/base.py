"""The interface of executors, which start, watch, collect, restart, and cancel N replicas of one command.

A platform implements five methods for one replica (`_start`, `_find`, `_inspect`, `_logs`, `_stop`),
the list of a run's replicas, its errors and its price. The common parts are here. Handles are plain data, so another process can
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

from trainer.diloco.executors.ledger import JobLedger
from trainer.errors import (
    OuterLoopError,
    OuterTimeoutError,
    PlatformUnreachableError,
    ReplicaFailedError,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOG_TAIL_LINES = 20
USERS_ERROR = 2
"""The exit code of a replica whose settings or dataset are wrong, so that it would fail again."""
GONE = "the platform does not know it any more"
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

    @property
    def tags(self) -> dict[str, str]:
        """Return what tells the replica from others on the platform."""
        return {"run": self.run_id, "rank": str(self.rank), "attempt": str(self.attempt)}

    @classmethod
    def of_tags(cls, tags: Mapping[str, str], job_id: str) -> "ReplicaHandle":
        """Return a handle of what the platform lists, without its command."""
        return cls(tags["run"], int(tags["rank"]), 0, int(tags["attempt"]), job_id, (), {}, 0.0)

    def to_json(self) -> str:
        """Return the handle as JSON."""
        return msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def from_json(cls, text: str) -> "ReplicaHandle":
        """Read a handle back."""
        return msgspec.json.decode(text, type=cls)


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
    arrives_s: float = 180.0
    """Seconds after which what a request has started is listed, and what is not listed did not start."""
    ledger: JobLedger | None = None
    """Ledger that reserves money before each start, and settles it after the end."""
    patience_s: float = math.inf
    """Seconds to wait for a platform that doesn't answer."""
    now: Callable[[], float] = staticmethod(lambda: datetime.now(UTC).timestamp())
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    @property
    def usd_per_hour(self) -> float:
        """Return the cost of one replica, in dollars per hour."""
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
            ReplicaFailedError: The platform refused to start a replica, or the ledger has no money
                for it.
        """
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

        A request without an answer may have started it. So nothing is asked for a second time until
        the platform has had time to list what it started, and does not list it.

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
        asked_at: float | None = None
        is_refused = False

        def start() -> str:
            nonlocal asked_at, is_refused
            if asked_at is not None:
                if known := self._find(handle):
                    return known[0]
                if self.now() - asked_at < self.arrives_s:
                    raise PlatformUnreachableError(f"the start of {handle.label} got no answer")
            try:
                with self._translated():
                    return self._start(handle, variables, secrets or {})
            except PlatformUnreachableError:
                asked_at = self.now()
                raise
            except OuterLoopError:
                is_refused = True
                raise

        try:
            job_id = self.asked(start)
        except PlatformUnreachableError:
            raise
        except OuterLoopError as error:
            if not is_refused:
                raise PlatformUnreachableError(f"{handle.label} may run: {error}") from error
            if self.ledger is not None:
                self.ledger.settle(handle.rank, handle.attempt, 0.0, "refused", self.now())
            raise ReplicaFailedError(f"replica {handle.rank} was refused: {error}") from error
        started = replace(handle, job_id=job_id)
        if self.ledger is not None:
            self.ledger.note_started(handle.rank, handle.attempt, started.to_json(), self.now())
        return started

    def found(self, handle: ReplicaHandle) -> ReplicaHandle | None:
        """Return a replica whose start got no reply, if the platform knows it."""
        job_ids = self.asked(lambda: self._find(handle))
        if not job_ids:
            return None
        known = replace(handle, job_id=job_ids[0])
        if self.ledger is not None:
            self.ledger.note_started(handle.rank, handle.attempt, known.to_json(), self.now())
        return known

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Return the status of each replica, and settle the ended ones in the ledger."""
        return [self._settled(handle, self._state_of(handle)) for handle in handles]

    def _state_of(self, handle: ReplicaHandle) -> ReplicaStatus:
        status = self.asked(lambda: self._inspect(handle))
        if status is not None:
            return status
        # It may be so new that it is not shown yet, or only be missing from one answer.
        row = self.ledger.row(handle.rank, handle.attempt) if self.ledger else None
        is_new = row and row.sent_at is not None and self.now() - row.sent_at < self.arrives_s
        if is_new or handle.job_id in self.asked(lambda: self._find(handle)):
            return ReplicaStatus(handle.rank, ReplicaState.STARTING)
        logger.warning("%s (%s): %s", handle.label, handle.job_id, GONE)
        return ReplicaStatus(handle.rank, ReplicaState.FAILED, message=GONE)

    def _settled(self, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaStatus:
        if status.state.is_final and self.ledger is not None:
            row = self.ledger.row(handle.rank, handle.attempt)
            if row and row.is_open and ReplicaHandle.from_json(row.handle).job_id == handle.job_id:
                # A platform that does not tell is believed to have run it until just now.
                told, ran_s = status.billed_s, min(self.now() - row.intent_at, handle.timeout_s)
                ran_s = ran_s if told is None else told
                cost = self.bound_usd(max(0.0, ran_s))
                outcome = status.state.value
                self.ledger.settle(handle.rank, handle.attempt, cost, outcome, self.now())
        return status

    def listed(self, run_id: str) -> list[ReplicaHandle]:
        """Return the replicas of a run that the platform lists."""
        return self.asked(lambda: self._listed(run_id))

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
                    raise ReplicaFailedError(self.obituary(handle, status))
            if all(status.state.is_final for status in statuses):
                return [ReplicaResult(h.rank, h.attempt, self.logs(h)) for h in handles]
            if self.now() > until:
                running = [status.rank for status in statuses if not status.state.is_final]
                raise OuterTimeoutError(f"ranks {running} still run after {timeout_s:g} s")
            self.sleep(poll_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaHandle]:
        """Stop replicas that still run, and return those that may go on all the same."""
        left = []
        for handle in handles:
            try:
                if not self.poll([handle])[0].state.is_final:
                    self.asked(lambda handle=handle: self._stop(handle))
                    if not self.poll([handle])[0].state.is_final:
                        left.append(handle)
            except OuterLoopError as error:
                logger.warning("%s may still run: %s", handle.label, error)
                left.append(handle)
        return left

    def obituary(self, handle: ReplicaHandle, status: ReplicaStatus) -> str:
        """Return how a replica ended, with the end of its log."""
        tail = "\n".join(self.logs(handle).splitlines()[-LOG_TAIL_LINES:])
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        return (
            f"replica {handle.rank} of {handle.run_id} (attempt {handle.attempt}) "
            f"{status.state.value}{code}: {status.message}\n{tail}"
        )

    def command_of(
        self, entrypoint: str, arguments: Sequence[str], rank: int, world_size: int
    ) -> tuple[str, ...]:
        """Return the program and arguments of one replica. See `launch_replicas`."""
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
    def _find(self, handle: ReplicaHandle) -> list[str]:
        """Return the platform's names for all replicas of a handle's label."""

    def _listed(self, run_id: str) -> list[ReplicaHandle]:
        """Return the replicas of a run that the platform lists."""
        del run_id
        return []

    @abstractmethod
    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        """Return how a replica is, without waiting; None if the platform doesn't know it."""

    def logs(self, handle: ReplicaHandle) -> str:
        """Return the output of a replica."""
        return self.asked(lambda: self._logs(handle))

    @abstractmethod
    def _logs(self, handle: ReplicaHandle) -> str:
        """Return the output of a replica."""

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Stop a replica that runs. One that the platform doesn't know is stopped already."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise a platform's errors as ours: without an answer, or refused."""
        yield

    def asked(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request that may be repeated, until the platform answers."""
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
    quorum: int | None = None,
    poll_s: float = 1.0,
    secrets: Mapping[str, str] | None = None,
    renewed: Callable[[ReplicaHandle, int], ReplicaHandle] = lambda handle, _: handle,
    on_look: Callable[[], None] = lambda: None,
) -> list[ReplicaHandle]:
    """Watch replicas until all have succeeded, and restart dead ones.

    A replica that can't be restarted is lost, and the others go on while there are enough of them.
    It can't be if the restarts or the money are used up, if it was canceled, or if it reached its
    time limit twice, because a hanging one would hang again.

    Args:
        executor: Where they run.
        handles: The replicas.
        max_restarts: Restarts of all replicas together.
        quorum: Fewest replicas with which the others go on. By default, half of them, rounded up.
        poll_s: Seconds between looks.
        secrets: As in `launch_replicas`.
        renewed: Gives a dead replica another time limit before its restart, if n die at once.
        on_look: Called at each look.

    Returns:
        The handles of the attempts that succeeded.

    Raises:
        ReplicaFailedError: Too few are left, or one ended by a user's error. The others are stopped.
    """
    current = list(handles)
    fewest = quorum or -(-len(current) // 2)
    n_restarts = 0
    hung: set[int] = set()

    def restarted(handle: ReplicaHandle, status: ReplicaStatus, n: int) -> ReplicaHandle:
        nonlocal n_restarts
        is_lost = status.state is ReplicaState.CANCELLED or status.rank in hung
        if is_lost or n_restarts >= max_restarts:
            raise ReplicaFailedError(executor.obituary(handle, status))
        n_restarts += 1
        if status.state is ReplicaState.TIMED_OUT:
            hung.add(status.rank)
        logger.warning("replica %d %s: starting it again", status.rank, status.state.value)
        return executor.relaunch(renewed(handle, n), secrets=secrets)

    try:
        while True:
            on_look()
            statuses = executor.poll(current)
            if all(status.state is ReplicaState.SUCCEEDED for status in statuses):
                return current
            dead = [
                s for s in statuses if s.state.is_final and s.state is not ReplicaState.SUCCEEDED
            ]
            by_rank = {handle.rank: handle for handle in current}
            for status in dead:
                if status.exit_code == USERS_ERROR:
                    raise ReplicaFailedError(executor.obituary(by_rank[status.rank], status))
            for index, status in enumerate(dead):
                try:
                    n = len(dead) - index
                    by_rank[status.rank] = restarted(by_rank[status.rank], status, n)
                except ReplicaFailedError as error:
                    del by_rank[status.rank]
                    if len(by_rank) < fewest:
                        raise
                    logger.warning("replica %d is lost: %s", status.rank, error)
                current = list(by_rank.values())
            executor.sleep(poll_s)
    except BaseException as error:
        # Whatever else happens here says nothing about the replicas: jobs in a cloud go on.
        if isinstance(error, ReplicaFailedError) or not executor.outlives_launcher:
            executor.cancel(current)
        raise
