"""The pipeline under a real Dagster: its definitions, a run, its web server."""

import gc
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import dagster as dg
import pyarrow as pa
import pytest
from dagster._core.execution.plan.resume_retry import ReexecutionStrategy
from dagster._core.storage.defs_state.base import set_defs_state_storage
from dagster._core.test_utils import in_process_test_workspace
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from replay_pipeline.assets import automation, reporting
from replay_pipeline.assets.automation import new_sessions, nightly_replay, notify_failures
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.night import failed_runs
from replay_pipeline.assets.records import sync
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.errors import CheckFailedError, NormalizeError, StorageError
from replay_pipeline.stages.budget.spending import completed_batches
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.storage.processes import child_environment
from tests.integration.processes import instance_of, wait_until
from tests.loopback import webhook
from tests.roots import pipeline_at, project_root, served_root, with_work
from tests.support.dagster_web import graphql, is_serving, launch_batch, wait_for_run
from tests.support.forked import BIN, forked, forked_python
from tests.support.ports import free_port
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.teachers import TeacherServer

REPO = Path(__file__).parents[2]
BY_BATCH = ["trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs"]
OTHERS = ["claude_code_sessions", "night_summary", "published_dataset", "trained_model", "verdicts"]
RANGE = "dagster/asset_partition_range_"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_instance_of_another_test():
    """Dagster puts an instance back in place when a context that held it is collected."""
    gc.collect()
    gc.freeze()  # the next one looks at what is new
    with set_defs_state_storage(None):
        yield


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    """A data root whose settings name a project of the sample, and which the environment names."""
    project_root(tmp_path / "data")
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


KEY = "sk-or-v1-0123456789abcdef-planted"


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """Such a root after one run over all of its batches, with a key in the environment."""
    root = tmp_path_factory.mktemp("filled") / "data"
    with pytest.MonkeyPatch.context() as patch, set_defs_state_storage(None):
        patch.setenv("REPLAY_DATA", str(root))
        patch.setenv("OPENROUTER_API_KEY", KEY)
        project_root(root).find_batches()
        with instance_of(root) as instance:
            assert run_range(root, instance).success
    return root


