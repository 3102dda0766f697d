"""End the runs whose process is dead, and run again what Dagster could not.

Dagster learns from the run, or from the server that started it, that the run has ended. If both
died, the run stays "started" for good and blocks the paid step. So we look at the processes
instead, which works only for those of this machine.
"""

import contextlib
import json
import logging
import socket
from datetime import UTC, datetime, timedelta

import dagster as dg
import psutil
from dagster import DagsterEventType, DagsterRunStatus, RunsFilter
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.tags import AUTO_RETRY_RUN_ID_TAG, WILL_RETRY_TAG
from dagster._core.workspace.context import IWorkspaceProcessContext
from dagster._daemon.auto_run_reexecution.auto_run_reexecution import retry_run

logger = logging.getLogger(__name__)

_GOING = (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
_SERVER_TAG = ".dagster/grpc_info"
_BEGUN = {DagsterEventType.RUN_STARTING, DagsterEventType.RUN_START}
_COMES_UP_S = 60.0
"""How long a run's process may take to come up, which it does even if the server that started it is killed."""
_CLOCK_SLACK_S = 2.0
_WHAT_TO_DO = (
    "its process is gone (killed, out of memory, or the machine went down). Nothing that was paid "
    "for is lost. Dagster runs it again, until three in a row got no batch further; after that, run the "
    "same batches again."
)


def reconcile(instance: dg.DagsterInstance, *, runs_are_here: bool = False) -> list[str]:
    """End the runs whose process is dead, and free the pool slots that they hold.

    Use it only if every run is a process of this machine, as with records in SQLite files or with
    `runs_are_here`. Returns the ids of the ended runs.
    """
    ended: list[str] = []
    if not runs_are_here and not isinstance(instance.event_log_storage, SqliteEventLogStorage):
        return ended
    for run in instance.get_runs(filters=RunsFilter(statuses=list(_GOING))):
        if _is_alive(instance, run):
            continue
        # Since it was listed, it may have ended well, and its process after that.
        now = instance.get_run_by_id(run.run_id)
        if now is None or now.is_finished:
            continue
        if run.status == DagsterRunStatus.CANCELING:
            instance.report_run_canceled(run, message=f"Run canceled: {_WHAT_TO_DO}")
        else:
            instance.report_run_failed(run, message=f"Run failed: {_WHAT_TO_DO}")
        logger.warning("run %s of %s: %s", run.run_id, run.job_name, _WHAT_TO_DO)
        ended.append(run.run_id)
    _free_slots(instance)
    return ended


def retry_dropped(context: IWorkspaceProcessContext) -> None:
    """Run again the runs that Dagster gave up, because their code was not served at that moment."""
    instance = context.instance
    lately = RunsFilter(
        statuses=[DagsterRunStatus.FAILURE],
        tags={WILL_RETRY_TAG: "false"},
        updated_after=datetime.now(UTC) - timedelta(days=1),
    )
    for run in instance.get_runs(lately):
        events = instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
        is_dropped = any(e.get_dagster_event().message == "Failed to retry run" for e in events)
        if is_dropped and AUTO_RETRY_RUN_ID_TAG not in run.tags:
            retry_run(run, context)


def _free_slots(instance: dg.DagsterInstance) -> None:
    """Take the slots back from runs that have ended or were deleted."""
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        return
    for run_id in storage.get_concurrency_run_ids():
        run = instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            storage.free_concurrency_slots_for_run(run_id)


def _is_alive(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    events = instance.all_logs(run.run_id, of_type=_BEGUN)
    if not events:
        return _is_served(run)
    last = events[-1].get_dagster_event()
    if last.event_type == DagsterEventType.RUN_STARTING:
        age_s = datetime.now(UTC).timestamp() - events[-1].timestamp
        return _is_served(run) or age_s < _COMES_UP_S
    return last.pid is not None and is_running(last.pid, since=events[-1].timestamp)


def _is_served(run: dg.DagsterRun) -> bool:
    """Return whether the server that was told to start the run is there: its process may be coming up."""
    try:
        address = json.loads(run.tags[_SERVER_TAG])
    except (KeyError, ValueError):
        return False
    with contextlib.suppress(OSError):
        if path := address.get("socket"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        else:
            socket.create_connection((address["host"], address["port"]), timeout=2).close()
        return True
    return False


def is_running(pid: int, *, since: float) -> bool:
    """Return whether the process `pid` is running and started at `since` (seconds since the epoch)."""
    try:
        process = psutil.Process(pid)
        is_over = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return not is_over and process.create_time() <= since + _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return False
