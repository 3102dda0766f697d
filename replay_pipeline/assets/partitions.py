"""The unit of work: a trace batch, one Dagster partition each."""

import warnings

import dagster as dg

for _category in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=_category)

trace_batch = dg.DynamicPartitionsDefinition(name="trace_batch")
"""The partitions. The sensor `new_sessions` adds one key per batch manifest."""

GROUP = "replay_pipeline"
OWNERS = ["team:replay-pipeline"]

RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
"""Tags of a run that takes a contiguous range of batches."""

IN_EVERY_RUN = {"run": "every"}
"""Tag of the assets that a run includes by default."""
