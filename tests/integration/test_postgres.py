"""Dagster's records and the ledger on a real PostgreSQL server."""

from datetime import UTC, datetime

import dagster as dg
import pytest

from replay_pipeline.assets.automation import nightly_replay
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.instance import open_instance, prepare_home
from replay_pipeline.assets.reporting import trace_batch
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.errors import ConfigError, StorageError
from replay_pipeline.stages.views.status import status_of
from tests.postgres import fresh_database, running_postgres
from tests.roots import pipeline_at, project_root

pytestmark = pytest.mark.slow

BY_BATCH = ["trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs"]


@pytest.fixture(scope="module")
def server():
    with running_postgres() as running:
        yield running


@pytest.fixture
def database(server, monkeypatch):
    """A fresh database, named where a deployment names it: in the environment."""
    url = fresh_database(server)
    monkeypatch.setenv("REPLAY_DAGSTER_DB", url.replace("postgresql://", "postgresql+psycopg2://"))
    monkeypatch.setenv("REPLAY_LEDGER", url)
    return url


@pytest.fixture
def root(tmp_path, monkeypatch):
    project_root(tmp_path / "data")
    monkeypatch.setenv("REPLAY_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_night_is_planned_run_and_recorded_on_the_server(database, root):
    work = pipeline_at(root)
    work.find_batches()
    resource = PipelineResource()
    with open_instance(work) as instance:
        assert "Postgres" in type(instance.event_log_storage).__name__
        instance.add_dynamic_partitions(trace_batch.name or "", work.batches())
        context = dg.build_schedule_context(
            instance=instance, scheduled_execution_time=datetime(2026, 1, 2, 2, tzinfo=UTC)
        )
        planned = nightly_replay(context, pipeline=resource)
        assert isinstance(planned, list)
        for request in planned:
            job = define(resource).resolve_job_def(request.job_name or "replay_batches")
            done = job.execute_in_process(
                instance=instance, tags=request.tags, run_config=request.run_config
            )
            assert done.success
        for asset in BY_BATCH:
            shown = instance.get_materialized_partitions(dg.AssetKey(asset))
            assert shown == set(work.batches())
    assert not list((root / ".dagster").rglob("*.db"))
    assert not list(root.glob("*ledger*"))
    assert status_of(work)["ledger"]["spent_usd"] > 0
    assert database not in "".join(
        path.read_text("utf-8", "replace") for path in root.rglob("*") if path.is_file()
    )


def test_a_run_on_another_machine_is_left_alone(database, root):
    work = pipeline_at(root)
    with open_instance(work) as instance:
        run = instance.create_run_for_job(
            define(PipelineResource()).resolve_job_def("publish"),
            status=dg.DagsterRunStatus.STARTED,
        )
    with open_instance(work) as instance:
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.STARTED
    with open_instance(work, runs_are_here=True) as instance:
        assert instance.get_run_by_id(run.run_id).status == dg.DagsterRunStatus.FAILURE


def test_a_server_that_is_not_there_is_told_without_the_password(root, monkeypatch):
    monkeypatch.setenv("REPLAY_DAGSTER_DB", "postgresql+psycopg2://me:planted@127.0.0.1:1/none")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with (
        pytest.raises(StorageError, match="REPLAY_DAGSTER_DB") as raised,
        open_instance(pipeline_at(root)),
    ):
        pass
    assert "planted" not in str(raised.value)


def test_settings_of_ones_own_that_ignore_the_database_are_told(database, tmp_path):
    home = prepare_home(tmp_path)
    assert "REPLAY_DAGSTER_DB" in (home / "dagster.yaml").read_text()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with pytest.raises(ConfigError, match="postgres_url"):
        prepare_home(tmp_path)


def test_a_driver_that_cannot_work_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_DAGSTER_DB", "postgresql://me@127.0.0.1/name")
    with pytest.raises(ConfigError, match=r"postgresql\+psycopg2://"):
        prepare_home(tmp_path)
