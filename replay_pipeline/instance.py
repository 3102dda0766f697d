"""Dagster on one data root: its home folder, and jobs run in this process."""

import sys
from pathlib import Path

import dagster as dg

from replay_pipeline.assets import checks, pairs, publish, replay, traces, train
from replay_pipeline.assets.automation import RANGE_END, RANGE_START
from replay_pipeline.assets.partitions import trace_batch
from replay_pipeline.assets.reporting import Facts, effort
from replay_pipeline.definitions import define
from replay_pipeline.pipeline import OnProgress, Pipeline, Receipt
from replay_pipeline.resources import PipelineResource, console_progress
from replay_pipeline.settings import child_environment
from replay_pipeline.tables import written_whole

_INSTANCE_YAML = """\
telemetry: {enabled: false}
nux: {enabled: false}
python_logs: {python_log_level: WARNING}
run_queue: {dequeue_interval_seconds: 1}
concurrency:
  runs: {max_concurrent_runs: 2}
  pools: {default_limit: 1, granularity: op}
run_monitoring: {enabled: true, poll_interval_seconds: 30, free_slots_after_run_end_seconds: 10}
retention:
  sensor: {purge_after_days: 7}
  schedule: {purge_after_days: 90}
"""


_WORKSPACE_YAML = """\
load_from:
  - python_module: {module_name: replay_pipeline.definitions, location_name: replay_pipeline}
"""


def prepare_home(data_dir: Path) -> Path:
    """Make `.dagster` under the data root, with settings unless there are some. Returns it.

    Raises:
        StorageError: the folder cannot be written.
    """
    home = data_dir.absolute() / ".dagster"
    for name, text in (("dagster.yaml", _INSTANCE_YAML), ("workspace.yaml", _WORKSPACE_YAML)):
        if not (home / name).exists():
            with written_whole(home / name) as file:
                file.write(text.encode())
    return home


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
        with dg.DagsterInstance.from_config(str(prepare_home(data_dir))) as instance:
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
    data_dir = pipeline.root.path.absolute()
    with dg.DagsterInstance.from_config(str(prepare_home(data_dir))) as instance:
        instance.add_dynamic_partitions(trace_batch.name or "", pipeline.batches())
        shown = [r for r in pipeline.receipts.all() if r.stage in _ASSETS]
        missing = [r for r in shown if not _is_shown(instance, r)]
        for receipt in missing:
            name, facts = _ASSETS[receipt.stage]
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    name,
                    partition=None if receipt.batch == "all" else receipt.batch,
                    metadata={**facts(pipeline, receipt), **effort(receipt)},
                )
            )
    return len(missing)


def _is_shown(instance: dg.DagsterInstance, receipt: Receipt) -> bool:
    key = dg.AssetKey(_ASSETS[receipt.stage][0])
    if receipt.batch == "all":
        return instance.get_latest_materialization_event(key) is not None
    return receipt.batch in instance.get_materialized_partitions(key)


def ui_command(data_dir: Path, *, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that serves Dagster on `data_dir`, and its environment."""
    home = prepare_home(data_dir)
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(home / "workspace.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return command, child_environment(DAGSTER_HOME=str(home), REPLAY_DATA=str(data_dir.absolute()))
