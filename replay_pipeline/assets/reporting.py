"""Run an asset's batches, and report each one while it works and when it finishes.

Dagster's UI turns every plain number into a chart over the partitions.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import dagster as dg
import pyarrow as pa

from replay_pipeline.errors import StorageError
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.receipts import Receipt
from replay_pipeline.stages.stage import Stage
from replay_pipeline.stages.work.markdown import Location, Markdown

for _category in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=_category)

trace_batch = dg.DynamicPartitionsDefinition(name="trace_batch")
"""The partitions. The sensor `new_sessions` adds one key per batch manifest."""

GROUP = "replay_pipeline"
OWNERS = ["team:replay-pipeline"]

RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
"""Tags of a run that takes a contiguous range of batches."""

IN_EVERY_RUN = {"run": "every"}
"""Tag of the assets that a run includes by default."""


def column_schema(schema: pa.Schema, words: Callable[[str], str]) -> dg.TableSchema:
    """Return the columns of a table, with their descriptions, for the asset's Columns tab."""
    return dg.TableSchema(
        columns=[
            dg.TableColumn(field.name, str(field.type), description=words(field.name))
            for field in schema
        ]
    )


def metadata_value(value: Any) -> Any:
    """Return a fact of a stage as a Dagster metadata value."""
    match value:
        case Markdown():
            return dg.MetadataValue.md(str(value))
        case Location():
            return dg.MetadataValue.path(str(value))
        case str() if value.startswith("https://"):
            return dg.MetadataValue.url(value)
    return value


_OBSERVED_EVERY_S = 3.0
_DATA_VERSION = "dagster/data_version"

_N_DEATHS, _MOST_DEATHS = "dagster/retry_number", "dagster/max_retries"
"""Tags of a run: which one it is of those that Dagster started for one, and how many it starts at most."""

_MAX_RETRIES, _RETRY_AFTER_S = 3, 120.0
"""Retries that let a run survive an object store that is down for some minutes."""


def each_batch(
    context: dg.AssetExecutionContext,
    pipeline: Pipeline,
    stage: Stage,
    work: Callable[[str], Receipt],
) -> Iterator[dg.MaterializeResult]:
    """Do `work` for every partition of the run, in the order of the batches.

    A batch is recorded as materialized as soon as it is done, so a later failure doesn't affect it.
    A batch without work is recorded at the end.
    """
    spec = context.assets_def.get_asset_spec(context.asset_key)
    provenance = Provenance(context.instance, spec)
    done: list[dg.AssetMaterialization] = []
    has_gone_on = False
    order = {key: i for i, key in enumerate(pipeline.batches())}
    for batch in sorted(context.partition_keys, key=lambda key: (order.get(key, len(order)), key)):
        before = pipeline.receipts.read(stage.name, batch)
        with nullcontext() if stage.pays else tried_again():
            receipt = work(batch)
        done.append(
            dg.AssetMaterialization(
                context.asset_key,
                partition=batch,
                metadata=as_metadata(pipeline, stage, receipt),
                tags=provenance.of(receipt, code_version=spec.code_version),
            )
        )
        if not receipt.is_reused:
            context.log_event(done[-1])
            if not has_gone_on and (before is None or before.data_version != receipt.data_version):
                has_gone_on = True
                _count_deaths_anew(context)
    # Dagster gives all partitions of a run one version of the data, and each has its own: so what
    # was made of each is said once more after Dagster has said it of all together.
    yield dg.MaterializeResult()
    for event in done:
        context.log_event(event)


def _count_deaths_anew(context: dg.AssetExecutionContext) -> None:
    """Let Dagster run this run again as often as if its process had never died before.

    A night is one run. Where its processes are killed again and again, each gets some batches further;
    it ends for good when as many in a row as Dagster's settings allow have made nothing.
    """
    allowed = context.instance.run_retries_max_retries
    n_deaths = int(context.run.tags.get(_N_DEATHS, 0))
    context.instance.add_run_tags(context.run.run_id, {_MOST_DEATHS: str(n_deaths + allowed)})


@contextmanager
def tried_again() -> Iterator[None]:
    """Let Dagster retry a step after some minutes if a store or disk was unavailable.

    Other errors of ours would only repeat: a wrong setting, a secret, a failed check. Don't use it
    for steps that pay. Their ceiling is for one attempt, and the next run asks the open questions.

    Raises:
        RetryRequested: a file could not be read or written.
    """
    try:
        yield
    except StorageError as error:
        raise dg.RetryRequested(_MAX_RETRIES, seconds_to_wait=_RETRY_AFTER_S) from error


class Provenance:
    """The code version and input versions of a batch, in the form of Dagster's tags for a run."""

    def __init__(self, instance: dg.DagsterInstance, spec: dg.AssetSpec) -> None:
        self._shared: dict[str, str] = {}
        for dep in spec.deps:
            last = instance.fetch_materializations(dep.asset_key, limit=1).records
            name = dep.asset_key.to_user_string()
            event = last[0].asset_materialization if last else None
            version = (event.tags or {}).get(_DATA_VERSION) if event else None
            # What has partitions is compared by their records before and after this one.
            pointer = str(last[0].storage_id) if last else "NULL"
            self._shared[f"dagster/input_event_pointer/{name}"] = pointer
            self._shared[f"dagster/input_data_version/{name}"] = version or "INITIAL"

    def of(self, receipt: Receipt, *, code_version: str | None) -> dict[str, str]:
        """Return the tags of a materialization."""
        return self._shared | {
            "dagster/code_version": code_version or "unknown",
            _DATA_VERSION: receipt.data_version,
            f"{_DATA_VERSION}_is_user_provided": "true",
        }


def whole_result(pipeline: Pipeline, stage: Stage, receipt: Receipt) -> dg.MaterializeResult:
    """Return the metadata and data version of an asset without partitions."""
    return dg.MaterializeResult(
        metadata=as_metadata(pipeline, stage, receipt),
        data_version=dg.DataVersion(receipt.data_version),
    )


def as_metadata(pipeline: Pipeline, stage: Stage, receipt: Receipt) -> dict[str, Any]:
    """Return the facts of a receipt, the time that the stage took, and whether it had work to do."""
    facts = {**stage.facts(pipeline, receipt), "seconds": receipt.seconds}
    return {
        **{
            name: float(f"{value:.4g}") if isinstance(value, float) else metadata_value(value)
            for name, value in facts.items()
        },
        "reused": receipt.is_reused,
    }


class LiveCurves:
    """Live curves: points in the asset's plots while its step works, one every few seconds."""

    def __init__(
        self, context: dg.AssetExecutionContext, *, every_s: float = _OBSERVED_EVERY_S
    ) -> None:
        self._context, self._every_s = context, every_s
        self._seen: dict[str, float] = {}
        self._next_s = time.monotonic() + every_s

    def show(self, numbers: Mapping[str, float], *, is_last: bool = False) -> None:
        """Record `numbers`, unless nothing changed or the last point is too recent.

        Call it in the thread of the step, because it writes the step's event log.
        """
        now_s = time.monotonic()
        if dict(numbers) == self._seen or not numbers or (now_s < self._next_s and not is_last):
            return
        self._seen, self._next_s = dict(numbers), now_s + self._every_s
        self._context.log_event(
            dg.AssetObservation(self._context.asset_key, metadata=dict(numbers))
        )
