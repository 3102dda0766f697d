"""Asset: teacher actions. The one that spends money."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from replay_pipeline.assets.lineage import column_lineage
from replay_pipeline.assets.metadata import markdown_table
from replay_pipeline.assets.partitions import batch_asset
from replay_pipeline.assets.pictures import bars, histogram, quantile
from replay_pipeline.assets.reporting import LiveCurves, each_batch
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.pipeline import Pipeline, Receipt
from replay_pipeline.types import Progress


class ReplayConfig(dg.Config):
    """What this run may spend."""

    max_total_usd: float | None = Field(
        default=None,
        description="Ceiling for all batches of this run, in US dollars; empty: the setting.",
    )
    night: str | None = Field(
        default=None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="Date of the night whose money this run spends, as all of that night's do.",
    )


@batch_asset(deps=["trace_states"], stage="replay", pool="teachers", costs="money")
def teacher_actions(
    context: dg.AssetExecutionContext, config: ReplayConfig, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """What each teacher would have done at each state, bought under a hard ceiling.

    Every paid answer is in the ledger before it counts: stopping or killing this step loses none,
    and running it again asks only what was not answered.
    """
    live = LiveCurves(context)

    def observe(progress: Progress) -> None:
        live.show({"answers_so_far": progress.n_done, "usd_so_far": progress.cost_usd or 0.0})

    work = pipeline.open(observe)
    replay = work.replay_within(config.max_total_usd, night=config.night)
    yield from each_batch(context, work, replay, answer_facts, is_free=False)


@batch_asset(deps=["dpo_pairs"], stage="sample", pool="teachers", costs="money")
def samples(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """What the model to be trained does where the teachers agree, and the pairs that this makes.

    Run by hand, or by the job `sample_trainee`: it needs a trainee in the settings.
    """
    work = pipeline.open()
    yield from each_batch(context, work, work.sample, sample_facts, is_free=False)


def sample_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """How often the samples of a batch agree with the teachers, and what they came to."""
    report = receipt.report
    return {
        **answer_facts(pipeline, receipt),
        "agreement_rate": report["agreement_rate"],
        "sampled_pairs": report["n_pairs"],
        "sampled_positives": report["n_positives"],
        "repeated": report["n_repeated"],
        "outcomes": bars(report["outcomes"]),
        **column_lineage("samples"),
    }


def answer_facts(_: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Calls, dollars, latencies and failures of a batch."""
    report = receipt.report
    latencies = sorted(report["latency_s"])
    marks = {name: quantile(latencies, share) for name, share in (("p50", 0.5), ("p95", 0.95))}
    by_teacher = report["cost_by_teacher_usd"]
    return {
        "dagster/partition_row_count": report["n_answers"] + report["n_failed"],
        **({"made up in a rehearsal": n} if (n := report.get("n_rehearsed")) else {}),
        "calls_sent": 0 if receipt.is_reused else report["n_sent"],
        "usd": report["spent_usd"],
        "usd_budget": report["max_total_usd"],
        "usd_per_answer": report["spent_usd"] / max(1, report["n_answers"]),
        **{f"usd {teacher}": usd for teacher, usd in sorted(by_teacher.items())},
        "failed_calls": report["n_failed"],
        **{f"latency_s_{name}": value for name, value in marks.items()},
        "stop_reason": report["stop_reason"],
        "cost_by_teacher": bars(by_teacher),
        "latency": histogram("seconds to the answer", latencies, marks=marks, unit=" s"),
        "tokens": markdown_table([report["tokens"]]),
        "errors": bars(report["errors"]),
        "not_asked": bars(report["skipped"]),
        **column_lineage("teacher_actions"),
    }
