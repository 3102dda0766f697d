"""Asset: the trained model."""

from typing import Any

import dagster as dg

from replay_pipeline.assets.metadata import curve
from replay_pipeline.assets.partitions import GROUP, OWNERS
from replay_pipeline.assets.reporting import effort
from replay_pipeline.pipeline import Pipeline, Receipt
from replay_pipeline.resources import PipelineResource
from replay_pipeline.types import Progress


@dg.asset(
    deps=["published_dataset"],
    group_name=GROUP,
    owners=OWNERS,
    kinds={"pytorch", "huggingface"},
    tags={"stage": "train"},
    pool="training",
)
def trained_model(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """A model trained on the dataset with three channels: policy + α·SDPO + β·replay."""
    n_seen = 0

    def observe(progress: Progress) -> None:
        nonlocal n_seen
        if progress.n_done > n_seen:
            n_seen = progress.n_done
            context.log_event(
                dg.AssetObservation(context.asset_key, metadata={"steps_so_far": n_seen})
            )

    work = pipeline.open(observe)
    receipt = work.train()
    return dg.MaterializeResult(metadata={**model_facts(work, receipt), **effort(receipt)})


def model_facts(pipeline: Pipeline, receipt: Receipt) -> dict[str, Any]:
    """Losses, live channels and the evaluation on held-out sessions."""
    report = receipt.report
    evaluation = {key: report[key] for key in sorted(report) if key.startswith("preference_")}
    return {
        "dagster/uri": str(pipeline.settings.model_dir().absolute()),
        "loss_first": report["loss_first"],
        "loss_last": report["loss_last"],
        "steps": report["steps"],
        "channels": ", ".join(report["channels_live"]),
        "loss": curve("Loss by step", report.get("losses", [])),
        **evaluation,
    }
