"""Asset: teacher actions. The one that spends money."""

from typing import Any

import dagster as dg
from pydantic import Field

from replay_pipeline.assets.metadata import bars, column_schema, markdown_table
from replay_pipeline.assets.partitions import GROUP, ONE_RUN, OWNERS, trace_batch
from replay_pipeline.assets.reporting import each_batch
from replay_pipeline.pipeline import Pipeline, Receipt
from replay_pipeline.resources import PipelineResource
from replay_pipeline.types import Progress


class ReplayConfig(dg.Config):
    """What this run may spend."""

    max_total_usd: float | None = Field(
        default=None,
        description="Ceiling for all batches of this run, in US dollars; empty: the setting.",
    )


@dg.asset(
    deps=["trace_states"],
    partitions_def=trace_batch,
    backfill_policy=ONE_RUN,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"python", "parquet"},
    tags={"stage": "replay", "costs": "money"},
    pool="teachers",
    metadata={"dagster/column_schema": column_schema("teacher_actions")},
)
def teacher_actions(
    context: dg.AssetExecutionContext, config: ReplayConfig, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """What each teacher would have done at each state, bought under a hard ceiling.

    Every paid answer is in the ledger before it counts: stopping or killing this step loses none,
    and running it again asks only what was not answered.
    """
    n_seen = 0

    def observe(progress: Progress) -> None:
        nonlocal n_seen
        if progress.n_done > n_seen:
            n_seen = progress.n_done
            context.log_event(
                dg.AssetObservation(
                    context.asset_key,
                    metadata={
                        "answers_so_far": progress.n_done,
                        "usd_so_far": progress.cost_usd or 0.0,
                    },
                )
            )

    work = pipeline.open(observe)
    return each_batch(context, work, work.replay_within(config.max_total_usd), answer_facts)


def answer_facts(_: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Calls, dollars, latencies and failures of a batch."""
    report = receipt.report
    latencies = report["latency_s"] or [0.0]
    return {
        "dagster/partition_row_count": report["n_answers"] + report["n_failed"],
        "calls_sent": 0 if receipt.is_reused else report["n_sent"],
        "usd": report["spent_usd"],
        "usd_budget": report["budget_usd"],
        "failed_calls": report["n_failed"],
        "latency_s_p50": latencies[len(latencies) // 2],
        "latency_s_p95": latencies[int(len(latencies) * 0.95) - 1],
        "stop_reason": report["stop_reason"],
        "cost_by_teacher": bars("US dollars, by teacher", report["cost_by_teacher_usd"]),
        "tokens": markdown_table([report["tokens"]]),
        "errors": bars("Failed calls, by reason", report["errors"]),
        "not_asked": bars("Questions not asked, by reason", report["skipped"]),
    }
