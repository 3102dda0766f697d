"""The unit of work: a trace batch, one Dagster partition each."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dagster as dg

from replay_pipeline.assets.lineage import TABLE_OF
from replay_pipeline.assets.metadata import column_schema

for _category in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=_category)

trace_batch = dg.DynamicPartitionsDefinition(name="trace_batch")
"""Keys are added by the sensor `new_sessions`, one per batch manifest."""

GROUP = "replay_pipeline"
OWNERS = ["team:replay-pipeline"]

RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
"""Tags of a run that takes all batches from one to another."""


def batch_asset(
    *, deps: Sequence[Any], stage: str, pool: str | None = None, **tags: str
) -> Callable[[Callable[..., Iterator[dg.MaterializeResult]]], dg.AssetsDefinition]:
    """An asset with one partition per trace batch and a table of its own.

    A backfill of many batches is one run; each batch is reported by itself as it finishes.
    """

    def made(function: Callable[..., Iterator[dg.MaterializeResult]]) -> dg.AssetsDefinition:
        return dg.asset(
            deps=deps,
            partitions_def=trace_batch,
            backfill_policy=dg.BackfillPolicy.single_run(),
            group_name=GROUP,
            owners=OWNERS,
            kinds={"python", "parquet"},
            tags={"stage": stage, **tags},
            pool=pool,
            metadata={"dagster/column_schema": column_schema(TABLE_OF[function.__name__])},
        )(function)

    return made
