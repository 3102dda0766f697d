"""Asset: trace states."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from replay_pipeline.assets.partitions import GROUP, OWNERS, batch_asset, trace_batch
from replay_pipeline.assets.pictures import bars
from replay_pipeline.assets.reporting import each_batch
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.pipeline import Pipeline, Receipt

claude_code_sessions = dg.AssetSpec(
    "claude_code_sessions",
    description="Session logs of Claude Code, as they lie on disk. The sensor `new_sessions` "
    "watches them and adds a partition for each batch of new or grown files.",
    group_name=GROUP,
    owners=OWNERS,
    kinds={"claude", "json"},
    partitions_def=trace_batch,
)


@batch_asset(deps=[claude_code_sessions], stage="ingest")
def trace_states(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """Every decision point of the batch: what the student saw, did, and what came of it."""
    work = pipeline.open()
    yield from each_batch(context, work, work.ingest, state_facts)


def state_facts(_: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Sessions, turns and states of a batch, and what was skipped or replaced."""
    report = receipt.report
    return {
        "dagster/partition_row_count": report["n_states"],
        "sessions": report["n_sessions"],
        "turns": report["n_turns"],
        "rows": report["rows"],
        "rows_used": report["rows_used"],
        "redacted_values": sum(report["redactions"].values()),
        "outcomes": bars(report["outcomes"]),
        "rows_skipped": bars(report["skipped"]),
        "redactions": bars(report["redactions"]),
    }
