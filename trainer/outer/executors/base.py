"""The contract of executors: start N replicas of one command, watch, collect, restart, cancel.

A platform implements four verbs on one replica (`_start`, `_inspect`, `_read_log`, `_stop`); what
is common to all is here. Handles are plain data, so another process can take over the watch.
"""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec

from trainer.errors import OuterTimeoutError, ReplicaFailedError, TrainerConfigError

logger = logging.getLogger(__name__)

LOG_TAIL_LINES = 20


class ReplicaState(Enum):
    """How a replica is."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the replica will not run any more."""
        return self not in (ReplicaState.STARTING, ReplicaState.RUNNING)


@dataclass(frozen=True)
class ReplicaHandle:
    """One replica that was started. Serialisable, and enough to find it again.

    `command` and `env` are kept to start it anew; secrets are not kept.
    """

    run_id: str
    rank: int
    world_size: int
    attempt: int
    job_id: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    timeout_s: float

    def to_json(self) -> str:
        """Return the handle as JSON."""
        return msgspec.json.encode(self, order="sorted").decode()

    @classmethod
    def from_json(cls, text: str) -> "ReplicaHandle":
        """Read a handle back.

        Raises:
            TrainerConfigError: The text is no handle.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise TrainerConfigError(f"not a replica's handle: {text[:80]!r}: {error}") from error


@dataclass(frozen=True)
class ReplicaStatus:
    """What is known of a replica; `exit_code` is None while it runs or if none was told."""

    rank: int
    state: ReplicaState
    exit_code: int | None = None
    message: str = ""


@dataclass(frozen=True)
class ReplicaResult:
    """A replica that succeeded, with what it wrote."""

    rank: int
    attempt: int
    log: str


class ServerlessExecutor(ABC):
    """Runs replicas somewhere. All implementations pass one contract suite.

    A platform implements four verbs on one replica, those that begin with an underscore.
    """

    python: str = "python"
    outlives_launcher: bool = True
    """Whether replicas go on when who watches them is interrupted."""

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str,
        entrypoint_args: Sequence[str] | Mapping[str, Any] = (),
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
        run_id: str | None = None,
    ) -> list[ReplicaHandle]:
        """Start one command N times.

        The replica finds `REPLICA_RANK`, `REPLICA_COUNT`, `REPLICA_ATTEMPT` and `REPLICA_RUN_ID` in
        its environment. If one cannot be started, those already started are cancelled.

        Args:
            n_replicas: How many.
            entrypoint: A program, or `python:package.module` for `python -m package.module`.
            entrypoint_args: Its arguments; `{rank}` and `{world_size}` are filled in. A mapping
                becomes `--name value`; True is the name alone, False and None are left out.
            env: Further variables.
            secrets: Variables that go through the platform's secret store where there is one.
            timeout_s: Life of one replica, in seconds.
            run_id: Name of the run; None makes one up.

        Raises:
            TrainerConfigError: The number of replicas or the timeout is not positive.
            ReplicaFailedError: The platform refused to start one.
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
                handles.append(self._started(handle, secrets))
            except ReplicaFailedError:
                self.cancel(handles)
                raise
        return handles

    def relaunch(
        self, handle: ReplicaHandle, *, secrets: Mapping[str, str] | None = None
    ) -> ReplicaHandle:
        """Start a replica anew under the same rank, as its next attempt."""
        self.cancel([handle])
        return self._started(replace(handle, attempt=handle.attempt + 1, job_id=""), secrets)

    def poll(self, handles: Sequence[ReplicaHandle]) -> list[ReplicaStatus]:
        """Return how the replicas are, at once."""
        return [self._inspect(handle) for handle in handles]

    def collect(
        self, handles: Sequence[ReplicaHandle], *, timeout_s: float = 3600.0, poll_s: float = 1.0
    ) -> list[ReplicaResult]:
        """Wait until all have succeeded.

        Raises:
            ReplicaFailedError: One did not; the others go on.
            OuterTimeoutError: Some still run after `timeout_s`; they go on.
        """
        until = time.monotonic() + timeout_s
        while True:
            statuses = self.poll(handles)
            for handle, status in zip(handles, statuses, strict=True):
                if status.state.is_final and status.state is not ReplicaState.SUCCEEDED:
                    raise ReplicaFailedError(self._obituary(handle, status))
            if all(status.state.is_final for status in statuses):
                return [ReplicaResult(h.rank, h.attempt, self.logs(h)) for h in handles]
            if time.monotonic() > until:
                running = [status.rank for status in statuses if not status.state.is_final]
                raise OuterTimeoutError(f"ranks {running} still run after {timeout_s:g} s")
            time.sleep(poll_s)

    def cancel(self, handles: Sequence[ReplicaHandle]) -> None:
        """Stop replicas that still run."""
        for handle in handles:
            if not self._inspect(handle).state.is_final:
                self._stop(handle)

    def _obituary(self, handle: ReplicaHandle, status: ReplicaStatus) -> str:
        tail = "\n".join(self.logs(handle).splitlines()[-LOG_TAIL_LINES:])
        code = "" if status.exit_code is None else f" with exit code {status.exit_code}"
        return (
            f"replica {handle.rank} of {handle.run_id} (attempt {handle.attempt}) "
            f"{status.state.value}{code}: {status.message}\n{tail}"
        )

    def _started(self, handle: ReplicaHandle, secrets: Mapping[str, str] | None) -> ReplicaHandle:
        variables = {
            **handle.env,
            "REPLICA_RANK": str(handle.rank),
            "REPLICA_COUNT": str(handle.world_size),
            "REPLICA_ATTEMPT": str(handle.attempt),
            "REPLICA_RUN_ID": handle.run_id,
        }
        job_id = self._start(handle, variables, dict(secrets or {}))
        return replace(handle, job_id=job_id)

    def command_of(
        self,
        entrypoint: str,
        arguments: Sequence[str] | Mapping[str, Any],
        rank: int,
        world_size: int,
    ) -> tuple[str, ...]:
        """Return the program and arguments of one replica; see `launch_replicas`."""
        scheme, _, module = entrypoint.partition(":")
        start = [self.python, "-m", module] if scheme == "python" and module else [entrypoint]
        filled = [
            a.replace("{rank}", str(rank)).replace("{world_size}", str(world_size))
            for a in _listed(arguments)
        ]
        return (*start, *filled)

    @abstractmethod
    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        """Start one replica; return the platform's name for it."""

    @abstractmethod
    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return how a replica is, without waiting."""

    @abstractmethod
    def logs(self, handle: ReplicaHandle) -> str:
        """Return what a replica has written."""

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Stop a replica that runs."""


