"""The unit of work: a trace batch, one Dagster partition each."""

import warnings

import dagster as dg

for _category in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=_category)

trace_batch = dg.DynamicPartitionsDefinition(name="trace_batch")
"""Keys are added by the sensor `new_sessions`, one per batch manifest."""

GROUP = "replay_pipeline"
OWNERS = ["team:replay-pipeline"]

RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
"""Tags of a run that takes all batches from one to another."""

IN_EVERY_RUN = {"run": "every"}
"""Tag of the assets that a run takes every batch through, by default settings."""
