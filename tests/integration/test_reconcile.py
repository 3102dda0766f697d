"""Processes of Dagster are really killed; the next start ends their runs and frees their slots."""

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

from replay_pipeline.assets.dead_runs import is_running
from replay_pipeline.assets.instance import open_instance, ui_command
from replay_pipeline.stages.views.status import status_of
from replay_pipeline.testing import TeacherServer
from replay_pipeline.testing.sample import ANSWERS_FILE
from tests.integration.processes import wait_until
from tests.roots import pipeline_at, served_root
from tests.support.dagster_web import free_port, launch_batch, process_tree, sign_in


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


def prepare(root: Path, server: TeacherServer) -> str:
    work = served_root(root, server)
    (batch,) = work.ingest_new()
    with open_instance(work) as instance:
        instance.add_dynamic_partitions("trace_batch", [batch])
        assert not instance.get_runs()
    return batch


def claimed(instance: dg.DagsterInstance) -> set[str]:
    return instance.event_log_storage.get_concurrency_info("teachers").active_run_ids


def wait_for_the_end(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Wait for the run's own process: what was killed stands for it, and takes it along a little later."""
    (start,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_START)
    deadline = time.monotonic() + 60
    while is_running(start.get_dagster_event().pid, since=start.timestamp):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_after_the_whole_tree_was_killed_the_next_start_is_clean_and_goes_on(tmp_path):
    root = tmp_path / "data"
    with TeacherServer(ANSWERS_FILE, latency=60.0) as slow:
        batch = prepare(root, slow)
        port = free_port()
        command, environment = ui_command(pipeline_at(root).settings, port=port)
        with (tmp_path / "ui.log").open("wb") as log:
            ui = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        run_ids: list[str] = []

        def launched() -> bool:
            with contextlib.suppress(OSError):
                run_ids.append(launch_batch(sign_in(tmp_path / "ui.log"), batch))
            return bool(run_ids)

        with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
            wait_until(launched, ui)
            wait_until(lambda: claimed(instance) == {run_ids[0]}, ui)
            for pid in process_tree(ui.pid):
                with contextlib.suppress(ProcessLookupError):  # it ended with the one before
                    os.kill(pid, signal.SIGKILL)
            ui.wait(60)
            run = instance.get_run_by_id(run_ids[0])
            assert run is not None
            assert run.status == dg.DagsterRunStatus.STARTED
            wait_for_the_end(instance, run)
    with TeacherServer(ANSWERS_FILE, port=int(slow.base_url.split(":")[2].split("/")[0])):
        with open_instance(pipeline_at(root)) as instance:
            run = instance.get_run_by_id(run_ids[0])
            assert run is not None
            assert run.status == dg.DagsterRunStatus.FAILURE
            assert not claimed(instance)
        status = status_of(pipeline_at(root))["ledger"]
        assert status["calls"].get("answered", 0) == 0
