"""Assets: preference pairs, raw and normalized."""

from typing import Any

import dagster as dg

from replay_pipeline.assets.metadata import bars, column_schema, markdown_table
from replay_pipeline.assets.partitions import GROUP, ONE_RUN, OWNERS, trace_batch
from replay_pipeline.assets.reporting import each_batch
from replay_pipeline.pipeline import Pipeline, Receipt
from replay_pipeline.resources import PipelineResource

_N_SAMPLES = 3


@dg.asset(
    deps=["trace_states", "teacher_actions"],
    partitions_def=trace_batch,
    backfill_policy=ONE_RUN,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"python", "parquet"},
    tags={"stage": "pairs"},
    metadata={"dagster/column_schema": column_schema("dpo_pairs")},
)
def dpo_pairs(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """States at which enough teachers agreed on something that the student did not do."""
    work = pipeline.open()
    return each_batch(context, work, work.pairs, pair_facts)


@dg.asset(
    deps=["dpo_pairs"],
    partitions_def=trace_batch,
    backfill_policy=ONE_RUN,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"python", "parquet"},
    tags={"stage": "normalize"},
    metadata={"dagster/column_schema": column_schema("normalized_pairs")},
)
def normalized_pairs(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """The pairs that pass the data-juicer recipe; the others are kept apart with the reason."""
    work = pipeline.open()
    return each_batch(context, work, work.normalize, kept_facts)


def pair_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Pairs, outcomes and a few samples of a batch."""
    report = receipt.report
    n_states = sum(report["outcomes"].values())
    return {
        "dagster/partition_row_count": report["n_pairs"],
        "pair_yield": report["n_pairs"] / max(1, n_states),
        "agreements_with_student": report["n_agreement"],
        "outcomes": bars("States, by outcome", report["outcomes"]),
        "agreement": _matrix(report["matrix"]),
        "samples": _samples(pipeline, receipt.batch),
    }


def _matrix(matrix: dict[str, dict[str, dict[str, float]]]) -> dg.MarkdownMetadataValue:
    """How often each two teachers agree."""
    names = sorted(matrix)
    return markdown_table(
        [
            {"teacher": name}
            | {
                other: f"{matrix[name][other]['rate']:.0%}" if other in matrix[name] else "—"
                for other in names
            }
            for name in names
        ]
    )


def _samples(pipeline: Pipeline, batch: str) -> dg.MarkdownMetadataValue:
    columns = ("chosen", "rejected", "n_teachers_agreeing", "agreement_level")
    rows = pipeline.root.read("dpo_pairs", batch).select(columns).slice(0, _N_SAMPLES)
    return markdown_table(rows.to_pylist())


def kept_facts(_: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Pairs kept and dropped of a batch."""
    report = receipt.report
    return {
        "dagster/partition_row_count": report["n_kept"],
        "dropped": report["n_dropped"],
        "dropped_by": bars("Pairs dropped, by operator", report["dropped"]),
    }
