"""The fast storage writes what stock reads, survives a kill, and gives way to another Dagster."""

import importlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from dagster import AssetKey, DagsterEventType
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage

import replay_pipeline.orchestration.sqlite_storage as storage_package
from replay_pipeline.orchestration.sqlite_storage import FastSqliteStorage, fast
from replay_pipeline.orchestration.sqlite_storage.connections import Connections

KEYS = [f"batch-{i:03d}" for i in range(12)]
PARTITIONS = dg.DynamicPartitionsDefinition(name="things")


@dg.asset(partitions_def=PARTITIONS)
def thing(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    for key in context.partition_keys[:-1]:
        context.log_event(
            dg.AssetMaterialization(
                context.asset_key, partition=key, metadata={"n": len(key)}, tags={"batch": key}
            )
        )
        context.log_event(dg.AssetObservation(context.asset_key, metadata={"at": key}))
    return dg.MaterializeResult(metadata={"done": True})


def write_yaml(home: Path, module: str, name: str) -> Path:
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\n"
        f"storage: {{custom: {{module: {module}, class: {name}, config: {{base_dir: '{home}'}}}}}}\n"
    )
    return home


def fast_home(home: Path) -> Path:
    return write_yaml(home, "replay_pipeline.orchestration.sqlite_storage", "FastSqliteStorage")


def stock_home(home: Path) -> Path:
    return write_yaml(home, "dagster._core.storage.sqlite_storage", "DagsterSqliteStorage")


def open_home(home: Path) -> dg.DagsterInstance:
    return dg.DagsterInstance.from_config(str(home))


def run_range(instance: dg.DagsterInstance) -> str:
    instance.add_dynamic_partitions("things", KEYS)
    tags = {
        f"dagster/asset_partition_range_{end}": KEYS[i] for end, i in (("start", 0), ("end", -1))
    }
    result = dg.materialize([thing], instance=instance, tags=tags)
    assert result.success
    return result.run_id


