"""The asset that summarizes the night on one page, and why runs failed."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster import DagsterEventType, DagsterRunStatus, RunsFilter

from replay_pipeline.assets.reporting import GROUP, OWNERS, RANGE_END, RANGE_START, metadata_value
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.stages.views.summary import night_of, night_words
from replay_pipeline.stages.views.webhook import notify, reasons_shown
from replay_pipeline.stages.work.markdown import bars, markdown_table

_PARTITION = "dagster/partition"
WILL_RETRY = "dagster/will_retry"
"""Tag of a failed run that Dagster runs again, which is told only if that fails as well."""
_MAX_RUNS = 50


def failed_runs(
    instance: dg.DagsterInstance, *, since: datetime, secrets: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the runs that failed since then, with job, batches, and reason. `secrets` are removed."""
    records = instance.get_run_records(
        RunsFilter(statuses=[DagsterRunStatus.FAILURE], updated_after=since), limit=_MAX_RUNS
    )
    return [
        failure_facts(instance, record.dagster_run, secrets=secrets)
        for record in reversed(records)
        if record.dagster_run.tags.get(WILL_RETRY) != "true"
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
    """Yield what blocking checks found, and the innermost error of each other failed step.

    Of a run that died without either, yield the last word.
    """
    checks = instance.all_logs(run.run_id, of_type=DagsterEventType.ASSET_CHECK_EVALUATION)
    found = [entry.get_dagster_event().asset_check_evaluation_data for entry in checks]
    is_error = dg.AssetCheckSeverity.ERROR
    blocked = [
        each for each in found if each.blocking and not each.passed and each.severity == is_error
    ]
    for each in blocked:
        yield f"{each.asset_check_key.name}: {each.description}"
    if blocked:
        return
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


_A_DAY = timedelta(days=1)


@dg.asset(
    deps=[dg.AssetDep("normalized_pairs", partition_mapping=dg.AllPartitionMapping())],
    group_name=GROUP,
    owners=OWNERS,
    kinds={"python", "json"},
    tags={"stage": "report"},
    description="The night on one page: what was found, asked, paid, made, and dropped since the "
    "last summary, and which runs failed.",
    freshness_policy=dg.FreshnessPolicy.time_window(
        fail_window=2.1 * _A_DAY, warn_window=1.1 * _A_DAY
    ),
)
def night_summary(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """Return the counts and failures since the last summary: found, paid, made, and dropped."""
    work = pipeline.open()
    last = context.instance.get_latest_materialization_event(context.asset_key)
    since = datetime.fromtimestamp(last.timestamp, UTC) if last else datetime.now(UTC) - _A_DAY
    failures = failed_runs(context.instance, since=since, secrets=work.settings.secrets())
    night = night_of(work, since=since, failures=failures)
    counted = {key: value for key, value in night.items() if isinstance(value, int | float)}
    if work.settings.notify.is_nightly:
        notify(work.settings.notify, "night", night_words(night), counted)
    rows = [{"figure": key.replace("_", " "), "this night": n} for key, n in counted.items()]
    facts = {
        **counted,
        "night": markdown_table(rows),
        "words": night_words(night),
        "dropped_pairs_by_operator": bars(night["dropped"]),
        "failed_calls_by_reason": bars(night["errors"]),
        "failures": markdown_table(night["failures"]),
    }
    return dg.MaterializeResult(metadata={k: metadata_value(v) for k, v in facts.items()})
