"""The automation: a sensor for new sessions, a nightly replay, and jobs that you start by hand."""

from itertools import pairwise
from zoneinfo import ZoneInfo

import dagster as dg

from replay_pipeline.assets.dead_runs import reconcile
from replay_pipeline.assets.night import WILL_RETRY, failure_facts
from replay_pipeline.assets.reporting import IN_EVERY_RUN, RANGE_END, RANGE_START, trace_batch
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.settings import NightSettings
from replay_pipeline.stages.budget.spending import completed_batches, fitting
from replay_pipeline.stages.views.webhook import notify

_MAX_BATCHES_PER_RUN = 200
_PAIRS = dg.AssetKey("normalized_pairs")

_MAX_RUNTIME_S = {"publish": 6 * 3600, "summarize_night": 3600}
"""When Dagster ends a run that hangs. What buys or trains goes on for as long as it takes."""

JOBS = {
    name: dg.define_asset_job(
        name,
        selection=selection,
        description=text,
        tags={"dagster/max_runtime": str(_MAX_RUNTIME_S[name])} if name in _MAX_RUNTIME_S else None,
    )
    for name, selection, text in (
        (
            "replay_batches",
            dg.AssetSelection.tag(*next(iter(IN_EVERY_RUN.items()))),
            "Trace states to normalized pairs, by batch.",
        ),
        (
            "publish",
            dg.AssetSelection.assets("published_dataset"),
            "Publish all normalized pairs.",
        ),
        (
            "publish_and_train",
            dg.AssetSelection.assets("published_dataset", "trained_model"),
            "Publish all normalized pairs and train on them.",
        ),
        (
            "summarize_night",
            dg.AssetSelection.assets("night_summary"),
            "Say what was done since the last summary.",
        ),
    )
}
"""The jobs by name. Each brings some assets up to date."""


@dg.sensor(
    job=JOBS["replay_batches"],
    minimum_interval_seconds=60,
    description="Finds new and grown session files and adds a partition for each batch of them.",
)
def new_sessions(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource
) -> dg.SensorResult | dg.SkipReason:
    """Add partitions for new sessions. Nothing is paid until a run asks for it."""
    work = pipeline.open()
    work.find_batches(settle_s=work.settings.ingest.settle_s)
    known = set(context.instance.get_dynamic_partitions(trace_batch.name or ""))
    new = [key for key in work.batches() if key not in known]
    if not new:
        return dg.SkipReason("no new session bytes")
    # Dagster calls every tick without a run skipped: its reason says what was done.
    return dg.SensorResult(
        dynamic_partitions_requests=[trace_batch.build_add_request(new)],
        skip_reason=f"{len(new)} new batches added; nothing is paid until a run asks for them",
    )


def nightly_replay(
    context: dg.ScheduleEvaluationContext, pipeline: PipelineResource
) -> list[dg.RunRequest] | dg.SkipReason:
    """Return one run for each range of unfinished batches that tonight's budget probably covers.

    The runs share the budget of the night, which the ledger keeps under its date. Batches beyond the
    budget wait for tomorrow. Dead runs are ended first,
    so that none of them blocks the paid step.
    """
    reconcile(context.instance)
    keys = list(context.instance.get_dynamic_partitions(trace_batch.name or ""))
    work = pipeline.open()
    if work.settings.replay.max_nightly_usd <= 0:
        return dg.SkipReason("the nightly budget is 0")
    done = context.instance.get_materialized_partitions(_PAIRS)
    done &= completed_batches(work)
    missing = [key for key in keys if key not in done]
    planned = fitting(work, missing, max_total_usd=work.settings.replay.max_nightly_usd)
    ranges = missing_ranges(keys, set(keys) - set(planned), max_batches=_MAX_BATCHES_PER_RUN)
    if not ranges:
        return dg.SkipReason("every batch is replayed")
    context.log.info("%d of %d missing batches are planned", len(planned), len(missing))
    tick = context.scheduled_execution_time
    night = f"{tick.astimezone(ZoneInfo(work.settings.night.time_zone)):%Y-%m-%d}"
    return [
        dg.RunRequest(
            run_key=f"{tick.isoformat()}:{first}",
            tags={RANGE_START: first, RANGE_END: last},
            run_config=dg.RunConfig(ops={"teacher_actions": {"config": {"night": night}}}),
        )
        for first, last in ranges
    ]


