"""Nights that degrade and go on: processes of Dagster are really killed, and teachers stop answering."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from replay_pipeline.assets import dead_runs, serve
from replay_pipeline.assets.automation import night_goes_on
from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.dead_runs import is_running
from replay_pipeline.assets.instance import open_instance, ui_command
from replay_pipeline.assets.night import failure_facts
from replay_pipeline.assets.resources import PipelineResource
from tests.integration.processes import instance_of, wait_until
from tests.roots import PROJECT, pipeline_at, served_root
from tests.support.dagster_web import launch_batch, process_tree, sign_in
from tests.support.ports import free_port
from tests.support.teachers import TeacherServer

pytestmark = pytest.mark.slow

LOOK = {"role": "assistant", "content": "I look first."}


def daemon_below(pid: int) -> int | None:
    """The process of Dagster's daemon below `ui`."""
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            if b"dagster._daemon" in Path(f"/proc/{each}/cmdline").read_bytes():
                return each
    return None


def claimed(instance: dg.DagsterInstance) -> set[str]:
    return instance.event_log_storage.get_concurrency_info("teachers").active_run_ids


def wait_for_the_end(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Wait for the run's own process: what was killed stands for it, and takes it along a little later."""
    (start,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_START)
    deadline = time.monotonic() + 60
    while is_running(start.get_dagster_event().pid, since=start.timestamp):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_daemon_is_started_again_and_killed_runs_go_on_without_paying_twice(tmp_path):
    """First the daemon is killed, then a run's own process, then all of the tree at once."""
    root, log = tmp_path / "data", tmp_path / "ui.log"
    with TeacherServer(script=LOOK, latency=0.5) as server:
        work = served_root(root, server, sessions=PROJECT)
        batch = work.ingest_new()[0]
        with open_instance(work) as instance:
            instance.add_dynamic_partitions("trace_batch", [batch])
        command, environment = ui_command(work.settings, port=free_port())
        with log.open("wb") as file:
            ui = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        run_ids: list[str] = []

        def launched() -> bool:
            with contextlib.suppress(OSError):
                run_ids.append(launch_batch(sign_in(log), batch))
            return bool(run_ids)

        def workers() -> list[int]:
            starts = instance.all_logs(run_ids[0], of_type=dg.DagsterEventType.RUN_START)
            return [each.get_dagster_event().pid or 0 for each in starts]

        def statuses() -> list[str]:
            return sorted(run.status.value for run in instance.get_runs())

        try:
            with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
                wait_until(lambda: daemon_below(ui.pid), ui, log=log)
                os.kill(daemon_below(ui.pid) or 0, signal.SIGKILL)
                wait_until(launched, ui, log=log)
                wait_until(lambda: server.bill().n_charged > 5, ui, log=log)
                for pid in workers():
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda: statuses() == ["FAILURE", "SUCCESS"], ui, log=log)
                assert instance.get_materialized_partitions(dg.AssetKey("normalized_pairs"))
                assert "ended with signal 9" in log.read_text()
                # What was in flight when the worker was killed may be asked again; the rest is kept.
                assert server.bill().n_duplicates <= 64

                for path in (*root.glob("ledger.sqlite*"), *root.glob("receipts/replay/*")):
                    path.unlink()  # so that there is something to buy
                last = launch_batch(sign_in(log), batch)
                wait_until(lambda: claimed(instance) == {last}, ui, log=log)
                assert ui.poll() is None
                for pid in process_tree(ui.pid):
                    with contextlib.suppress(ProcessLookupError):  # it ended with the one before
                        os.kill(pid, signal.SIGKILL)
                ui.wait(60)
                run = instance.get_run_by_id(last)
                assert run is not None
                assert run.status == dg.DagsterRunStatus.STARTED
                wait_for_the_end(instance, run)
        finally:
            ui.send_signal(signal.SIGTERM)
            ui.wait(120)
    with open_instance(pipeline_at(root)) as instance:
        run = instance.get_run_by_id(last)
        assert run is not None
        assert run.status == dg.DagsterRunStatus.FAILURE
        assert not claimed(instance)


