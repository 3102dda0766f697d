"""Dagster on one data root: its home folder, and jobs run in this process."""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import dagster as dg

from replay_pipeline.assets import checks, pairs, publish, replay, traces, train
from replay_pipeline.assets.partitions import RANGE_END, RANGE_START, trace_batch
from replay_pipeline.assets.reporting import Facts, as_metadata
from replay_pipeline.definitions import define
from replay_pipeline.errors import ConfigError, MissingDependencyError, StorageError
from replay_pipeline.reconcile import reconcile
from replay_pipeline.resources import PipelineResource, console_progress
from replay_pipeline.settings import (
    DAGSTER_DATABASE,
    Settings,
    child_environment,
    has_dagster_database,
)
from replay_pipeline.stages.pipeline import OnProgress, Pipeline, Receipt
from replay_pipeline.storage.tables import written_whole

_HEADER = "# Written by replay-pipeline each time it starts; delete this line to keep your changes."

_INSTANCE_YAML = """\
telemetry: {{enabled: false}}
nux: {{enabled: false}}
python_logs: {{python_log_level: WARNING}}
{storage}run_queue: {{dequeue_interval_seconds: 1}}
concurrency:
  runs: {{max_concurrent_runs: 2}}
  pools: {{default_limit: 1, granularity: op}}
run_monitoring: {{enabled: true, poll_interval_seconds: 30, free_slots_after_run_end_seconds: 10}}
retention:
  sensor: {{purge_after_days: 7}}
  schedule: {{purge_after_days: 90}}
"""

_SQLITE_YAML = """\
storage:
  custom:
    module: replay_pipeline.dagster_storage
    class: FastSqliteStorage
    config: {{base_dir: {home}}}
"""

_POSTGRES_YAML = """\
storage:
  postgres:
    postgres_url: {{env: {variable}}}
"""

_WORKSPACE_YAML = """\
load_from:
  - python_module: {module_name: replay_pipeline.definitions, location_name: replay_pipeline}
"""


_EVENT_BATCH = "500"
"""Events of one step that Dagster hands to its storage together."""


def prepare_home(local_dir: Path) -> Path:
    """Make `.dagster` under a folder of this machine, with settings unless there are others.

    Returns the folder that was made.

    Raises:
        ConfigError: PostgreSQL is asked for, but its URL names no driver that works, or the
            settings there were changed and do not say so.
        MissingDependencyError: PostgreSQL is asked for, but what speaks to it is not installed.
        StorageError: the folder cannot be written.
    """
    home = local_dir.absolute() / ".dagster"
    if has_dagster_database() and importlib.util.find_spec("dagster_postgres") is None:
        raise MissingDependencyError(
            f"{DAGSTER_DATABASE} needs dagster-postgres: pip install 'replay-pipeline[postgres]'"
        )
    storage = _POSTGRES_YAML if has_dagster_database() else _SQLITE_YAML
    storage = storage.format(home=json.dumps(str(home)), variable=DAGSTER_DATABASE)
    instance_yaml = _INSTANCE_YAML.format(storage=storage)
    for name, text in (("dagster.yaml", instance_yaml), ("workspace.yaml", _WORKSPACE_YAML)):
        path, whole = home / name, f"{_HEADER}\n{text}".encode()
        if not path.exists() or _is_outdated(path.read_bytes(), whole):
            with written_whole(path) as file:
                file.write(whole)
    if has_dagster_database() and DAGSTER_DATABASE not in (home / "dagster.yaml").read_text(
        "utf-8"
    ):
        raise ConfigError(
            f"{home / 'dagster.yaml'} was changed and does not use {DAGSTER_DATABASE}: put "
            f"`storage: {{postgres: {{postgres_url: {{env: {DAGSTER_DATABASE}}}}}}}` there, or unset it"
        )
    return home


def _is_outdated(found: bytes, whole: bytes) -> bool:
    return found.startswith(_HEADER.encode()) and found != whole


@contextmanager
def open_instance(
    pipeline: Pipeline, *, runs_are_here: bool = False
) -> Iterator[dg.DagsterInstance]:
    """Dagster's records of a data root, with what a crash has left in them put right.

    Args:
        pipeline: the pipeline on the data root.
        runs_are_here: whether every run is a process of this machine. Taken for granted where the
            records are in files; where they are on a server, a run that is not seen here may well
            be alive on another machine, and is left alone.

    Raises:
        ConfigError: nothing says where its home is on this machine.
        StorageError: its home cannot be written, or its database cannot be reached.
    """
    home = prepare_home(pipeline.settings.local_dir())
    with _opened(home) as instance:
        reconcile(instance, runs_are_here=runs_are_here)
        yield instance


