"""Dagster's web server on loopback, asked as its own pages ask it."""

import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

_LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}
"""
_STATUS = "query Run($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"
_ENDED = ("SUCCESS", "FAILURE", "CANCELED")
_PATIENCE_S = 180.0
_PASSWORDS = urllib.request.HTTPPasswordMgrWithDefaultRealm()
_OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPCookieProcessor(),
    urllib.request.HTTPBasicAuthHandler(_PASSWORDS),
)
"""With the cookies that the gates have given it, and passwords for those who ask."""
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/\?token=\S+")


def is_serving(url: str) -> bool:
    """Whether Dagster's own web server answers at `url`. It may still be without its code location."""
    try:
        with _OPENER.open(f"{url}/server_info", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def address(log: Path) -> str:
    """The address with its token that `replay-pipeline ui` has printed.

    Raises:
        OSError: it has not yet.
    """
    found = _ADDRESS.search(log.read_text("utf-8", "replace"))
    if found is None:
        raise OSError(f"{log}: no address yet")
    return found[0]


def sign_in(log: Path) -> str:
    """Open that address as a browser does; returns where the web server is, without the token.

    Raises:
        OSError: it has not been printed yet, or nobody answers.
    """
    shown = address(log)
    with _OPENER.open(shown, timeout=30):
        return shown.partition("/?")[0]


def use_password(url: str, user: str, password: str) -> None:
    """Give this name and password from now on when `url` asks who it is."""
    _PASSWORDS.add_password(None, url, user, password)


def graphql(url: str, query: str, **variables: Any) -> dict[str, Any]:
    """The data that a query gives.

    Raises:
        OSError: nobody answers, or the answer is an error.
    """
    request = urllib.request.Request(
        f"{url}/graphql",
        data=json.dumps({"query": query, "variables": variables}).encode(),
        headers={"content-type": "application/json", "origin": url},
    )
    with _OPENER.open(request, timeout=60) as response:
        answer = json.load(response)
    if errors := answer.get("errors"):
        raise OSError(f"{url}/graphql: {errors}")
    return answer["data"]


def launch_batch(url: str, batch: str, assets: Sequence[str] = ()) -> str:
    """Start the run of all stages of a batch, or of some, as a click does; returns the run's id.

    Raises:
        OSError: nobody answers, or the run is refused, as it is until the server has its code
            location.
    """
    params = {
        "selector": {
            "repositoryLocationName": "replay_pipeline",
            "repositoryName": "__repository__",
            "pipelineName": "replay_batches",
            **({"assetSelection": [{"path": [a]} for a in assets]} if assets else {}),
            "assetCheckSelection": [] if assets else None,
        },
        "mode": "default",
        "runConfigData": {},
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": batch}]},
    }
    launched = graphql(url, _LAUNCH, params=params)["launchRun"]
    if launched["__typename"] != "LaunchRunSuccess":
        raise OSError(f"{url}: no run of {batch} was started: {launched}")
    return launched["run"]["runId"]


def wait_for_run(url: str, run_id: str) -> str:
    """Wait for a run; returns how it ended: `SUCCESS`, `FAILURE` or `CANCELED`.

    Raises:
        OSError: nobody answers any more.
        TimeoutError: it has not ended in time.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        status = graphql(url, _STATUS, id=run_id)["runOrError"]["status"]
        if status in _ENDED:
            return status
        if time.monotonic() > end:
            raise TimeoutError(f"{url}: run {run_id} is {status} after {_PATIENCE_S:g} s")
        time.sleep(0.05)


def process_tree(pid: int) -> list[int]:
    """A process and all below it: what serves Dagster is several."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    return [pid]
