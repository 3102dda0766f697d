"""Run replicas as Modal sandboxes."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainer.diloco.executors.base import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)
from trainer.errors import OuterLoopError, PlatformUnreachableError, TrainerConfigError

APP = "outer-loop"
"""The Modal app, which is created if missing."""
TIMED_OUT_CODE, TERMINATED_CODE = 124, 137
UNREACHABLE = (
    "ConnectionError", "ServiceError", "InternalError", "TimeoutError", "ResourceExhaustedError",
)  # fmt: skip
"""Errors of Modal that tell nothing about the request, so that it can be retried."""

DEFAULT_CPU, DEFAULT_MEMORY_MIB = 2.0, 8192
CPU_USD_PER_S, GIB_USD_PER_S = 0.0000393, 0.00000667
GPU_USD_PER_S = {
    "B200": 0.001736, "H200": 0.001261, "H100": 0.001097, "RTX-PRO-6000": 0.000842,
    "A100-80GB": 0.000694, "A100": 0.000694, "A100-40GB": 0.000583, "L40S": 0.000542,
    "A10": 0.000306, "A10G": 0.000306, "L4": 0.000222, "T4": 0.000164,
}  # fmt: skip
"""Dollars per second without a choice of region, from copies of Modal's price page of 2026, not
compared with the page itself. Sandboxes cost three times the rate of functions for cores and
memory. The name A100 may get the larger card, so it has that one's price."""


class ModalExecutor(ServerlessExecutor):
    """The executor that runs each replica in its own sandbox.

    Modal gives a stopped sandbox and a killed process the same exit code, 137. So a replica that
    was canceled through another executor object counts as failed here. The name of a sandbox is its
    label, and no two running sandboxes can share it. So a lost answer never starts one twice. Modal
    bills use above the request, so cores and memory are limited to the request.

    Args:
        image: A registry name such as `python:3.12`, or a `modal.Image`, with this package.
        gpu: GPU type, such as `A100`, or `H100:2` for two. None runs on CPUs.
        cpu: Cores of each replica.
        memory_mib: Memory of each replica.
        python: The interpreter in the image, for `python:` entry points.
        usd_per_hour: Cost of one replica. None takes Modal's published prices.

    Raises:
        TrainerConfigError: modal is not installed.
    """

    def __init__(
        self,
        image: Any = "python:3.12",
        gpu: str | None = None,
        *,
        cpu: float = DEFAULT_CPU,
        memory_mib: int = DEFAULT_MEMORY_MIB,
        python: str = "python",
        usd_per_hour: float | None = None,
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
        self.python = python
        self._usd_per_hour = usd_per_hour
        self._app: Any = None
        self._sandboxes: dict[str, Any] = {}
        self._cancelled: set[str] = set()

    @property
    def usd_per_hour(self) -> float:
        """Return the cost of one replica, in dollars per hour.

        Raises:
            TrainerConfigError: The price of the GPU is unknown.
        """
        if self._usd_per_hour is not None:
            return self._usd_per_hour
        per_s = self.cpu * CPU_USD_PER_S + self.memory_mib / 1024 * GIB_USD_PER_S
        if self.gpu is not None:
            kind, _, n = self.gpu.upper().rstrip("!").partition(":")
            if kind not in GPU_USD_PER_S:
                raise TrainerConfigError(f"no price is known for a {kind}: give --usd-per-hour")
            per_s += GPU_USD_PER_S[kind] * int(n or 1)
        return 3600 * per_s

    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        modal, image = self._modal, self.image
        try:
            sandbox = modal.Sandbox.create(
                *handle.command,
                app=self._application(),
                name=handle.label,
                image=modal.Image.from_registry(image) if isinstance(image, str) else image,
                gpu=self.gpu,
                cpu=(self.cpu, self.cpu),
                memory=(self.memory_mib, self.memory_mib),
                secrets=[modal.Secret.from_dict({**env, **secrets})],
                timeout=max(1, int(handle.timeout_s)),
                tags=handle.tags,
            )
        except modal.exception.AlreadyExistsError:
            sandbox = self._named(handle)
        self._sandboxes[sandbox.object_id] = sandbox
        return sandbox.object_id

    def _application(self) -> Any:
        if self._app is None:
            self._app = self._modal.App.lookup(APP, create_if_missing=True)
        return self._app

    def _find(self, handle: ReplicaHandle) -> list[str]:
        self._application()
        found = self._named(handle)
        return [] if found is None else [found.object_id]

    def _listed(self, run_id: str) -> list[ReplicaHandle]:
        # The plain `list` leaves out sandboxes of the second version, which have no GPU.
        list_all = self._modal.Sandbox._experimental_list
        found = list_all(app_id=self._application().app_id, tags={"run": run_id})
        return [ReplicaHandle.of_tags(one.get_tags(), one.object_id) for one in found]

    def _named(self, handle: ReplicaHandle) -> Any:
        """Return the sandbox of a handle's label; one that has ended only of the second version."""
        for is_ended_too in (False, True):
            try:
                return self._modal.Sandbox.from_name(
                    APP, handle.label, include_terminated=is_ended_too
                )
            except self._modal.exception.NotFoundError:
                continue
        return None

    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        try:
            code = self._sandbox(handle).poll()
        except self._modal.exception.NotFoundError:
            return None
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

    def _logs(self, handle: ReplicaHandle) -> str:
        """Return both streams, standard output first. A live sandbox returns nothing yet.

        The client's streams end only with the sandbox, so reading a live one would block.
        """
        status = self._inspect(handle)
        if status is None or not status.state.is_final:
            return ""
        # An object gives each stream once: a second reader needs a new one.
        self._sandboxes.pop(handle.job_id, None)
        sandbox = self._sandbox(handle)
        return sandbox.stdout.read() + sandbox.stderr.read()

    def _stop(self, handle: ReplicaHandle) -> None:
        self._cancelled.add(handle.job_id)
        try:
            sandbox = self._sandbox(handle)
            sandbox.terminate()
            sandbox.wait(raise_on_termination=False)
        except self._modal.exception.NotFoundError:
            return

    def _sandbox(self, handle: ReplicaHandle) -> Any:
        if handle.job_id not in self._sandboxes:
            self._sandboxes[handle.job_id] = self._modal.Sandbox.from_id(handle.job_id)
        return self._sandboxes[handle.job_id]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        errors = self._modal.exception
        try:
            yield
        except tuple(getattr(errors, name) for name in UNREACHABLE) as error:
            why = f"Modal does not answer ({type(error).__name__}: {error})"
            raise PlatformUnreachableError(why) from error
        except errors.Error as error:
            raise OuterLoopError(f"Modal: {type(error).__name__}: {error}") from error
