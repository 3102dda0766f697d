"""Asset checks: what must hold of each table, and what to do when it does not."""

import dagster as dg
import polars as pl

from replay_pipeline.assets.partitions import trace_batch
from replay_pipeline.publish import newest
from replay_pipeline.resources import PipelineResource
from replay_pipeline.tables import readable

_MIN_FAITHFUL_SHARE = 0.9
_TOLERANCE = 0.1


@dg.asset_check(asset="trace_states", partitions_def=trace_batch)
def every_row_is_accounted_for(
    context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
) -> dg.AssetCheckResult:
    """Rows in = rows used + rows skipped by reason."""
    work = pipeline.open()
    lost = 0
    for batch in context.partition_keys:
        report = work.ingest(batch).report
        lost += report["rows"] - report["rows_used"] - sum(report["skipped"].values())
    return dg.AssetCheckResult(passed=lost == 0, metadata={"rows_unaccounted": lost})


@dg.asset_check(asset="trace_states", partitions_def=trace_batch)
def prefixes_are_faithful(
    context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
) -> dg.AssetCheckResult:
    """Predicted prompt tokens are within 10 % of the recorded ones for 9 of 10 states."""
    root = pipeline.open().root
    fidelity = [
        value
        for batch in context.partition_keys
        for value in root.read("states", batch)["fidelity"].to_pylist()
        if value is not None
    ]
    n_faithful = sum(abs(value - 1) < _TOLERANCE for value in fidelity)
    share = n_faithful / len(fidelity) if fidelity else 1.0
    return dg.AssetCheckResult(
        passed=share >= _MIN_FAITHFUL_SHARE,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "share_within_10_percent": share,
            "states_with_recorded_usage": len(fidelity),
            "what_to_do": "Look at the states with the lowest `fidelity`: their recorded prompt "
            "held something that the log does not, or the log was edited.",
        },
    )


@dg.asset_check(asset="teacher_actions", partitions_def=trace_batch)
def budget_is_kept(
    context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
) -> dg.AssetCheckResult:
    """No run spent more than its ceiling."""
    receipts = pipeline.open().receipts
    over = 0.0
    for batch in context.partition_keys:
        if receipt := receipts.read("replay", batch):
            over += max(0.0, receipt.report["newly_spent_usd"] - receipt.report["budget_usd"])
    return dg.AssetCheckResult(passed=over == 0.0, metadata={"usd_over_budget": over})


@dg.asset_check(asset="dpo_pairs", partitions_def=trace_batch, blocking=True)
def sides_differ(
    context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
) -> dg.AssetCheckResult:
    """Chosen and rejected are both there, and not the same."""
    root = pipeline.open().root
    bad = 0
    for batch in context.partition_keys:
        rows = root.read("dpo_pairs", batch).select(["chosen", "rejected"]).to_pylist()
        bad += sum(not row["chosen"] or row["chosen"] == row["rejected"] for row in rows)
    return dg.AssetCheckResult(passed=bad == 0, metadata={"bad_pairs": bad})


@dg.asset_check(asset="normalized_pairs", partitions_def=trace_batch, blocking=True)
def every_pair_is_kept_or_dropped(
    context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
) -> dg.AssetCheckResult:
    """Pairs in = pairs kept + pairs dropped with a reason."""
    root = pipeline.open().root
    lost = 0
    for batch in context.partition_keys:
        lost += root.read("dpo_pairs", batch).num_rows
        lost -= root.read("normalized_pairs", batch).num_rows
        lost -= root.read("dropped_pairs", batch).num_rows
    return dg.AssetCheckResult(passed=lost == 0, metadata={"pairs_unaccounted": lost})


@dg.asset_check(asset="published_dataset")
def splits_share_no_session(pipeline: PipelineResource) -> dg.AssetCheckResult:
    """No session is in both the train and the test split."""
    place = pipeline.open().settings.dataset_dir()
    folder = newest(place) or place
    sessions = {
        split: _sessions_of(sorted((folder / "data").glob(f"**/{split}/**/*.parquet")))
        for split in ("train", "test")
    }
    shared = sessions["train"] & sessions["test"]
    return dg.AssetCheckResult(passed=not shared, metadata={"shared_sessions": len(shared)})


def _sessions_of(paths: list) -> set[str]:
    return {
        session
        for path in paths
        for session in pl.read_parquet(
            readable(path), columns=["session_id"], hive_partitioning=False
        )["session_id"]
    }
