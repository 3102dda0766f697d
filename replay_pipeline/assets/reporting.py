"""How an asset walks its batches and reports each one as it finishes."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from replay_pipeline.pipeline import Pipeline, Receipt

Facts = Callable[[Pipeline, Receipt], Mapping[str, Any]]
"""What a receipt shows in Dagster."""


def each_batch(
    context: dg.AssetExecutionContext,
    pipeline: Pipeline,
    work: Callable[[str], Receipt],
    facts: Facts,
) -> dg.MaterializeResult:
    """Do `work` for every partition of the run, in the order of the batches.

    A batch is recorded as materialized as soon as it is done, so a failure later in the run leaves
    the finished ones green.
    """
    order = {key: i for i, key in enumerate(pipeline.batches())}
    batches = sorted(context.partition_keys, key=lambda key: (order.get(key, len(order)), key))
    for i, batch in enumerate(batches):
        receipt = work(batch)
        metadata = {**facts(pipeline, receipt), **effort(receipt)}
        if i < len(batches) - 1:
            context.log_event(
                dg.AssetMaterialization(context.asset_key, partition=batch, metadata=metadata)
            )
        context.add_asset_metadata(metadata, partition_key=batch)
    return dg.MaterializeResult()


def effort(receipt: Receipt) -> dict[str, Any]:
    """How long the stage took, and whether there was anything to do."""
    return {"seconds": receipt.seconds, "reused": receipt.is_reused}
