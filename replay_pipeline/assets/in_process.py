"""Run the jobs in this process, recorded in the data root's Dagster."""

from replay_pipeline.assets import checks
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.partitions import RANGE_END, RANGE_START, trace_batch
from replay_pipeline.orchestration.instance import open_instance
from replay_pipeline.orchestration.resources import (
    PipelineResource,
    console_progress,
    own_settings,
)
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.project import OnProgress

JOBS = ("replay_batches", "publish_and_train")
"""The jobs, in the order of running: those by batch, then those on all batches."""


def run_jobs(
    pipeline: Pipeline,
    *,
    on_progress: OnProgress | None = None,
) -> None:
    """Take every batch through all assets, in this process, recorded in the data root's Dagster.

    Raises:
        ReplayPipelineError: a stage or a blocking check failed.
    """
    batches = pipeline.batches()
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    jobs: list[tuple[str, dict[str, str]]] = [
        (JOBS[0], {RANGE_START: batches[0], RANGE_END: batches[-1]}),
        (JOBS[1], {}),
    ]
    bar = console_progress.set(on_progress)
    settings = own_settings.set(pipeline.settings)
    try:
        # Under these settings: the versions of what is made here are those that others compare.
        defs = define(PipelineResource())
        with open_instance(pipeline) as instance:
            instance.add_dynamic_partitions(trace_batch.name or "", batches)
            for name, tags in jobs:
                with checks.failures_told(instance) as run_id:
                    defs.resolve_job_def(name).execute_in_process(
                        instance=instance, tags=tags, run_config=quiet, run_id=run_id
                    )
    finally:
        console_progress.reset(bar)
        own_settings.reset(settings)
