"""The budget of the asset that asks teachers, and its report of the spending."""

from collections.abc import Iterator

import dagster as dg
from pydantic import Field

from replay_pipeline.assets.reporting import LiveCurves, each_batch
from replay_pipeline.orchestration.resources import PipelineResource
from replay_pipeline.stages.chain import stage_named
from replay_pipeline.types import Progress


class ReplayConfig(dg.Config):
    """The budget of this run."""

    max_total_usd: float | None = Field(
        default=None,
        description="Ceiling for all batches of this run, in US dollars; empty: the setting.",
    )
    night: str | None = Field(
        default=None,
        pattern=r"^\d{4}-\d{2}-\d{2}$",
        description="Date of the night whose money this run spends, as all of that night's do.",
    )
    shared_with: list[str] = Field(
        default_factory=list,
        description="Batches of that night's other runs: this one leaves them their share.",
    )


def ask_in_run(
    context: dg.AssetExecutionContext, config: ReplayConfig, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """Ask the teachers under one ceiling for the run."""
    live = LiveCurves(context)

    def observe(progress: Progress) -> None:
        live.show({"answers_so_far": progress.n_done, "usd_so_far": progress.cost_usd or 0.0})

    work = pipeline.open(observe)
    ask = work.replay_within(
        config.max_total_usd,
        night=config.night,
        batches=sorted(context.partition_keys),
        shared_with=config.shared_with,
    )
    yield from each_batch(context, work, stage_named("replay"), ask)
