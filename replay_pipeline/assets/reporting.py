"""How an asset walks its batches and reports each one as it finishes, and while it works."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from replay_pipeline.stages.pipeline import Pipeline, Receipt

_OBSERVED_EVERY_S = 3.0

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
    the finished ones green. One at which nothing was to do is recorded at the end.
    """
    done: dict[str, dict[str, Any]] = {}
    order = {key: i for i, key in enumerate(pipeline.batches())}
    batches = sorted(context.partition_keys, key=lambda key: (order.get(key, len(order)), key))
    for i, batch in enumerate(batches):
        receipt = work(batch)
        metadata = done[batch] = as_metadata(pipeline, receipt, facts)
        if i < len(batches) - 1 and not receipt.is_reused:
            context.log_event(
                dg.AssetMaterialization(context.asset_key, partition=batch, metadata=metadata)
            )
    _add_metadata(context, done)
    return dg.MaterializeResult()


def _add_metadata(
    context: dg.AssetExecutionContext, by_batch: Mapping[str, Mapping[str, Any]]
) -> None:
    """`context.add_asset_metadata` for many partitions, which looks all of them up for each one."""
    step = context.get_step_execution_context()
    known = getattr(step, "_metadata_accumulator", None)
    if known is None:
        for batch, metadata in by_batch.items():
            context.add_asset_metadata(metadata, partition_key=batch)
        return
    for batch, metadata in by_batch.items():
        known = known.with_additional_asset_metadata(
            asset_key=context.asset_key, metadata=metadata, partition_key=batch
        )
    step._metadata_accumulator = known


def as_metadata(pipeline: Pipeline, receipt: Receipt, facts: Facts) -> dict[str, Any]:
    """The facts of a receipt, with how long the stage took and whether there was anything to do."""
    metadata = {**facts(pipeline, receipt), "seconds": receipt.seconds, "reused": receipt.is_reused}
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in metadata.items()
    }


class LiveCurves:
    """Draws numbers in the asset's plots while its step works, a point every few seconds."""

    def __init__(
        self, context: dg.AssetExecutionContext, *, every_s: float = _OBSERVED_EVERY_S
    ) -> None:
        self._context, self._every_s = context, every_s
        self._seen: dict[str, float] = {}
        self._next_s = time.monotonic() + every_s

    def show(self, numbers: Mapping[str, float], *, is_last: bool = False) -> None:
        """Record `numbers`, unless nothing changed or the last point is too young.

        Must be called in the thread of the step, whose event log it writes.
        """
        now_s = time.monotonic()
        if dict(numbers) == self._seen or not numbers or (now_s < self._next_s and not is_last):
            return
        self._seen, self._next_s = dict(numbers), now_s + self._every_s
        self._context.log_event(
            dg.AssetObservation(self._context.asset_key, metadata=dict(numbers))
        )
