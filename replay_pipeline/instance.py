"""Dagster on one data root: its home folder, and jobs run in this process."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg

from replay_pipeline.assets import checks, pairs, publish, replay, traces, train
from replay_pipeline.assets.automation import RANGE_END, RANGE_START
from replay_pipeline.assets.partitions import trace_batch
from replay_pipeline.assets.reporting import Facts, as_metadata
from replay_pipeline.definitions import define
from replay_pipeline.pipeline import OnProgress, Pipeline, Receipt
from replay_pipeline.reconcile import reconcile
from replay_pipeline.resources import PipelineResource, console_progress
from replay_pipeline.settings import Settings, child_environment
from replay_pipeline.tables import written_whole

_HEADER = "# Written by replay-pipeline each time it starts; delete this line to keep your changes."

_INSTANCE_YAML = """\
telemetry: {{enabled: false}}
nux: {{enabled: false}}
python_logs: {{python_log_level: WARNING}}
storage:
  custom:
    module: replay_pipeline.dagster_storage
    class: FastSqliteStorage
    config: {{base_dir: {home}}}
run_queue: {{dequeue_interval_seconds: 1}}
concurrency:
  runs: {{max_concurrent_runs: 2}}
  pools: {{default_limit: 1, granularity: op}}
run_monitoring: {{enabled: true, poll_interval_seconds: 30, free_slots_after_run_end_seconds: 10}}
retention:
  sensor: {{purge_after_days: 7}}
  schedule: {{purge_after_days: 90}}
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
        StorageError: the folder cannot be written.
    """
    home = local_dir.absolute() / ".dagster"
    instance_yaml = _INSTANCE_YAML.format(home=json.dumps(str(home)))
    for name, text in (("dagster.yaml", instance_yaml), ("workspace.yaml", _WORKSPACE_YAML)):
        path, whole = home / name, f"{_HEADER}\n{text}".encode()
        if not path.exists() or _is_outdated(path.read_bytes(), whole):
            with written_whole(path) as file:
                file.write(whole)
    return home


def _is_outdated(found: bytes, whole: bytes) -> bool:
    return found.startswith(_HEADER.encode()) and found != whole


@contextmanager
def open_instance(pipeline: Pipeline) -> Iterator[dg.DagsterInstance]:
    """Dagster's records of a data root, with what a crash has left in them put right.

    Raises:
        ConfigError: nothing says where its home is on this machine.
        StorageError: its home cannot be written.
    """
    home = prepare_home(pipeline.settings.local_dir())
    with dg.DagsterInstance.from_config(str(home)) as instance:
        reconcile(instance)
        yield instance


def run_jobs(
    pipeline: Pipeline,
    *,
    settings_path: Path | None = None,
    with_training: bool = True,
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
        ("publish_and_train" if with_training else "publish", {}),
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


def sync(pipeline: Pipeline) -> int:
    """Show in Dagster what the files say: batches, and stages that were done without Dagster.

    The files are the truth and Dagster's database is a view of them: after its home was lost, this
    brings it back. Returns how many materializations were added.

    Raises:
        StorageError: Dagster's home cannot be written.
    """
    with open_instance(pipeline) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", pipeline.batches())
        shown = [r for r in pipeline.receipts.all() if r.stage in _ASSETS]
        missing = [r for r in shown if not _is_shown(instance, r)]
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


def _is_shown(instance: dg.DagsterInstance, receipt: Receipt) -> bool:
    key = dg.AssetKey(_ASSETS[receipt.stage][0])
    if receipt.batch == "all":
        return instance.get_latest_materialization_event(key) is not None
    return receipt.batch in instance.get_materialized_partitions(key)


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
