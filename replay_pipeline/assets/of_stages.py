"""Make the asset of each stage from the stage's own description."""

import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from replay_pipeline.assets.reporting import (
    GROUP,
    IN_EVERY_RUN,
    OWNERS,
    LiveCurves,
    column_schema,
    each_batch,
    trace_batch,
    tried_again,
    whole_result,
)
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.publish import column_words, layout
from replay_pipeline.replay import spent_since
from replay_pipeline.stages import engine
from replay_pipeline.stages.chain import stage_named, upstream
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.work.trainer_process import run_trainer
from replay_pipeline.storage.schemas import TABLES, describe
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


def ask_in_run(
    context: dg.AssetExecutionContext, config: ReplayConfig, pipeline: PipelineResource
) -> Iterator[dg.MaterializeResult]:
    """Ask the teachers under one ceiling for the run."""
    live = LiveCurves(context)

    def observe(progress: Progress) -> None:
        live.show({"answers_so_far": progress.n_done, "usd_so_far": progress.cost_usd or 0.0})

    work = pipeline.open(observe)
    max_total_usd = config.max_total_usd
    if config.night is None and (root := context.run.root_run_id):
        # Its process died and Dagster runs it again: the ceiling is for all attempts together.
        record = context.instance.get_run_record_by_id(root)
        since = record.create_timestamp if record else datetime.now(UTC)
        ceiling = work.settings.replay.max_total_usd if max_total_usd is None else max_total_usd
        spent_usd = spent_since(work.settings.ledger_url(), since, kind="run:")
        max_total_usd = max(0.0, ceiling - spent_usd)
    ask = work.replay_within(
        max_total_usd,
        night=config.night,
        batches=sorted(context.partition_keys),
    )
    yield from each_batch(context, work, stage_named("replay"), ask)


def train_in_run(
    context: dg.AssetExecutionContext, pipeline: PipelineResource
) -> dg.MaterializeResult:
    """Train, and draw the metrics while it runs."""
    work, live = pipeline.open(), LiveCurves(context)
    newest: dict[str, float] = {}

    def hear(numbers: dict[str, float]) -> None:
        newest.update(numbers)
        live.show(newest)

    receipt = work.train(launch=partial(run_trainer, on_metrics=hear))
    live.show(newest, is_last=True)
    return whole_result(work, stage_named("train"), receipt)


claude_code_sessions = dg.AssetSpec(
    "claude_code_sessions",
    description="Session logs of Claude Code, as they lie on disk. The sensor `new_sessions` "
    "watches them and adds a partition for each batch of new or grown files.",
    group_name=GROUP,
    owners=OWNERS,
    kinds={"claude", "json"},
    partitions_def=trace_batch,
)


def asset_of(stage: Stage, *, code_version: str | None = None) -> dg.AssetsDefinition:
    """Return the asset of a stage, with one partition per trace batch if it works batch by batch.

    A backfill of many batches is one run. Each batch is reported when it finishes.
    """
    told_more = {"replay": ask_in_run, "train": train_in_run}
    run = told_more.get(stage.name) or _run_of(stage)
    columns = _columns(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # what a backfill of many batches is
        return dg.asset(
            name=stage.asset,
            description=stage.about,
            deps=_deps(stage),
            code_version=code_version,
            partitions_def=trace_batch if stage.is_by_batch else None,
            backfill_policy=dg.BackfillPolicy.single_run() if stage.is_by_batch else None,
            group_name=GROUP,
            owners=OWNERS,
            kinds={"python", "parquet"} if stage.is_by_batch else {"huggingface"},
            tags={
                "stage": stage.name,
                **({"costs": "money"} if stage.pays else {}),
                **(IN_EVERY_RUN if stage.is_by_batch else {}),
            },
            pool="teachers" if stage.pays else "training" if stage.name == "train" else None,
            metadata={"dagster/column_schema": columns} if columns else {},
        )(run)


def _run_of(stage: Stage) -> Any:
    def by_batch(
        context: dg.AssetExecutionContext, pipeline: PipelineResource
    ) -> Iterator[dg.MaterializeResult]:
        work = pipeline.open()
        yield from each_batch(context, work, stage, partial(engine.do, stage, work))

    def whole(pipeline: PipelineResource) -> dg.MaterializeResult:
        with tried_again():
            work = pipeline.open()
            receipt = engine.do(stage, work)
        return whole_result(work, stage, receipt)

    return by_batch if stage.is_by_batch else whole


def _deps(stage: Stage) -> list[Any]:
    """Return the assets before a stage; one that reads no table reads sessions."""
    if stage.is_by_batch:
        return [each.asset for each in upstream(stage)] or [claude_code_sessions]
    return [
        dg.AssetDep(each.asset, partition_mapping=dg.AllPartitionMapping())
        if each.is_by_batch
        else each.asset
        for each in upstream(stage)
    ]


def _columns(stage: Stage) -> dg.TableSchema | None:
    if stage.asset == "published_dataset":
        return column_schema(layout.PAIRS, column_words)
    if not stage.writes:
        return None
    return column_schema(TABLES[stage.writes[0]], partial(describe, stage.writes[0]))
