"""Processes of Dagster are really killed; the next start ends their runs and frees their slots."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from replay_pipeline.instance import open_instance, prepare_home, ui_command
from replay_pipeline.pipeline import Pipeline
from replay_pipeline.reconcile import is_running
from replay_pipeline.sample import ANSWERS_FILE, SESSIONS_DIR
from replay_pipeline.settings import Settings, child_environment
from replay_pipeline.testing import TeacherServer


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


def at(root: Path) -> Pipeline:
    return Pipeline(Settings.load(data_dir=root))


def prepare(root: Path, server: TeacherServer) -> str:
    root.mkdir()
    lines = ["[ingest]", f"sources = [{json.dumps(str(SESSIONS_DIR))}]"]
    for teacher in server.teachers():
        lines += [
            "[[replay.teachers]]",
            f"name = '{teacher.name}'",
            f"model = '{teacher.model}'",
            f"base_url = '{teacher.base_url}'",
            "api_key_env = ''",
            "dialect = 'openrouter'",
        ]
    (root / "settings.toml").write_text("\n".join(lines) + "\n")
    (batch,) = at(root).ingest_new()
    with open_instance(at(root)) as instance:
        instance.add_dynamic_partitions("trace_batch", [batch])
        assert not instance.get_runs()
    return batch


def wait_until(what: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while not what():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def claimed(instance: dg.DagsterInstance) -> set[str]:
    return instance.event_log_storage.get_concurrency_info("teachers").active_run_ids


def materialize(root: Path, batch: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "dagster"),
            *("asset", "materialize", "--select", "teacher_actions"),
            *("--partition", batch, "-m", "replay_pipeline.definitions"),
        ],
        env=child_environment(DAGSTER_HOME=str(prepare_home(root)), REPLAY_DATA=str(root)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_killed_run_worker_leaves_no_run_and_no_slot_behind(tmp_path):
    root = tmp_path / "data"
    with TeacherServer(ANSWERS_FILE, latency=60.0) as server:
        batch = prepare(root, server)
        home = str(root / ".dagster")
        worker = materialize(root, batch)
        with dg.DagsterInstance.from_config(home) as instance:
            wait_until(lambda: claimed(instance), worker)
            with open_instance(at(root)):
                (run,) = instance.get_runs()
                assert run.status == dg.DagsterRunStatus.STARTED, "a living run is left alone"
            worker.kill()
            worker.wait(60)
            assert claimed(instance) == {run.run_id}
            with open_instance(at(root)) as again:
                (ended,) = again.get_runs()
                assert ended.status == dg.DagsterRunStatus.FAILURE
                assert not claimed(again)
                (event,) = again.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE)
                assert "run the same batches again" in event.message


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) { __typename ... on LaunchRunSuccess { run { runId } } }
}
"""


def launch(url: str, batch: str) -> str | None:
    params = {
        "selector": {
            "repositoryLocationName": "replay_pipeline",
            "repositoryName": "__repository__",
            "pipelineName": "replay_batches",
        },
        "mode": "default",
        "runConfigData": {},
        "executionMetadata": {"tags": [{"key": "dagster/partition", "value": batch}]},
    }
    request = urllib.request.Request(
        f"{url}/graphql",
        data=json.dumps({"query": LAUNCH, "variables": {"params": params}}).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
    except OSError:
        return None
    launched = (answer.get("data") or {}).get("launchRun") or {}
    return launched.get("run", {}).get("runId")


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return [pid, *(p for child in children.get(pid, []) for p in tree(child))]


@pytest.mark.slow
def test_after_the_whole_tree_was_killed_the_next_start_is_clean_and_goes_on(tmp_path):
    root = tmp_path / "data"
    with TeacherServer(ANSWERS_FILE, latency=60.0) as slow:
        batch = prepare(root, slow)
        port = free_port()
        command, environment = ui_command(at(root).settings, port=port)
        with (tmp_path / "ui.log").open("wb") as log:
            ui = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        run_ids: list[str] = []

        def launched() -> bool:
            run_ids.extend(filter(None, [launch(f"http://127.0.0.1:{port}", batch)]))
            return bool(run_ids)

        with dg.DagsterInstance.from_config(str(root / ".dagster")) as instance:
            wait_until(launched, ui)
            wait_until(lambda: claimed(instance) == {run_ids[0]}, ui)
            for pid in tree(ui.pid):
                os.kill(pid, signal.SIGKILL)
            ui.wait(60)
            run = instance.get_run_by_id(run_ids[0])
            assert run is not None
            assert run.status == dg.DagsterRunStatus.STARTED
    with TeacherServer(ANSWERS_FILE, port=int(slow.base_url.split(":")[2].split("/")[0])):
        with open_instance(at(root)) as instance:
            run = instance.get_run_by_id(run_ids[0])
            assert run is not None
            assert run.status == dg.DagsterRunStatus.FAILURE
            assert not claimed(instance)
        status = at(root).status()["ledger"]
        assert status["calls"].get("answered", 0) == 0