def seen(instance: dg.DagsterInstance, run_id: str) -> dict[str, object]:
    """Everything that a reader asks for."""
    logs = instance.all_logs(run_id)
    materialized = instance.fetch_materializations(AssetKey("thing"), limit=1000).records
    return {
        "run": instance.get_run_by_id(run_id),
        "logs": logs,
        "stats": instance.get_run_stats(run_id),
        "partitions": sorted(instance.get_materialized_partitions(AssetKey("thing"))),
        "materializations": [(r.storage_id, r.event_log_entry) for r in materialized],
        "latest": instance.get_latest_materialization_event(AssetKey("thing")),
        "dynamic": instance.get_dynamic_partitions("things"),
        "tags": sorted(
            map(str, instance.event_log_storage.get_event_tags_for_asset(AssetKey("thing")))
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("n_batched", [0, 500], ids=["one by one", "batched"])
def test_stock_reads_back_every_event(tmp_path, monkeypatch, n_batched):
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", str(n_batched))
    home = tmp_path / "home"
    with open_home(fast_home(home)) as instance:
        assert type(instance.event_log_storage).__name__ == "FastEventLogStorage"
        run_id = run_range(instance)
        written = seen(instance, run_id)
    assert written["partitions"] == KEYS
    assert len(written["tags"]) >= len(KEYS) - 1
    with open_home(stock_home(home)) as instance:
        assert type(instance.event_log_storage).__name__ == "SqliteEventLogStorage"
        assert seen(instance, run_id) == written


@pytest.mark.slow
def test_stock_writes_the_same_events_and_fast_reads_them(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_EVENT_BATCH_SIZE", "500")
    with open_home(fast_home(tmp_path / "fast")) as instance:
        by_fast = seen(instance, run_range(instance))
    with open_home(stock_home(tmp_path / "stock")) as instance:
        run_id = run_range(instance)
        by_stock = seen(instance, run_id)
    with open_home(fast_home(tmp_path / "stock")) as instance:
        assert seen(instance, run_id) == by_stock
    kinds = [[entry.dagster_event_type for entry in each["logs"]] for each in (by_fast, by_stock)]
    assert kinds[0] == kinds[1]
    assert kinds[0].count(DagsterEventType.ASSET_MATERIALIZATION) == 2 * len(KEYS) - 1


@pytest.mark.slow
def test_a_live_run_can_be_followed(tmp_path):
    with open_home(fast_home(tmp_path / "home")) as instance:
        run_id = run_range(instance)
        expected = [entry.message for entry in instance.all_logs(run_id)]
        heard: list[str] = []

        def hear(entry, cursor):
            heard.append(entry.message)

        instance.watch_event_logs(run_id, None, hear)
        watcher = instance.event_log_storage._watcher
        thread = watcher._run_id_to_watcher_dict[run_id]
        thread.join(0.05)
        while len(heard) < len(expected):
            thread.join(0.05)
        instance.end_watch_event_logs(run_id, hear)
    assert heard == expected


def test_files_in_use_stay_open_while_many_others_are_used(tmp_path):
    connections = Connections()
    with connections.transaction(f"sqlite:///{tmp_path}/kept.db") as kept:
        kept.exec_driver_sql("create table t(x)")
        for i in range(40):
            with connections.transaction(f"sqlite:///{tmp_path}/{i}.db") as other:
                other.exec_driver_sql("create table t(x)")
        kept.exec_driver_sql("insert into t values (1)")
    links = Path("/proc/self/fd").iterdir()
    open_files = [str(link.readlink()) for link in links if link.exists()]
    assert 1 <= sum(str(tmp_path) in name and name.endswith(".db") for name in open_files) <= 16
    connections.close()
    with sqlite3.connect(tmp_path / "kept.db") as check:
        assert check.execute("select * from t").fetchall() == [(1,)]
    check.close()


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_an_intact_database(tmp_path):
    home = fast_home(tmp_path / "home")
    code = (
        "import sys, dagster as dg\n"
        "with dg.DagsterInstance.from_config(sys.argv[1]) as instance:\n"
        "    print('up', flush=True)\n"
        "    for i in range(10**6):\n"
        "        instance.report_runless_asset_event(\n"
        "            dg.AssetMaterialization('thing', partition=f'p{i}'))\n"
        "        print(i, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "200":
                process.send_signal(signal.SIGKILL)
                break
        told = [int(line) for line in process.stdout if line.strip().isdigit()]
    n_told = max([200, *told]) + 1
    for file in sorted((home / "history").rglob("*.db")):
        database = sqlite3.connect(file)
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        database.close()
    with open_home(stock_home(home)) as instance:
        done = instance.get_materialized_partitions(AssetKey("thing"))
    assert {f"p{i}" for i in range(n_told)} <= done
    assert len(done) <= n_told + 1


def test_the_hooks_are_those_of_this_dagster():
    fast.check_hooks()
    assert all(callable(hook) for hook in fast.HOOKS)
    overridden = {
        name
        for fast_class in (
            fast.FastEventLogStorage,
            fast._FastRunStorage,
            fast._FastScheduleStorage,
        )
        for name, member in vars(fast_class).items()
        if callable(member) and name != "__init__" and hasattr(fast_class.__base__, name)
    }
    pinned = {hook.__name__ for hook in fast.HOOKS}
    assert overridden <= pinned


def test_another_dagster_gets_its_own_storage(monkeypatch, caplog):
    def connect(self, shard, mode):
        raise AssertionError

    monkeypatch.setattr(fast.SqliteEventLogStorage, "_connect", connect)
    monkeypatch.delitem(sys.modules, "replay_pipeline.orchestration.sqlite_storage.fast")
    changed = importlib.reload(storage_package)
    try:
        assert changed.FastSqliteStorage is DagsterSqliteStorage
        assert "is no longer ('self', 'shard')" in caplog.text
    finally:
        monkeypatch.undo()
        importlib.reload(storage_package)
    assert storage_package.FastSqliteStorage.__name__ == FastSqliteStorage.__name__


@pytest.mark.parametrize(
    ("version", "choice", "is_fast"),
    [
        ("1.13.99", None, True),
        ("1.14.0", None, False),
        ("1.14.0", "1", True),
        ("1.13.27", "0", False),
    ],
)
def test_the_fast_storage_is_taken_under_tested_minors_unless_somebody_says_otherwise(
    monkeypatch, version, choice, is_fast
):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    if choice is not None:
        monkeypatch.setenv("REPLAY_FAST_STORAGE", choice)
    assert storage_package.is_wanted() is is_fast
