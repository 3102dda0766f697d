"""Report why runs failed, with the messages of our own errors, which say what to do."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import dagster as dg
from dagster import DagsterEventType, DagsterRunStatus, RunsFilter

from replay_pipeline.assets.partitions import RANGE_END, RANGE_START
from replay_pipeline.stages.webhook import reasons_shown

_PARTITION = "dagster/partition"
_MAX_RUNS = 50


def failed_runs(
    instance: dg.DagsterInstance, *, since: datetime, secrets: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the runs that failed since then, with job, batches, and reason. `secrets` are removed."""
    records = instance.get_run_records(
        RunsFilter(statuses=[DagsterRunStatus.FAILURE], updated_after=since), limit=_MAX_RUNS
    )
    return [
        failure_facts(instance, record.dagster_run, secrets=secrets) for record in reversed(records)
    ]


def failure_facts(
    instance: dg.DagsterInstance, run: dg.DagsterRun, *, secrets: Sequence[str]
) -> dict[str, Any]:
    """Return the id, job, batches, and reason of one failed run. `secrets` are removed."""
    first = run.tags.get(RANGE_START) or run.tags.get(_PARTITION, "")
    last = run.tags.get(RANGE_END, first)
    return {
        "run": run.run_id,
        "job": run.job_name,
        "batches": first if first == last else f"{first} to {last}",
        "why": "; ".join(reasons_shown(list(_reasons(instance, run)), secrets=secrets))
        or "no reason was recorded",
    }


def _reasons(instance: dg.DagsterInstance, run: dg.DagsterRun) -> Iterable[str]:
    """Yield the innermost error of each failed step; of a run that died without one, the last word."""
    steps = instance.all_logs(run.run_id, of_type=DagsterEventType.STEP_FAILURE)
    for entry in steps:
        data = entry.get_dagster_event().step_failure_data
        error = data.error
        while error is not None and error.cause is not None:
            error = error.cause
        if error is not None:
            yield error.message.strip()
    if not steps:
        for entry in instance.all_logs(run.run_id, of_type=DagsterEventType.RUN_FAILURE):
            yield entry.get_dagster_event().message or ""
