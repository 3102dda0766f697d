"""Assets: preference pairs, raw and normalized."""

from collections.abc import Iterator
from difflib import unified_diff
from typing import Any

import dagster as dg

from replay_pipeline.assets.lineage import column_lineage
from replay_pipeline.assets.metadata import code_block, inert, markdown_table
from replay_pipeline.assets.partitions import batch_asset
from replay_pipeline.assets.pictures import bars
from replay_pipeline.assets.reporting import each_batch
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.review import last_request, readable
from replay_pipeline.stages.pipeline import Pipeline, Receipt
from replay_pipeline.types import DPOPair

_N_SAMPLES = 3


@batch_asset(deps=["trace_states", "teacher_actions"], stage="pairs")
def dpo_pairs(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """States at which enough teachers agreed on something that the student did not do."""
    work = pipeline.open()
    yield from each_batch(context, work, work.pairs, pair_facts)


@batch_asset(deps=["dpo_pairs", "samples"], stage="normalize")
def normalized_pairs(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """The pairs that pass the data-juicer recipe; the others are kept apart with the reason."""
    work = pipeline.open()
    yield from each_batch(context, work, work.normalize, kept_facts)


def pair_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Pairs, outcomes, what a pair costs, and a few samples of a batch."""
    report = receipt.report
    n_states = sum(report["outcomes"].values())
    usd = sum(tally["cost_usd"] for tally in report["teachers"].values())
    n_judged = report["n_consensus"] + report["outcomes"].get("no_consensus", 0)
    return {
        "dagster/partition_row_count": report["n_pairs"],
        "pair_yield": report["n_pairs"] / max(1, n_states),
        "usd_per_pair": usd / max(1, report["n_pairs"]),
        "consensus_rate": report["n_consensus"] / max(1, n_judged),
        "agreements_with_student": report["n_agreement"],
        "rejected_in_review": report["n_rejected_in_review"],
        "outcomes": bars(report["outcomes"]),
        "sources": bars(report["pairs_by_source"]),
        "agreement": _matrix(report["matrix"]),
        "agreement_by_level": markdown_table(
            [
                {"level": level} | {name: f"{share:.0%}" for name, share in figures.items()}
                for level, figures in report["agreement"].items()
            ]
        ),
        **_samples(pipeline, receipt.batch),
        "review_page": dg.MetadataValue.path(str(pipeline.review_path(receipt.batch))),
        **column_lineage("dpo_pairs"),
    }


def _matrix(matrix: dict[str, dict[str, dict[str, float]]]) -> dg.MarkdownMetadataValue:
    """How often each two teachers agree."""
    names = sorted(matrix)
    return markdown_table(
        [
            {"teacher": name}
            | {
                other: f"{matrix[name][other]['rate']:.0%} of {matrix[name][other]['n']}"
                if other in matrix[name]
                else "—"
                for other in names
            }
            for name in names
        ]
    )


def _samples(pipeline: Pipeline, batch: str) -> dict[str, dg.MarkdownMetadataValue]:
    pairs = pipeline.sample_pairs(batch, _N_SAMPLES)
    return {f"sample {n}": dg.MetadataValue.md(_sample(pair)) for n, pair in enumerate(pairs, 1)}


def _sample(pair: DPOPair) -> str:
    """What was asked, and the difference between what the student did and the teachers would do."""
    rejected = readable(pair.get("rejected_action"), pair["rejected"]).split("\n")
    chosen = readable(pair.get("chosen_action"), pair["chosen"]).split("\n")
    diff = unified_diff(rejected, chosen, "rejected", "chosen", n=99, lineterm="")
    by = ", ".join(pair.get("teachers_agreeing") or ()) or pair.get("source", "")
    return (
        f"**{inert(pair['state_id'])}** · {inert(by)} · {inert(pair.get('agreement_level') or '—')}"
        f"\n\n> {inert(last_request(pair.get('state_messages', [])))}"
        f"\n\n{code_block(chr(10).join(diff), 'diff')}"
    )


def kept_facts(_: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Pairs kept and dropped of a batch, and by what."""
    report = receipt.report
    return {
        "dagster/partition_row_count": report["n_kept"],
        "dropped": report["n_dropped"],
        "drop_rate": report["n_dropped"] / max(1, report["n_in"]),
        **{f"dropped {name}": n for name, n in sorted(report["dropped"].items())},
        "dropped_by": bars(report["dropped"]),
        "recipe": f"{report['recipe']} ({report['recipe_sha']})",
        **column_lineage("normalized_pairs"),
    }