def _listed(arguments: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return arguments as a program takes them.

    Raises:
        TrainerConfigError: A text alone would become its letters.
    """
    if isinstance(arguments, str):
        raise TrainerConfigError(f"entrypoint_args={arguments!r}: expected a sequence or a mapping")
    if not isinstance(arguments, Mapping):
        return [str(argument) for argument in arguments]
    listed: list[str] = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            listed += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return listed


def supervise(
    executor: ServerlessExecutor,
    handles: Sequence[ReplicaHandle],
    *,
    max_restarts: int = 10,
    poll_s: float = 1.0,
    secrets: Mapping[str, str] | None = None,
    on_change: Callable[[list[ReplicaHandle]], None] = lambda _: None,
) -> list[ReplicaHandle]:
    """Watch replicas until all have succeeded, and start those anew that died.

    Args:
        executor: Where they run.
        handles: The replicas.
        max_restarts: Restarts allowed, of all replicas together.
        poll_s: Seconds between looks.
        secrets: Given again at each restart.
        on_change: Gets the handles whenever one was started anew.

    Returns:
        The handles of the attempts that succeeded.

    Raises:
        ReplicaFailedError: One died and no restart is left, or one was cancelled; the others
            are stopped.
    """
    current = list(handles)
    n_restarts = 0
    try:
        while True:
            statuses = executor.poll(current)
            if all(status.state is ReplicaState.SUCCEEDED for status in statuses):
                return current
            for index, status in enumerate(statuses):
                if not status.state.is_final or status.state is ReplicaState.SUCCEEDED:
                    continue
                if status.state is ReplicaState.CANCELLED or n_restarts >= max_restarts:
                    # It has failed for good: this raises, with the end of its log.
                    executor.collect([current[index]], timeout_s=0)
                n_restarts += 1
                logger.warning("replica %d %s: starting it anew", status.rank, status.state.value)
                current[index] = executor.relaunch(current[index], secrets=secrets)
                on_change(current)
            time.sleep(poll_s)
    except KeyboardInterrupt:
        if not executor.outlives_launcher:
            executor.cancel(current)
        raise
    except BaseException:
        executor.cancel(current)
        raise