def nightly_schedule(night: NightSettings) -> dg.ScheduleDefinition:
    """Schedule the nightly replay. Its publication and its summary follow by themselves."""
    hour, minute = map(int, night.replays_at.split(":"))
    return dg.schedule(
        job=JOBS["replay_batches"],
        cron_schedule=f"{minute} {hour} * * *",
        execution_timezone=night.time_zone,
        description="Replays the batches that are not yet normalized, within the nightly budget.",
    )(nightly_replay)


_FOLLOWS = ("publish", "summarize_night")
"""The jobs that follow the replays of a night, one after the other."""


@dg.sensor(
    jobs=[JOBS[job] for job in _FOLLOWS],
    minimum_interval_seconds=30,
    description="Publishes when the replays of the night have ended, and sums up after that.",
)
def night_goes_on(context: dg.SensorEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
    """Start the next job of a night when those before it have ended, even if they failed.

    If a replay fails, the batches before it are done, so they are published anyway. If no batch ever
    was, there is nothing to publish, and the replay's failure is the only one to tell.
    """
    replays = _runs(context.instance, {_SCHEDULE_NAME: "nightly_replay"})
    if not replays:
        return dg.SkipReason("no night has begun")
    # All runs of a night together, by the one that was asked for last.
    if not all(map(_has_ended, replays)):
        return dg.SkipReason("the replays of the night go on")
    before = replays[0].run_id
    for job in _FOLLOWS:
        key = f"{job}:{before}"
        done = _runs(context.instance, {_RUN_KEY: key})
        if not done:
            if job == "publish" and not context.instance.get_materialized_partitions(_PAIRS):
                continue
            return [dg.RunRequest(run_key=key, job_name=job)]
        if not _has_ended(done[0]):
            break
    return dg.SkipReason("nothing waits for what has ended")


_SCHEDULE_NAME, _RUN_KEY = "dagster/schedule_name", "dagster/run_key"
_MAX_RUNS_OF_NIGHT = 100


def _has_ended(run: dg.DagsterRun) -> bool:
    return run.is_finished and not run.is_complete_and_waiting_to_retry


def _runs(instance: dg.DagsterInstance, tags: dict[str, str]) -> list[dg.DagsterRun]:
    """Return the runs with these tags, the newest first."""
    return list(instance.get_runs(dg.RunsFilter(tags=tags), limit=_MAX_RUNS_OF_NIGHT))


@dg.run_failure_sensor(
    name="notify_failures",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Tells the webhook of the settings, if there is one, that a run has failed and why.",
)
def notify_failures(context: dg.RunFailureSensorContext, pipeline: PipelineResource) -> None:
    """Report failed runs to the webhook. If it can't be reached, the error is only logged."""
    run = context.instance.get_run_by_id(context.dagster_run.run_id)
    if run is not None and run.tags.get(WILL_RETRY) == "true":
        return
    settings = pipeline.settings()
    facts = failure_facts(context.instance, context.dagster_run, secrets=settings.secrets())
    text = f"{facts['job']} {facts['batches']} failed: {facts['why']}"
    notify(settings.notify, "run_failed", text, facts)


def missing_ranges(keys: list[str], done: set[str], *, max_batches: int) -> list[tuple[str, str]]:
    """Group the keys that aren't in `done` into contiguous ranges, as (first, last)."""
    missing = [i for i, key in enumerate(keys) if key not in done]
    ranges: list[list[int]] = []
    for before, i in pairwise([-2, *missing]):
        if i == before + 1 and i - ranges[-1][0] < max_batches:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return [(keys[first], keys[last]) for first, last in ranges]
