"""Dagster's code location: all assets, checks, jobs, schedules, and sensors; and its jobs in this process."""

import logging

import dagster as dg

from replay_pipeline.assets import automation, checks, verdicts
from replay_pipeline.assets.instance import open_instance
from replay_pipeline.assets.night import night_summary
from replay_pipeline.assets.of_stages import asset_of, claude_code_sessions
from replay_pipeline.assets.reporting import RANGE_END, RANGE_START, trace_batch
from replay_pipeline.assets.resources import (
    PipelineResource,
    console_progress,
    own_settings,
)
from replay_pipeline.errors import ConfigError
from replay_pipeline.stages import chain
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.project import OnProgress
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.staleness import declared

logger = logging.getLogger(__name__)


def define(pipeline: PipelineResource) -> dg.Definitions:
    """Define all assets, checks, jobs, schedules and sensors on one data root.

    The settings are read here, only once. If you change the hours of the night, or settings that
    decide rows, Dagster notices when it reloads the code location.

    Raises:
        ConfigError: a setting is wrong.
        StorageError: the data root is on an object store that cannot be reached.
    """
    work = pipeline.open()
    assets = [_asset(stage, work) for stage in chain.STAGES]
    return dg.Definitions(
        assets=[claude_code_sessions, *assets, night_summary, verdicts.verdicts],
        asset_checks=checks.all_checks(chain.STAGES),
        jobs=[*automation.JOBS.values(), verdicts.verdict_job],
        schedules=[automation.nightly_schedule(work.settings.night), verdicts.monthly_verdicts],
        sensors=[automation.new_sessions, automation.night_goes_on, automation.notify_failures],
        resources={"pipeline": pipeline},
        executor=dg.in_process_executor,
    )


def _asset(stage: Stage, work: Pipeline) -> dg.AssetsDefinition:
    try:
        declares = declared(stage, work.settings)
    except ConfigError as error:
        # Its stage says so when it is run; until then the other assets are to be seen.
        logger.info("%s: %s", stage.name, error)
        return asset_of(stage)
    return asset_of(stage, code_version=declares.code_version)


def run_jobs(pipeline: Pipeline, *, on_progress: OnProgress | None = None) -> None:
    """Take every batch through all assets, in this process, recorded in the data root's Dagster.

    Raises:
        ReplayPipelineError: a stage failed.
    """
    batches = pipeline.batches()
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    jobs = {
        "replay_batches": {RANGE_START: batches[0], RANGE_END: batches[-1]},
        "publish_and_train": {},
    }
    bar = console_progress.set(on_progress)
    settings = own_settings.set(pipeline.settings)
    try:
        # Under these settings: the versions of what is made here are those that others compare.
        defs = define(PipelineResource())
        with open_instance(pipeline) as instance:
            instance.add_dynamic_partitions(trace_batch.name or "", batches)
            for name, tags in jobs.items():
                defs.resolve_job_def(name).execute_in_process(
                    instance=instance, tags=tags, run_config=quiet
                )
    finally:
        console_progress.reset(bar)
        own_settings.reset(settings)
