"""Replicas as Hugging Face Jobs."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from huggingface_hub import HfApi, JobInfo
from huggingface_hub.errors import HTTPError

from trainer.diloco.executors.base import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)
from trainer.errors import OuterLoopError, PlatformUnreachableError, TrainerConfigError

STATES = {
    "COMPLETED": ReplicaState.SUCCEEDED,
    "CANCELED": ReplicaState.CANCELLED,
    "DELETED": ReplicaState.CANCELLED,
    "ERROR": ReplicaState.FAILED,
    "RUNNING": ReplicaState.RUNNING,
}
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
MISSING = 404
UNITS_S = {"second": 1.0, "minute": 60.0, "hour": 3600.0}


class HFJobsExecutor(ServerlessExecutor):
    """The executor that runs each replica as one Job, and finds it again by its labels.

    The Jobs client retries no request, and starting a job isn't idempotent. Before a retry, jobs
    with the same labels are looked for until the list must have them.
    """

    billing_step_s = 60.0

    def __init__(
        self,
        hardware: str = "cpu-basic",
        *,
        image: str = "python:3.12",
        namespace: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
        python: str = "python",
        usd_per_hour: float | None = None,
    ) -> None:
        self.hardware = hardware
        self.image = image
        self.python = python
        self._api = HfApi(endpoint=endpoint, token=token)
        self._namespace = namespace
        self._usd_per_hour = usd_per_hour

    @property
    def namespace(self) -> str:
        """Return the owner of the jobs."""
        if self._namespace is None:
            self._namespace = str(self.asked(lambda: self._api.whoami(cache=True))["name"])
        return self._namespace

    @property
    def usd_per_hour(self) -> float:
        """Return the cost of one replica by Hugging Face's price list, in dollars per hour.

        Raises:
            TrainerConfigError: The list doesn't contain the flavor.
        """
        if self._usd_per_hour is None:
            listed = {one.name: one for one in self.asked(self._api.list_jobs_hardware)}
            if self.hardware not in listed:
                raise TrainerConfigError(
                    f"hardware {self.hardware!r}: choose one of {', '.join(sorted(listed))}"
                )
            found = listed[self.hardware]
            self._usd_per_hour = found.unit_cost_usd * 3600 / UNITS_S[found.unit_label]
        return self._usd_per_hour

    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        job = self._api.run_job(
            image=self.image,
            command=list(handle.command),
            env=dict(env),
            secrets=dict(secrets) or None,
            flavor=self.hardware,
            timeout=max(1, int(handle.timeout_s)),
            labels=handle.tags,
            namespace=self.namespace,
        )
        return job.id

    def _find(self, handle: ReplicaHandle) -> list[str]:
        return [job.id for job in self._labelled(handle.tags)]

    def _labelled(self, labels: Mapping[str, str]) -> list[JobInfo]:
        listed = self._api.list_jobs(labels=dict(labels), namespace=self.namespace)
        return [job for job in listed if (job.labels or {}).items() >= labels.items()]

    def _listed(self, run_id: str) -> list[ReplicaHandle]:
        found = self._labelled({"run": run_id})
        return [ReplicaHandle.of_tags(job.labels or {}, job.id) for job in found]

    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus | None:
        try:
            job = self._api.inspect_job(job_id=handle.job_id, namespace=self.namespace)
        except HTTPError as error:
            if _status_of(error) == MISSING:
                return None
            raise
        stage = str(getattr(job.status.stage, "value", job.status.stage))
        message = job.status.message or ""
        state = STATES.get(stage, ReplicaState.STARTING)
        if state is ReplicaState.FAILED and re.search(r"time[d ]*.?out", message, re.IGNORECASE):
            state = ReplicaState.TIMED_OUT
        told = re.search(r"exit code:? (\d+)", message)
        code = 0 if state is ReplicaState.SUCCEEDED else int(told[1]) if told else None
        # Waiting for a machine is not billed.
        told_s = job.durations
        billed_s = None if told_s is None else float(told_s.running_secs or 0)
        return ReplicaStatus(handle.rank, state, code, message, billed_s)

    def _logs(self, handle: ReplicaHandle) -> str:
        lines = self._api.fetch_job_logs(job_id=handle.job_id, namespace=self.namespace)
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            self._api.cancel_job(job_id=handle.job_id, namespace=self.namespace)
        except HTTPError as error:
            if _status_of(error) != MISSING:
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (HTTPError, OSError) as error:
            status = _status_of(error)
            is_told = status is not None and status not in TRANSIENT
            kind = OuterLoopError if is_told else PlatformUnreachableError
            raise kind(f"Hugging Face Jobs: {error}") from error


def _status_of(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