@pytest.fixture
def filled_root(filled, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    return shutil.copytree(filled, tmp_path / "data")


def run_range(
    root: Path,
    instance: dg.DagsterInstance,
    job: str = "replay_batches",
    max_total_usd: float | None = None,
    run_id: str | None = None,
    night: str | None = None,
):
    defs = define(PipelineResource())
    keys = pipeline_at(root).batches()
    instance.add_dynamic_partitions("trace_batch", keys)
    tags = {f"{RANGE}start": keys[0], f"{RANGE}end": keys[-1]} if job == "replay_batches" else {}
    given = {"max_total_usd": max_total_usd, "night": night}
    given = {name: value for name, value in given.items() if value is not None}
    config = {"ops": {"teacher_actions": {"config": given}}}
    return defs.resolve_job_def(job).execute_in_process(
        instance=instance,
        tags=tags,
        run_config=config if given else None,
        run_id=run_id,
    )


def test_definitions_load_with_every_asset_described():
    defs = define(PipelineResource())
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    assert {key.to_user_string() for key in graph.get_all_asset_keys()} == {*BY_BATCH, *OTHERS}
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.description
        assert node.group_name == "replay_pipeline"
        assert node.owners
        assert node.kinds


def test_the_sensor_adds_each_batch_once(root):
    resource = PipelineResource()
    with instance_of(root) as instance:
        with dg.build_sensor_context(instance=instance) as context:
            first = new_sessions(context, pipeline=resource)
        assert isinstance(first, dg.SensorResult)
        (request,) = first.dynamic_partitions_requests or []
        assert list(request.partition_keys) == pipeline_at(root).batches()
        assert not any("," in key for key in request.partition_keys)
        instance.add_dynamic_partitions("trace_batch", list(request.partition_keys))
        with dg.build_sensor_context(instance=instance) as context:
            again = new_sessions(context, pipeline=resource)
        assert isinstance(again, dg.SkipReason)


@dg.definitions
def served() -> dg.Definitions:
    return define(PipelineResource())


def retried(instance: dg.DagsterInstance, run_id: str) -> dg.DagsterRun:
    """The run that Dagster makes of another one, from the UI and by itself, to do it again."""
    parent = instance.get_run_by_id(run_id)
    assert parent is not None
    with in_process_test_workspace(
        instance, LoadableTargetOrigin(module_name=__name__, attribute="served")
    ) as workspace:
        (location,) = workspace.code_locations
        return instance.create_reexecuted_run(
            parent_run=parent,
            request_context=workspace,
            code_location=location,
            remote_job=location.get_repository("__repository__").get_full_job(parent.job_name),
            strategy=ReexecutionStrategy.ALL_STEPS,
            use_parent_run_tags=True,
        )


def allowed_retries(instance: dg.DagsterInstance, run_id: str) -> int:
    """How many runs Dagster starts at most for one whose processes die."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    return int(run.tags["dagster/max_retries"])


def planned(instance: dg.DagsterInstance, *, day: int, hour: int) -> Any:
    """What the schedule makes of a night: runs, or why there are none."""
    # Left open, a context would put another test's instance in place when it is collected.
    with dg.build_schedule_context(
        instance=instance, scheduled_execution_time=datetime(2026, 1, day, hour, tzinfo=UTC)
    ) as context:
        return nightly_replay(context, pipeline=PipelineResource())


def set_in(root: Path, section: str, line: str) -> None:
    """Add a line to a section of the settings file."""
    file = root / "settings.toml"
    before, _, after = file.read_text().partition(f"[{section}]\n")
    file.write_text(f"{before}\n[{section}]\n{line}\n{after}")


def test_all_runs_of_a_night_bear_the_date_on_which_it_begins_in_its_time_zone(root, monkeypatch):
    work = pipeline_at(root)
    work.find_batches()
    first, *others = keys = [*work.batches(), "later-1", "later-2"]
    between = others[0]
    set_in(root, "night", "time_zone = 'Asia/Kolkata'")
    monkeypatch.setattr(automation, "completed_batches", lambda _: {between})
    monkeypatch.setattr(automation, "fitting", lambda _, batches, **__: list(batches))
    with instance_of(root) as instance:
        instance.add_dynamic_partitions("trace_batch", keys)
        done = dg.AssetMaterialization("normalized_pairs", partition=between)
        instance.report_runless_asset_event(done)
        requests = planned(instance, day=1, hour=20)
    assert [request.tags[f"{RANGE}start"] for request in requests] == [first, others[1]]
    nights = [request.run_config["ops"]["teacher_actions"]["config"] for request in requests]
    assert nights == 2 * [{"night": "2026-01-02"}]


# Dagster reads what it has deprecated itself.
@pytest.mark.filterwarnings("ignore:Property `ScheduleDefinition.environment_vars`")
def test_the_runs_of_a_night_and_their_retries_share_its_money_and_use_it_up(root, monkeypatch):
    max_usd, dearest_call_usd = 0.02, 0.01
    monkeypatch.setattr(automation, "_MAX_BATCHES_PER_RUN", 1)
    # The ceiling of a run by hand is another one.
    set_in(root, "replay", f"max_nightly_usd = {max_usd}\nmax_total_usd = 0\ngates = []")
    work = pipeline_at(root)
    work.find_batches()
    batches = work.batches()[:2]
    for batch in batches:
        work.ingest(batch)
    job = define(PipelineResource()).resolve_job_def("replay_batches")
    by_night: dict[str, float] = {}
    with instance_of(root) as instance:
        instance.add_dynamic_partitions("trace_batch", batches)

        def run(run_config: Any, tags: Any) -> str:
            done = job.execute_in_process(
                instance=instance,
                run_config=run_config,
                tags=tags,
                asset_selection=[dg.AssetKey("teacher_actions")],
            )
            assert done.success
            for scope in status_of(work)["ledger"]["scopes"]:
                if scope["scope"].startswith("night:"):
                    assert scope["limit_usd"] == max_usd
                    by_night[scope["scope"]] = scope["spent_usd"]
            assert sum(by_night.values()) == pytest.approx(status_of(work)["ledger"]["spent_usd"])
            assert max(by_night.values()) <= max_usd
            return done.run_id

        requests = planned(instance, day=2, hour=2)
        assert len(requests) == 2
        *_, last = [run(request.run_config, request.tags) for request in requests]
        spent = dict(by_night)
        assert list(spent) == ["night:2026-01-02"]
        assert spent["night:2026-01-02"] > max_usd - dearest_call_usd
        again = retried(instance, last)
        died = {"dagster/retry_number": "2"}
        last = run(again.run_config, again.tags | died)
        assert allowed_retries(instance, last) == 3, "it made nothing"
        assert by_night.keys() == spent.keys()
        assert completed_batches(work) != set(batches)
        first, *_ = [
            run(request.run_config, request.tags | died)
            for request in planned(instance, day=3, hour=2)
        ]
        assert allowed_retries(instance, first) == 2 + 3, "it made something"
        assert by_night["night:2026-01-03"] > 0


def test_what_the_money_did_not_reach_is_planned_again_and_0_means_0(root):
    work = pipeline_at(root)
    work.find_batches()
    with instance_of(root) as instance:
        assert run_range(root, instance, max_total_usd=0.03).success
        spent = status_of(work)["ledger"]["spent_usd"]
        assert 0 < spent <= 0.03
        assert instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
        assert completed_batches(work) != set(work.batches())
        assert isinstance(planned(instance, day=2, hour=2), list)
        assert run_range(root, instance).success
        assert completed_batches(work) == set(work.batches())
        assert isinstance(planned(instance, day=2, hour=2), dg.SkipReason)
        set_in(root, "replay", "max_nightly_usd = 0")
        assert "budget is 0" in str(planned(instance, day=2, hour=2).skip_message)


def test_night_after_night_what_is_new_is_replayed_published_and_told_and_nothing_is_paid_twice(
    tmp_path, monkeypatch
):
    root, resource = tmp_path / "data", PipelineResource()
    monkeypatch.setenv("REPLAY_DATA", str(root))
    with TeacherServer(script={"role": "assistant", "content": "I look first."}) as server:
        work = served_root(root, server, sessions=tmp_path / "logs")
        with (root / "settings.toml").open("a") as file:
            file.write("[normalize]\nrecipe = 'none'\n")
        set_in(root, "ingest", "settle_s = 0")
        defs = define(resource)
        session = SessionBuilder("nights")
        with instance_of(root) as instance:

            def ends(request: dg.RunRequest, job: str, **tags: str) -> bool:
                return (
                    defs.resolve_job_def(job)
                    .execute_in_process(
                        instance=instance,
                        tags={**request.tags, **tags},
                        run_config=request.run_config,
                        raise_on_error=False,
                    )
                    .success
                )

            def follows() -> Any:
                with dg.build_sensor_context(instance=instance) as context:
                    return automation.night_goes_on(context)

            for day in (2, 3, 4):
                for step in range(3):
                    session.user(f"Day {day}: why does module {step} fail?")
                    call = ToolCall("Bash", {"command": f"pytest tests/test_{day}_{step}.py"})
                    message = session.assistant(f"I run {step}.", [call])
                    session.result(message.tool_use_ids[0], "1 failed")
                session.write(tmp_path / "logs")
                with dg.build_sensor_context(instance=instance) as context:
                    found = new_sessions(context, pipeline=resource)
                assert isinstance(found, dg.SensorResult)
                (added,) = found.dynamic_partitions_requests or []
                instance.add_dynamic_partitions("trace_batch", list(added.partition_keys))
                is_bad = day == 3  # one night fails after it has paid, and the next makes it up
                with monkeypatch.context() as patch:
                    if is_bad:
                        with_work(patch, "pairs", no_pairs)
                        defs = define(resource)
                    for request in planned(instance, day=day, hour=2):
                        of_night = {"dagster/schedule_name": "nightly_replay"}
                        assert ends(request, "replay_batches", **of_night) is not is_bad
                defs = define(resource)
                for job in ("publish", "summarize_night"):
                    (request,) = follows()
                    assert request.job_name == job
                    key = {"dagster/run_key": str(request.run_key)}
                    assert ends(request, job, **key)  # of what there is
                assert isinstance(follows(), dg.SkipReason)
        assert completed_batches(work) == set(work.batches())
        rows = [work.root.read_all(name).num_rows for name in ("states", "teacher_actions")]
        assert rows == [9, 27]
        assert server.bill().n_charged == 27
        assert server.bill().n_duplicates == 0


def no_pairs(work: Any, task: Any) -> None:
    raise NormalizeError("the machine went down")


def test_a_range_run_fills_every_batch_and_a_second_one_does_nothing(filled_root):
    work = pipeline_at(filled_root)
    with instance_of(filled_root) as instance:
        for asset in BY_BATCH:
            done = instance.get_materialized_partitions(dg.AssetKey(asset))
            assert done == set(work.batches())
        (run,) = instance.get_runs()
        assert all(passed for passed, *_ in checks_of(instance, run.run_id).values())
        before = list(work.receipts.all())
        assert run_range(filled_root, instance).success
        assert list(work.receipts.all()) == before


def test_work_done_by_hand_and_a_lost_home_are_shown_after_sync(filled_root):
    root = filled_root
    shutil.rmtree(root / ".dagster")
    work = pipeline_at(root)
    work.publish()
    n_done = len(list(work.receipts.all()))
    assert sync(work) == n_done
    assert sync(work) == 0
    shutil.rmtree(root / ".dagster")
    assert sync(work) == n_done
    first, second = work.batches()[:2]
    later = pipeline_at(root, pairs={"agreement_threshold": 3})
    assert not later.pairs(first).is_reused
    assert not later.pairs(second).is_reused
    assert sync(later) == 2
    assert sync(later) == 0
    with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
        for asset in BY_BATCH:
            done = instance.get_materialized_partitions(dg.AssetKey(asset))
            assert done == set(work.batches())
        event = instance.get_latest_materialization_event(dg.AssetKey("published_dataset"))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.metadata["dagster/row_count"].value > 0


def test_a_step_that_pays_nothing_is_tried_again_after_an_outage(root, monkeypatch):
    monkeypatch.setattr(reporting, "_RETRY_AFTER_S", 0.0)
    tries: Counter[str] = Counter()

    def out_at_first(stage: str, error: Exception):
        receipts = pipeline_at(root).receipts
        for key in ("all", *pipeline_at(root).batches()):
            receipts.path(stage, key).unlink(missing_ok=True)  # so that there is something to do

        def work(whole, task):
            tries[stage] += 1
            if tries[stage] == 1:
                raise error
            return whole(task)

        with_work(monkeypatch, stage, work)

    pipeline_at(root).find_batches()
    batch = pipeline_at(root).batches()[0]

    def run(job: str, instance: dg.DagsterInstance, **tags: str) -> bool:
        resolved = define(PipelineResource()).resolve_job_def(job)
        return resolved.execute_in_process(
            instance=instance, tags=tags, raise_on_error=False
        ).success

    with instance_of(root) as instance:
        instance.add_dynamic_partitions("trace_batch", [batch])
        tags = {"dagster/partition": batch}
        out_at_first("pairs", StorageError("the store does not answer"))
        assert run("replay_batches", instance, **tags)
        assert tries["pairs"] == 2
        out_at_first("publish", StorageError("the store does not answer"))
        assert run("publish", instance)
        assert tries["publish"] == 2
        tries.clear()
        out_at_first("normalize", NormalizeError("this comes again"))
        assert not run("replay_batches", instance, **tags)
        assert tries["normalize"] == 1
        # Its ceiling is one for each try: a second one could spend it twice.
        out_at_first("replay", StorageError("the disk is full"))
        assert not run("replay_batches", instance, **tags)
        assert tries["replay"] == 1


def test_the_morning_after_says_what_was_done_and_what_failed(root):
    pipeline_at(root).find_batches()
    defs = define(PipelineResource())
    began = datetime.now(UTC)
    with instance_of(root) as instance:
        assert run_range(root, instance, night=f"{began:%Y-%m-%d}").success
        (root / "settings.toml").write_text(
            (root / "settings.toml").read_text() + "[normalize]\nrecipe = 'no-such-recipe'\n"
        )
        job = defs.resolve_job_def("replay_batches")
        batch = pipeline_at(root).batches()[0]
        failed = job.execute_in_process(
            instance=instance, tags={"dagster/partition": batch}, raise_on_error=False
        )
        assert not failed.success
        (failure,) = failed_runs(instance, since=began, secrets=[])
        assert failure["job"] == "replay_batches"
        assert failure["batches"] == batch
        assert "no-such-recipe" in failure["why"]
        told = dg.build_run_status_sensor_context(
            "notify_failures",
            dagster_event=failed.get_run_failure_event(),
            dagster_instance=instance,
            dagster_run=failed.dagster_run,
        )
        with webhook() as (url, heard):
            with (root / "settings.toml").open("a") as file:
                file.write(f"[notify]\nwebhook_url = '{url}'\nis_nightly = true\n")
            notify_failures(told.for_run_failure(), pipeline=PipelineResource())
            summary = defs.resolve_job_def("summarize_night").execute_in_process(instance=instance)
        assert [message["event"] for message in heard] == ["run_failed", "night"]
        assert "no-such-recipe" in heard[0]["text"]
        event = summary.asset_materializations_for_node("night_summary")[0]
        figures = {key: value.value for key, value in event.metadata.items()}
        status = status_of(pipeline_at(root))
        assert figures["spent_usd"] == pytest.approx(status["ledger"]["spent_usd"], abs=1e-6)
        assert figures["pairs"] == sum(each["pairs"] for each in status["batches"].values())
        assert figures["runs_failed"] == 1
        assert "no-such-recipe" in figures["failures"]
        assert "runs failed" in figures["night"]


def test_no_key_is_left_behind_in_dagsters_own_files(filled):
    assert [*(filled / ".dagster").rglob("*.db")]
    left = [path for path in filled.rglob("*") if path.is_file()]
    assert not [path for path in left if KEY.encode() in path.read_bytes()]


# Blocking checks


def damage(root: Path, table: str, **fields) -> str:
    """Change the first row of the first batch of a table; returns the batch."""
    data = pipeline_at(root).root
    batch = data.batches(table)[0]
    rows, schema = data.read(table, batch).to_pylist(), data.read(table, batch).schema
    rows[0] |= fields
    data.write(table, batch, pa.Table.from_pylist(rows, schema))
    return batch


def checks_of(instance: dg.DagsterInstance, run_id: str) -> dict[str, tuple[bool, str]]:
    events = instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    found = [event.dagster_event.asset_check_evaluation_data for event in events]
    return {
        one.asset_check_key.name: (one.passed, one.severity.value, one.description or "")
        for one in found
    }


def test_a_blocking_check_keeps_the_run_from_going_on(root, monkeypatch):
    def broken(whole, task):
        report = whole(task)
        if task.batch == task.project.batches()[0]:
            damage(root, "dpo_pairs", chosen="")
        return report

    with_work(monkeypatch, "pairs", broken)
    pipeline_at(root).find_batches()
    with instance_of(root) as instance:
        run_id = str(uuid4())
        with pytest.raises(dg.DagsterError):
            run_range(root, instance, run_id=run_id)
        found = checks_of(instance, run_id)
        passed, severity, message = found["sides_differ"]
        assert (passed, severity) == (False, "ERROR")
        assert f"batch {pipeline_at(root).batches()[0]}" in message
        assert not instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
    assert not pipeline_at(root).root.batches("normalized_pairs")


def test_damage_after_the_checks_is_not_published(filled_root):
    root = filled_root
    with instance_of(root) as instance:
        batch = damage(root, "normalized_pairs", chosen="", rejected="")
        with pytest.raises(CheckFailedError, match=f"batch {batch}: 1 with an empty or equal"):
            run_range(root, instance, "publish")
        assert instance.get_latest_materialization_event(dg.AssetKey("published_dataset")) is None


# The web server


@contextmanager
def web_server(root: Path, home: Path) -> Iterator[str]:
    home.mkdir()
    (home / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\n"
        "run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}\n"
    )
    port = free_port()
    log = (home / "web.log").open("wb")
    process = subprocess.Popen(
        forked(
            [BIN / "dagster-webserver", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)],
            children=forked_python(),
        ),
        cwd=REPO,
        env=child_environment(DAGSTER_HOME=str(home), REPLAY_DATA=str(root)),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_serving(url), process, log=home / "web.log")
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


METADATA = """
query Asset($key: AssetKeyInput!) {
  assetOrError(assetKey: $key) {
    ... on Asset {
      assetMaterializations(limit: 1) {
        partition
        metadataEntries {
          label
          ... on IntMetadataEntry { intValue }
          ... on FloatMetadataEntry { floatValue }
          ... on MarkdownMetadataEntry { mdStr }
        }
      }
    }
  }
}
"""


def test_a_partition_is_materialized_through_the_web_server(root, tmp_path):
    work = pipeline_at(root)
    work.find_batches()
    batch = work.batches()[0]
    with web_server(root, tmp_path / "home") as url:
        with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
            instance.add_dynamic_partitions("trace_batch", work.batches())
        assert wait_for_run(url, launch_batch(url, batch)) == "SUCCESS"
        asset = graphql(url, METADATA, key={"path": ["teacher_actions"]})["assetOrError"]
        (event,) = asset["assetMaterializations"]
    assert event["partition"] == batch
    entries = {entry["label"]: entry for entry in event["metadataEntries"]}
    assert entries["calls_sent"]["intValue"] > 0
    assert entries["usd"]["floatValue"] > 0
    assert entries["cost_by_teacher"]["mdStr"].startswith("| | | |")
    assert entries["usd deepseek"]["floatValue"] > 0
