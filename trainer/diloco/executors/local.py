"""Run replicas as processes of this machine."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import psutil

from trainer.diloco.environment import replica_environment
from trainer.diloco.executors.base import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)
from trainer.errors import OuterLoopError

# Runs a command and leaves its exit code, for a watcher that is not its parent.
SHIM = 'echo $$ > "${0%exit}pid"; "$@"; c=$?; echo $c > "$0.part"; mv "$0.part" "$0"; exit $c'

GONE = "gone"

_children: dict[str, subprocess.Popen[bytes]] = {}
"""Processes that this one started; they outlive the executor object."""


@atexit.register
def _reap() -> None:
    """Take the exit codes of those that have ended, which Python would else complain about."""
    for child in _children.values():
        child.poll()


class LocalProcessExecutor(ServerlessExecutor):
    """The executor that runs each replica in its own process group. Processes are spawned and never forked.

    Another process can take over the watch.
    """

    outlives_launcher = False
    arrives_s = 1.0

    def __init__(
        self, work_dir: str | os.PathLike[str] = "replicas", *, python: str = sys.executable
    ) -> None:
        self.work_dir = Path(work_dir)
        self.python = python

    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        folder = self._folder(handle)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / "log").open("wb") as log:
                child = subprocess.Popen(
                    ["/bin/sh", "-c", SHIM, str(folder / "exit"), *handle.command],
                    env=replica_environment({**env, **secrets}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise OuterLoopError(f"cannot start: {error}") from error
        job_id = f"{child.pid}:{_started_at(child.pid)}"
        (folder / "began").write_text(datetime.now(UTC).isoformat(), "utf-8")
        _children[job_id] = child
        return job_id

    def _find(self, handle: ReplicaHandle) -> list[str]:
        path = self._folder(handle) / "pid"
        if not path.exists():
            return []
        pid = int(path.read_text("utf-8"))
        if not path.with_name("began").exists():
            path.with_name("began").write_text(datetime.now(UTC).isoformat(), "utf-8")
        return [f"{pid}:{_started_at(pid)}"]

    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus:
        folder = self._folder(handle)
        if (folder / "ended-by").exists():
            ended = ReplicaState((folder / "ended-by").read_text("utf-8"))
            return ReplicaStatus(handle.rank, ended, 128 + signal.SIGKILL)
        if not self._is_alive(handle):
            is_told = (folder / "exit").exists()  # who leaves no exit code was killed
            code = int((folder / "exit").read_text("utf-8")) if is_told else 128 + signal.SIGKILL
            state = ReplicaState.FAILED if code else ReplicaState.SUCCEEDED
            why = f"signal {code - 128}" if code > 128 else ""
            return ReplicaStatus(handle.rank, state, code, why)
        began = datetime.fromisoformat((folder / "began").read_text("utf-8"))
        if (datetime.now(UTC) - began).total_seconds() > handle.timeout_s:
            self._kill(handle, ReplicaState.TIMED_OUT)
            return self._inspect(handle)
        return ReplicaStatus(handle.rank, ReplicaState.RUNNING)

    def _logs(self, handle: ReplicaHandle) -> str:
        path = self._folder(handle) / "log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def _stop(self, handle: ReplicaHandle) -> None:
        self._kill(handle, ReplicaState.CANCELLED)

    def _kill(self, handle: ReplicaHandle, reason: ReplicaState) -> None:
        (self._folder(handle) / "ended-by").write_text(reason.value, "utf-8")
        try:
            os.killpg(_pid(handle), signal.SIGKILL)
        except ProcessLookupError:
            return
        child = _children.pop(handle.job_id, None)
        if child is not None:
            child.wait()

    def _is_alive(self, handle: ReplicaHandle) -> bool:
        child = _children.get(handle.job_id)
        if child is not None:
            if child.poll() is None:
                return True
            del _children[handle.job_id]
            return False
        started = _started_at(_pid(handle))
        return started != GONE and f"{_pid(handle)}:{started}" == handle.job_id

    def _folder(self, handle: ReplicaHandle) -> Path:
        return self.work_dir / handle.run_id / f"{handle.rank:04d}-{handle.attempt}"


def _pid(handle: ReplicaHandle) -> int:
    return int(handle.job_id.partition(":")[0])


def _started_at(pid: int) -> str:
    """Return when a process began, which tells it from a later one of the same id."""
    try:
        process = psutil.Process(pid)
        is_over = process.status() == psutil.STATUS_ZOMBIE
        return GONE if is_over else str(process.create_time())
    except psutil.NoSuchProcess:
        return GONE
