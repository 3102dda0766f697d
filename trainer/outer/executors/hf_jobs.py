"""Replicas as Hugging Face Jobs."""

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import tenacity
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from trainer.errors import OuterLoopError, ReplicaFailedError
from trainer.outer.executors.base import (
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    ServerlessExecutor,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STATES = {
    "COMPLETED": ReplicaState.SUCCEEDED,
    "CANCELED": ReplicaState.CANCELLED,
    "DELETED": ReplicaState.CANCELLED,
    "ERROR": ReplicaState.FAILED,
    "RUNNING": ReplicaState.RUNNING,
}
TRIES = 5
FIRST_BACKOFF_S = 0.5


class HFJobsExecutor(ServerlessExecutor):
    """Runs each replica as one Job, found again by its labels.

    The Jobs client repeats no request by itself. Starting a job is not idempotent, so before it
    is tried again the jobs with the same labels are looked up: a lost answer starts no twin.

    Args:
        hardware: Flavor, such as `cpu-basic` or `a10g-large`.
        image: Docker image that holds this package.
        namespace: User or organisation that pays; None asks who the token belongs to, once.
        token: Access token; None takes the one that is logged in.
        endpoint: Another Hub than the public one.
        python: The interpreter in the image, for `python:` entry points.
    """

    def __init__(
        self,
        hardware: str = "cpu-basic",
        *,
        image: str = "python:3.12",
        namespace: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
        python: str = "python",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.hardware = hardware
        self.image = image
        self.python = python
        self._api = HfApi(endpoint=endpoint, token=token)
        self._namespace = namespace
        self._backoff = sleep

    @property
    def namespace(self) -> str:
        """Who the jobs belong to."""
        return self._namespace or self._asked(lambda: self._api.whoami(cache=True))["name"]

    def _start(
        self, handle: ReplicaHandle, env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> str:
        labels = {"run": handle.run_id, "rank": str(handle.rank), "attempt": str(handle.attempt)}
        attempts = self._attempts()

        def start() -> str:
            # Starting is not idempotent: a request without an answer may have started the job.
            is_first = attempts.statistics["attempt_number"] == 1
            if not is_first and (found := self._find(labels)) is not None:
                return found
            job = self._api.run_job(
                image=self.image,
                command=list(handle.command),
                env=dict(env),
                secrets=dict(secrets) or None,
                flavor=self.hardware,
                timeout=max(1, round(handle.timeout_s)),
                labels=labels,
                namespace=self.namespace,
            )
            return job.id

        try:
            return attempts(start)
        except (HfHubHTTPError, OSError) as error:
            why = f"Hugging Face Jobs refused replica {handle.rank}: {error}"
            raise ReplicaFailedError(why) from error

    def _find(self, labels: dict[str, str]) -> str | None:
        """Return the job that an unanswered request has started after all."""
        listed = self._asked(
            lambda: list(self._api.list_jobs(labels=labels, namespace=self.namespace))
        )
        same = [job for job in listed if (job.labels or {}).items() >= labels.items()]
        return same[0].id if same else None

    def _inspect(self, handle: ReplicaHandle) -> ReplicaStatus:
        job = self._asked(
            lambda: self._api.inspect_job(job_id=handle.job_id, namespace=self.namespace)
        )
        stage = str(getattr(job.status.stage, "value", job.status.stage))
        message = job.status.message or ""
        state = STATES.get(stage, ReplicaState.STARTING)
        if state is ReplicaState.FAILED and re.search(r"time[d ]*.?out", message, re.IGNORECASE):
            state = ReplicaState.TIMED_OUT
        told = re.search(r"exit code:? (\d+)", message)
        code = 0 if state is ReplicaState.SUCCEEDED else int(told[1]) if told else None
        return ReplicaStatus(handle.rank, state, code, message)

    def logs(self, handle: ReplicaHandle) -> str:
        """Return what a replica has written so far, or since it ended."""
        lines: list[str] = self._asked(
            lambda: list(self._api.fetch_job_logs(job_id=handle.job_id, namespace=self.namespace))
        )
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def _stop(self, handle: ReplicaHandle) -> None:
        self._asked(lambda: self._api.cancel_job(job_id=handle.job_id, namespace=self.namespace))

    def _asked(self, request: Callable[[], Result]) -> Result:
        """Make a request that may be repeated, until it is answered."""
        try:
            return self._attempts()(request)
        except (HfHubHTTPError, OSError) as error:
            raise OuterLoopError(f"Hugging Face Jobs: {error}") from error

    def _attempts(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_after_attempt(TRIES),
            wait=tenacity.wait_exponential(FIRST_BACKOFF_S),
            sleep=self._backoff,
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )


def _is_transient(error: BaseException) -> bool:
    if not isinstance(error, HfHubHTTPError | OSError):
        return False
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500 or response.status_code == 429
