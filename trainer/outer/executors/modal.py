"""Replicas as Modal sandboxes."""

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer.errors import OuterLoopError, ReplicaFailedError, TrainerConfigError
from trainer.outer.executors.base import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TIMED_OUT_CODE, TERMINATED_CODE = 124, 137


class ModalExecutor(ServerlessExecutor):
    """Runs each replica in a sandbox of its own.

    Modal tells a stopped sandbox from a killed process by no exit code: both are 137. A replica
    that was cancelled through another executor object counts as failed here.

    Args:
        image: A registry name such as `python:3.12`, or a `modal.Image`.
        gpu: GPU type, such as `A100`; None runs on CPUs.
        cpu: Cores of each replica; None takes Modal's default.
        memory_mib: Memory of each replica; None takes Modal's default.
        app: Name of the Modal app; made if it does not exist.
        volumes: Mounts by path, `modal.Volume` or `modal.CloudBucketMount`.
        python: The interpreter in the image, for `python:` entry points.
        client: A `modal.Client`; None takes the one of the configured account.

    Raises:
        TrainerConfigError: modal is not installed.
    """

    def __init__(
        self,
        image: Any = "python:3.12",
        gpu: str | None = None,
        *,
        cpu: float | None = None,
        memory_mib: int | None = None,
        app: str = "outer-loop",
        volumes: Mapping[str, Any] | None = None,
        python: str = "python",
        client: Any = None,
    ) -> None:
        try:
            self._modal: Any = importlib.import_module("modal")
        except ImportError as error:
            raise TrainerConfigError(
                f"modal cannot be imported ({error}): pip install 'replay-pipeline[outer]'"
            ) from error
        self.image = image
        self.gpu = gpu
        self.cpu = cpu
        self.memory_mib = memory_mib
        self.app_name = app
        self.python = python
        self._volumes = dict(volumes or {})
        self._client = client
        self._app: Any = None
        self._sandboxes: dict[str, Any] = {}
        self._cancelled: set[str] = set()

    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        modal = self._modal
        image = self.image
        if isinstance(image, str):
            image = modal.Image.from_registry(image)
        try:
            if self._app is None:
                self._app = modal.App.lookup(
                    self.app_name, create_if_missing=True, client=self._client
                )
            sandbox = modal.Sandbox.create(
                *handle.command,
                app=self._app,
                image=image,
                gpu=self.gpu,
                cpu=self.cpu,
                memory=self.memory_mib,
                secrets=[modal.Secret.from_dict({**env, **secrets})],
                timeout=max(1, round(handle.timeout_s)),
                volumes=self._volumes,
                tags={"run": handle.run_id, "rank": str(handle.rank)},
                client=self._client,
            )
        except modal.exception.Error as error:
            raise ReplicaFailedError(f"Modal refused replica {handle.rank}: {error}") from error
        self._sandboxes[sandbox.object_id] = sandbox
        return sandbox.object_id

    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus:
        code = self._asked(lambda: self._sandbox(handle).poll())
        if code is None:
            return ReplicaStatus(handle.rank, ReplicaState.RUNNING)
        if code == 0:
            state = ReplicaState.SUCCEEDED
        elif code == TIMED_OUT_CODE:
            state = ReplicaState.TIMED_OUT
        elif code == TERMINATED_CODE and handle.job_id in self._cancelled:
            state = ReplicaState.CANCELLED
        else:
            state = ReplicaState.FAILED
        return ReplicaStatus(handle.rank, state, code)

    def logs(self, handle: ReplicaHandle) -> str:
        """Return both streams, standard output first; of a live sandbox, nothing yet.

        The client's streams end only with the sandbox, so a live one would block.
        """
        if not self._inspect(handle).state.is_final:
            return ""
        # An object gives each stream once: a second reader needs a new one.
        self._sandboxes.pop(handle.job_id, None)
        sandbox = self._asked(lambda: self._sandbox(handle))
        return self._asked(lambda: sandbox.stdout.read() + sandbox.stderr.read())

    def _stop(self, handle: ReplicaHandle) -> None:
        self._cancelled.add(handle.job_id)
        sandbox = self._sandbox(handle)
        self._asked(sandbox.terminate)
        self._asked(lambda: sandbox.wait(raise_on_termination=False))

    def _sandbox(self, handle: ReplicaHandle) -> Any:
        if handle.job_id not in self._sandboxes:
            self._sandboxes[handle.job_id] = self._modal.Sandbox.from_id(
                handle.job_id, client=self._client
            )
        return self._sandboxes[handle.job_id]

    def _asked(self, request: Callable[[], Result]) -> Result:
        try:
            return request()
        except self._modal.exception.Error as error:
            raise OuterLoopError(f"Modal: {type(error).__name__}: {error}") from error