def test_a_process_is_told_from_one_that_was_given_its_number_later():
    me = os.getpid()
    now = datetime.now(UTC).timestamp()
    assert is_running(me, since=now)
    assert not is_running(me, since=now - 10 * 86_400 * 365)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert is_running(child.pid, since=datetime.now(UTC).timestamp())
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(child.pid, since=datetime.now(UTC).timestamp())
    assert not is_running(child.pid, since=datetime.now(UTC).timestamp())


def test_a_run_that_ends_well_while_it_is_looked_at_stays_green(tmp_path, monkeypatch):
    with instance_of(tmp_path) as instance:
        run = create_run_for_test(instance, job_name="ours", status=dg.DagsterRunStatus.STARTED)

        def has_just_ended(*_: object) -> bool:
            event = dg.DagsterEvent(dg.DagsterEventType.RUN_SUCCESS.value, run.job_name)
            instance.report_dagster_event(event, run.run_id)
            return False

        monkeypatch.setattr(dead_runs, "_is_alive", has_just_ended)
        assert dead_runs.reconcile(instance) == []
        ended = instance.get_run_by_id(run.run_id)
        assert ended is not None
        assert ended.status == dg.DagsterRunStatus.SUCCESS


def test_a_run_whose_server_dies_while_it_comes_up_has_a_minute_to_start(tmp_path, monkeypatch):
    with instance_of(tmp_path) as instance:
        run = create_run_for_test(instance, job_name="ours", status=dg.DagsterRunStatus.STARTING)
        event = dg.DagsterEvent(dg.DagsterEventType.RUN_STARTING.value, run.job_name)
        instance.report_dagster_event(event, run.run_id)
        assert dead_runs.reconcile(instance) == []
        monkeypatch.setattr(dead_runs, "_COMES_UP_S", 0.0)
        assert dead_runs.reconcile(instance) == [run.run_id]


def test_a_daemon_that_dies_again_and_again_ends_with_an_exit_code_of_its_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(serve, "python", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(serve, "_POLL_S", 0.01)
    with serve._daemon("workspace.yaml") as given_up:
        assert given_up.wait(60)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == serve._MOST_DEATHS
    assert told[0].startswith("Dagster's daemon ended with code 3: it is started again")
    assert told[-1].startswith("error: Dagster's daemon ended 5 times")


@pytest.mark.parametrize(("share", "outcome"), [(0.6, "fails"), (0.2, "warns")])
def test_a_night_whose_calls_fail_is_told_within_its_own_run(tmp_path, monkeypatch, share, outcome):
    root = tmp_path / "data"
    monkeypatch.setenv("REPLAY_DATA", str(root))
    fault = {"kind": "malformed_arguments", "probability": share}
    with TeacherServer(script=LOOK, faults=[fault]) as server:
        work = served_root(root, server, sessions=PROJECT)
        work.find_batches()
        batch = work.batches()[0]
        with instance_of(root) as instance:
            instance.add_dynamic_partitions("trace_batch", work.batches())
            job = define(PipelineResource()).resolve_job_def("replay_batches")
            tags = {"dagster/partition": batch, "dagster/schedule_name": "nightly_replay"}
            done = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
            assert done.success is (outcome == "warns")
            events = instance.all_logs(
                done.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION
            )
            found = [each.get_dagster_event().asset_check_evaluation_data for each in events]
            (told,) = [each for each in found if each.asset_check_key.name == "calls_are_answered"]
            assert not told.passed
            assert "calls failed (" in told.description
            if outcome == "fails":
                run = instance.get_run_by_id(done.run_id)
                assert run is not None
                why = failure_facts(instance, run, secrets=[])["why"]
                assert why.startswith("calls_are_answered: ")
                assert "calls failed (" in why
            (follows,) = night_goes_on(dg.build_sensor_context(instance=instance))
            assert follows.job_name == ("publish" if outcome == "warns" else "summarize_night")
    assert pipeline_at(root).root.has("normalized_pairs", batch) is (outcome == "warns")
