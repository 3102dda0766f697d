"""Everything that Dagster is told of: assets, checks, jobs, schedules and sensors."""

import dagster as dg

from replay_pipeline.assets import automation, checks, night, pairs, publish, replay, traces, train
from replay_pipeline.orchestration.resources import PipelineResource


def define(pipeline: PipelineResource) -> dg.Definitions:
    """All assets, checks, jobs, schedules and sensors on one data root."""
    return dg.Definitions(
        assets=dg.load_assets_from_modules(
            [traces, replay, pairs, publish, train, night], include_specs=True
        ),
        asset_checks=checks.CHECKS,
        jobs=[
            automation.batch_job,
            automation.dataset_job,
            automation.publish_job,
            automation.summary_job,
        ],
        schedules=[
            automation.nightly_replay,
            automation.nightly_publish,
            automation.nightly_summary,
        ],
        sensors=[automation.new_sessions, automation.notify_failures],
        resources={"pipeline": pipeline},
        executor=dg.in_process_executor,
    )
