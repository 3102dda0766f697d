"""Everything that Dagster is told of: assets, checks, jobs, schedules and sensors."""

import logging

import dagster as dg

from replay_pipeline.assets import automation, checks, night, pairs, publish, replay, traces, train
from replay_pipeline.errors import ConfigError
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.pipeline import Pipeline

logger = logging.getLogger(__name__)


def define(pipeline: PipelineResource) -> dg.Definitions:
    """Define all assets, checks, jobs, schedules and sensors on one data root.

    Its settings are read here, once: Dagster learns of other hours of the night, and that other
    settings would make other rows, when it loads the code location again.

    Raises:
        ConfigError: a setting is wrong.
        StorageError: the data root is on an object store that cannot be reached.
    """
    work = pipeline.open()
    night_settings = work.settings.night
    return dg.Definitions(
        assets=dg.map_asset_specs(
            lambda spec: spec.replace_attributes(code_version=_code_version(work, spec)),
            dg.load_assets_from_modules(
                [traces, replay, pairs, publish, train, night], include_specs=True
            ),
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


def _code_version(work: Pipeline, spec: dg.AssetSpec) -> str | None:
    try:
        return work.code_version(spec.tags["stage"]) if "stage" in spec.tags else None
    except ConfigError as error:
        # Its stage says so when it is run; until then the other assets are to be seen.
        logger.info("%s: %s", spec.key.to_user_string(), error)
        return None
