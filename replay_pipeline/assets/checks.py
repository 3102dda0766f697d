"""Asset checks: the conditions on each table, and what to do when one fails.

If a blocking check fails, the run stops before the next table. Publishing checks every batch again,
so that no check can be bypassed.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import dagster as dg

from replay_pipeline.assets.automation import RANGE_END, RANGE_START
from replay_pipeline.assets.reporting import trace_batch
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.errors import CheckFailedError
from replay_pipeline.publish import newest
from replay_pipeline.stages.audit import AuditResult, dataset, model, tables
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.stage import Stage
from replay_pipeline.storage.store import Place
from replay_pipeline.storage.tables import DataRoot

_ONE = "dagster/partition"

OfBatches = Callable[[DataRoot, Sequence[str]], AuditResult]
OfDataset = Callable[[Place], AuditResult]


def batch_check(
    asset: str, name: str, look: OfBatches, *, blocking: bool = False
) -> dg.AssetChecksDefinition:
    """Return a check of a run's batches, or of all batches if it is executed alone.

    The check has no partitions. Dagster gives a partitioned check only one result per run. If the
    run has several partitions, that result belongs to none of them, and Dagster shows the check as
    skipped.
    """

    def check(
        context: dg.AssetCheckExecutionContext, pipeline: PipelineResource
    ) -> dg.AssetCheckResult:
        work = pipeline.open()
        return as_result(look(work.root, batches_of(context, work)))

    return dg.asset_check(
        asset=asset,
        name=name,
        blocking=blocking,
        description=_question(look),
    )(check)


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


def dataset_check(
    name: str, look: OfDataset, *, blocking: bool = False
) -> dg.AssetChecksDefinition:
    """Return a check of the whole published dataset."""

    def check(pipeline: PipelineResource) -> dg.AssetCheckResult:
        place = pipeline.open().settings.dataset_dir()
        return as_result(look(newest(place) or place))

    return dg.asset_check(
        asset="published_dataset", name=name, blocking=blocking, description=_question(look)
    )(check)


def model_check(name: str, look: OfDataset) -> dg.AssetChecksDefinition:
    """Return a check of the trained model. It blocks nothing, since nothing is downstream of the model."""

    def check(pipeline: PipelineResource) -> dg.AssetCheckResult:
        return as_result(look(pipeline.open().settings.model_dir()))

    return dg.asset_check(asset="trained_model", name=name, description=_question(look))(check)


def as_result(verdict: AuditResult) -> dg.AssetCheckResult:
    """Return a check result for Dagster. Its message names the problem and the remedy.

    Dagster has no result for a check that had nothing to judge. It is shown as a warning, which
    stops nothing.
    """
    is_warning = verdict.is_warning or not verdict.can_judge
    severity = dg.AssetCheckSeverity.WARN if is_warning else dg.AssetCheckSeverity.ERROR
    # As text: of every number Dagster draws a plot.
    looked_at = {} if verdict.judged is None else {"looked at": f"{verdict.judged:,}"}
    return dg.AssetCheckResult(
        passed=verdict.holds and verdict.can_judge,
        severity=severity,
        description=verdict.message() or None,
        metadata={**verdict.facts, **looked_at},
    )


@contextmanager
def failures_told(instance: dg.DagsterInstance) -> Iterator[str]:
    """Yield the id for a run in this process, and raise its failed checks with their messages.

    Raises:
        DagsterError: the run failed, but not because of a check.
        CheckFailedError: a blocking check failed. Dagster's own error lacks the message.
    """
    run_id = str(uuid.uuid4())
    try:
        yield run_id
    except dg.DagsterError as error:
        events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        found = [
            event.dagster_event.asset_check_evaluation_data
            for event in events
            if event.dagster_event
        ]
        is_error = dg.AssetCheckSeverity.ERROR
        failed = [
            one for one in found if not one.passed and one.blocking and one.severity == is_error
        ]
        if not failed:
            raise
        told = " ".join(f"{one.asset_check_key.name}: {one.description}" for one in failed)
        raise CheckFailedError(told) from error


def _question(look: Callable[..., AuditResult]) -> str:
    return (look.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def schema_check(asset: str, *names: str) -> dg.AssetChecksDefinition:
    """Return the check that an asset's tables have the columns and types that the next stage reads."""

    def look(root: DataRoot, batches: Sequence[str]) -> AuditResult:
        return tables.matching_schemas(root, batches, names)

    look.__doc__ = tables.matching_schemas.__doc__
    return batch_check(asset, f"{asset}_schema", look, blocking=True)


def all_checks(stages: Sequence[Stage]) -> list[dg.AssetChecksDefinition]:
    """Return every check of these stages, asset by asset."""
    found = []
    for stage in stages:
        if not stage.is_by_batch:
            continue
        found.append(schema_check(stage.asset, *stage.writes))
        found += [
            batch_check(stage.asset, check.name, check.look, blocking=check.is_blocking)
            for check in stage.checks()
        ]
    return [
        *found,
        dataset_check("shards_match_manifests", dataset.shards_against_manifests, blocking=True),
        *(dataset_check(name, look, blocking=True) for name, look in dataset.BLOCKING.items()),
        dataset_check("prompts_decide", dataset.prompts_decide),
        dataset_check("no_secret_is_published", dataset.published_secrets, blocking=True),
        *(model_check(name, look) for name, look in model.CHECKS.items()),
    ]