def _opened(home: Path) -> dg.DagsterInstance:
    if not has_dagster_database():
        return dg.DagsterInstance.from_config(str(home))
    failures = (
        importlib.import_module("sqlalchemy.exc").SQLAlchemyError,
        importlib.import_module("dagster_postgres.utils").DagsterPostgresException,
    )
    try:
        return dg.DagsterInstance.from_config(str(home))
    except failures as error:
        # The words of a driver may hold the address, and with it the password.
        raise StorageError(
            f"the database that {DAGSTER_DATABASE} names cannot be opened "
            f"({type(error).__name__}); it should be postgresql+psycopg2://user:password@host:5432/name"
        ) from None


def run_jobs(
    pipeline: Pipeline,
    *,
    settings_path: Path | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Take every batch through all assets, in this process, recorded in the data root's Dagster.

    Raises:
        ReplayPipelineError: what the failing stage raised, or a blocking check found.
    """
    data_dir = pipeline.root.path.absolute()
    batches = pipeline.batches()
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    jobs: list[tuple[str, dict[str, str]]] = [
        ("replay_batches", {RANGE_START: batches[0], RANGE_END: batches[-1]}),
        ("publish_and_train", {}),
    ]
    defs = define(
        PipelineResource(
            data_dir=str(data_dir),
            settings_path=str(settings_path.absolute()) if settings_path else "",
        )
    )
    token = console_progress.set(on_progress)
    try:
        with open_instance(pipeline) as instance:
            instance.add_dynamic_partitions(trace_batch.name or "", batches)
            for name, tags in jobs:
                with checks.failures_told(instance) as run_id:
                    defs.resolve_job_def(name).execute_in_process(
                        instance=instance, tags=tags, run_config=quiet, run_id=run_id
                    )
    finally:
        console_progress.reset(token)


_ASSETS: dict[str, tuple[str, Facts]] = {
    "ingest": ("trace_states", traces.state_facts),
    "replay": ("teacher_actions", replay.answer_facts),
    "pairs": ("dpo_pairs", pairs.pair_facts),
    "normalize": ("normalized_pairs", pairs.kept_facts),
    "publish": ("published_dataset", publish.dataset_facts),
    "train": ("trained_model", train.model_facts),
}
"""The asset that a stage's receipt belongs to, and how it is shown."""


_MAX_EVENTS_READ = 500


def sync(pipeline: Pipeline, *, runs_are_here: bool = False) -> int:
    """Show in Dagster what the files say: batches, and stages that were done without Dagster.

    The files are the truth and Dagster's database is a view of them: after its home was lost, this
    brings it back. Returns how many materializations were added.

    Raises:
        StorageError: Dagster's home cannot be written.
    """
    with open_instance(pipeline, runs_are_here=runs_are_here) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", pipeline.batches())
        receipts = [r for r in pipeline.receipts.all() if r.stage in _ASSETS]
        shown = {
            name: _shown_at(instance, dg.AssetKey(name))
            for name, _ in (_ASSETS[stage] for stage in {r.stage for r in receipts})
        }
        missing = [r for r in receipts if not _is_shown(r, shown[_ASSETS[r.stage][0]])]
        for receipt in missing:
            name, facts = _ASSETS[receipt.stage]
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    name,
                    partition=None if receipt.batch == "all" else receipt.batch,
                    metadata=as_metadata(pipeline, receipt, facts),
                )
            )
    return len(missing)


def _is_shown(receipt: Receipt, shown_at: Mapping[str | None, float]) -> bool:
    """Whether the last materialization is of this receipt: it is logged right after it."""
    at = shown_at.get(None if receipt.batch == "all" else receipt.batch)
    if at is None:
        return False
    return not receipt.at or datetime.fromisoformat(receipt.at).timestamp() <= at


def _shown_at(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str | None, float]:
    """When each partition (or, under `None`, the whole asset) was last materialized."""
    last = instance.get_latest_materialization_event(key)
    if last is None:
        return {}
    shown: dict[str | None, float] = {None: last.timestamp}
    ids = list(
        instance.event_log_storage.get_latest_storage_id_by_partition(
            key, dg.DagsterEventType.ASSET_MATERIALIZATION
        ).values()
    )
    for start in range(0, len(ids), _MAX_EVENTS_READ):
        chunk = ids[start : start + _MAX_EVENTS_READ]
        wanted = dg.AssetRecordsFilter(asset_key=key, storage_ids=chunk)
        for record in instance.fetch_materializations(wanted, limit=len(chunk)).records:
            shown[record.partition_key] = record.timestamp
    return shown


def ui_command(settings: Settings, *, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that serves Dagster on the data root, and its environment."""
    local_dir = settings.local_dir().absolute()
    home = prepare_home(local_dir)
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(home / "workspace.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return command, child_environment(
        DAGSTER_HOME=str(home),
        DAGSTER_EVENT_BATCH_SIZE=_EVENT_BATCH,
        REPLAY_DATA=str(settings.data_dir.absolute()),
        REPLAY_HOME=str(local_dir),
    )
