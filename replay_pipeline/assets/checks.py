"""Asset checks: the conditions on each table, and what to do when one fails.

If a blocking check fails, the run stops before the next table. Publishing checks every batch again,
so that no check can be bypassed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import dagster as dg

from replay_pipeline.assets.automation import RANGE_END, RANGE_START
from replay_pipeline.assets.reporting import trace_batch
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.publish import newest
from replay_pipeline.stages.audit import AuditResult, dataset
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.train import MODEL_CHECKS
from replay_pipeline.storage.store import Place
from replay_pipeline.storage.tables import DataRoot

_ONE = "dagster/partition"

Look = Callable[[dg.AssetCheckExecutionContext, Pipeline], AuditResult]


def check(
    asset: str, name: str, look: Look, *, asks: Callable[..., AuditResult], blocking: bool = False
) -> dg.AssetChecksDefinition:
    """Return the check of an asset. The docstring of `asks` is the question that people see."""

    def run(
        context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
    ) -> dg.AssetCheckResult:
        return as_result(look(context, pipeline.open()))

    question = (asks.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return dg.asset_check(asset=asset, name=name, blocking=blocking, description=question)(run)


def of_batches(look: Callable[[DataRoot, Sequence[str]], AuditResult]) -> Look:
    """Look at a run's batches, or at all batches if the check is executed alone.

    The check has no partitions. Dagster gives a partitioned check only one result per run. If the
    run has several partitions, that result belongs to none of them, and Dagster shows the check as
    skipped.
    """
    return lambda context, work: look(work.root, batches_of(context, work))


def of_dataset(look: Callable[[Place], AuditResult]) -> Look:
    """Look at the newest version of the published dataset."""
    return lambda _, work: look(newest(place := work.settings.dataset_dir()) or place)


def batches_of(context: dg.AssetCheckExecutionContext, work: Pipeline) -> list[str]:
    """Return the batches of the run in order, or all batches if the run has none."""
    tags = context.run.tags
    if _ONE in tags:
        return [tags[_ONE]]
    if RANGE_START not in tags:
        return work.batches()
    keys = list(context.instance.get_dynamic_partitions(trace_batch.name or ""))
    first, last = (keys.index(tags[end]) for end in (RANGE_START, RANGE_END))
    return sorted(keys[first : last + 1])


def as_result(verdict: AuditResult) -> dg.AssetCheckResult:
    """Return a check result for Dagster. Its message names the problem and the remedy."""
    severity = dg.AssetCheckSeverity.WARN if verdict.is_warning else dg.AssetCheckSeverity.ERROR
    # As text: of every number Dagster draws a plot.
    looked_at = {} if verdict.judged is None else {"looked at": f"{verdict.judged:,}"}
    return dg.AssetCheckResult(
        passed=verdict.holds,
        severity=severity,
        description=verdict.message() or None,
        metadata={**verdict.facts, **looked_at},
    )


def all_checks(stages: Sequence[Stage]) -> list[dg.AssetChecksDefinition]:
    """Return every check of these stages, asset by asset. Nothing is downstream of the model, so none of its checks blocks."""
    found = [
        check(stage.asset, c.name, of_batches(c.look), asks=c.look, blocking=c.is_blocking)
        for stage in stages
        if stage.is_by_batch
        for c in stage.checks
    ]
    found += [
        check("published_dataset", name, of_dataset(look), asks=look, blocking=True)
        for name, look in dataset.BLOCKING.items()
    ]
    decides = dataset.prompts_decide
    found.append(check("published_dataset", "prompts_decide", of_dataset(decides), asks=decides))
    for name, look in MODEL_CHECKS.items():
        of_model = partial(lambda look, _, work: look(work.settings.model_dir()), look)
        found.append(check("trained_model", name, of_model, asks=look))
    return found
