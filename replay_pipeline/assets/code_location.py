"""Everything that Dagster is told of: assets, checks, jobs, schedules and sensors."""

import dagster as dg

from replay_pipeline.assets import automation, checks, night, pairs, publish, replay, traces, train
from replay_pipeline.orchestration.resources import PipelineResource


def define(pipeline: PipelineResource) -> dg.Definitions:
    """Define all assets, checks, jobs, schedules and sensors on one data root.

    The hours of the night are read from its settings here, once: Dagster learns of others when it
    loads the code location again.

    Raises:
        ConfigError: a setting is wrong.
        StorageError: the data root is on an object store that cannot be reached.
    """
    night_settings = pipeline.settings().night
    return dg.Definitions(
        assets=dg.load_assets_from_modules(
            [traces, replay, pairs, publish, train, night], include_specs=True
        ),
        asset_checks=checks.CHECKS,
        jobs=[*automation.JOBS.values()],
        schedules=automation.nightly_schedules(night_settings),
        sensors=[
            automation.new_sessions,
            automation.night_goes_on(night_settings),
            automation.notify_failures,
        ],
        resources={"pipeline": pipeline},
        executor=dg.in_process_executor,
    )
