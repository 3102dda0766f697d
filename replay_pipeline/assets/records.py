"""Show in Dagster what the files say, including work that was done without Dagster."""

from datetime import datetime
from itertools import groupby

import dagster as dg

from replay_pipeline.assets.instance import open_instance
from replay_pipeline.assets.of_stages import asset_of
from replay_pipeline.assets.reporting import Provenance, as_metadata, trace_batch
from replay_pipeline.stages import chain
from replay_pipeline.stages.pipeline import Pipeline

_MAX_EVENTS_READ = 500


def sync(pipeline: Pipeline, *, runs_are_here: bool = False) -> int:
    """Show in Dagster the batches and stages that were done without it.

    The files are the truth, and Dagster's database is a view of them. This rebuilds the view, even
    after Dagster's home was lost. Returns the number of added materializations.

    Raises:
        StorageError: Dagster's home cannot be written.
    """
    with open_instance(pipeline, runs_are_here=runs_are_here) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", pipeline.batches())
        stages = {stage.name: stage for stage in chain.STAGES}
        order = list(stages)
        receipts = [r for r in pipeline.receipts.all() if r.stage in stages]
        receipts.sort(key=lambda receipt: order.index(receipt.stage))
        shown = {
            name: _shown_at(instance, dg.AssetKey(stages[name].asset))
            for name in {r.stage for r in receipts}
        }
        # The last materialization is of a receipt if it isn't older: it is logged right after it.
        missing = [
            r
            for r in receipts
            if datetime.fromisoformat(r.at).timestamp()
            > shown[r.stage].get(None if r.batch == "all" else r.batch, 0.0)
        ]
        # In the order of the stages, so that each finds the records of what it was made of.
        for name, of_stage in groupby(missing, key=lambda receipt: receipt.stage):
            stage = stages[name]
            provenance = Provenance(instance, asset_of(stage).get_asset_spec())
            for receipt in of_stage:
                instance.report_runless_asset_event(
                    dg.AssetMaterialization(
                        stage.asset,
                        partition=None if receipt.batch == "all" else receipt.batch,
                        metadata=as_metadata(pipeline, stage, receipt),
                        tags=provenance.of(receipt, code_version=receipt.code_version),
                    )
                )
    return len(missing)


def _shown_at(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str | None, float]:
    """Return when each partition (or, under `None`, the whole asset) was last materialized."""
    last = instance.get_latest_materialization_event(key)
    if last is None:
        return {}
    shown: dict[str | None, float] = {None: last.timestamp}
    ids = list(
        instance.event_log_storage.get_latest_storage_id_by_partition(
            key, dg.DagsterEventType.ASSET_MATERIALIZATION
        ).values()
    )
    for start in range(0, len(ids), _MAX_EVENTS_READ):
        chunk = ids[start : start + _MAX_EVENTS_READ]
        wanted = dg.AssetRecordsFilter(asset_key=key, storage_ids=chunk)
        for record in instance.fetch_materializations(wanted, limit=len(chunk)).records:
            shown[record.partition_key] = record.timestamp
    return shown
