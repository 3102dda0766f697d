"""One contract for all executors: the real clients, against servers that speak the protocol."""

import dataclasses
import itertools
import json
import sys
import threading

import huggingface_hub.constants
import pytest

from tests.trainer.diloco.cloud_servers import JobsHub, SandboxCloud
from trainer.diloco import (
    HFJobsExecutor,
    LocalProcessExecutor,
    ModalExecutor,
    ReplicaHandle,
    ReplicaState,
    supervise,
)
from trainer.errors import OuterTimeoutError, ReplicaFailedError, TrainerConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = JobsHub(tmp_path_factory.mktemp("hub"))
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    cloud = SandboxCloud(tmp_path_factory.mktemp("cloud"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_SERVER_URL", cloud.url)
        patch.setenv("MODAL_TOKEN_ID", "ak-x")
        patch.setenv("MODAL_TOKEN_SECRET", "as-x")
        yield cloud
    cloud.close()


def quick(executor):
    executor.sleep = lambda s: threading.Event().wait(min(s, 0.02))
    return executor


@pytest.fixture(params=["local", "hf_jobs", "modal", "modal_gpu"])
def make(request, tmp_path, monkeypatch):
    """Return a maker of executors that all see the same platform."""
    if request.param == "local":
        return lambda: LocalProcessExecutor(tmp_path)
    if request.param == "hf_jobs":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        url = request.getfixturevalue("hub").url
        return lambda: quick(
            HFJobsExecutor("cpu-basic", endpoint=url, token="hf_x", python=sys.executable)
        )
    request.getfixturevalue("cloud")
    gpu = "T4" if request.param == "modal_gpu" else None
    return lambda: ModalExecutor("python:3.12", gpu, python=sys.executable)


def launch(executor, code, n=2, **options):
    return executor.launch_replicas(n, sys.executable, ["-c", code], **options)


RANK = "import os; rank = int(os.environ['REPLICA_RANK'])\n"


def test_each_replica_finds_its_place_and_its_words_come_back(make):
    executor = make()
    code = "import os, sys; print(*sys.argv[1:], os.environ['REPLICA_RANK'], os.environ['COLOUR'])"
    arguments = ["-c", code, "{rank}/{world_size}"]
    handles = executor.launch_replicas(3, sys.executable, arguments, env={"COLOUR": "blue"})
    results = executor.collect(handles, timeout_s=60, poll_s=0.02)
    assert [r.rank for r in results] == [0, 1, 2]
    assert [r.log.strip() for r in results] == [f"{i}/3 {i} blue" for i in range(3)]
    assert [s.exit_code for s in executor.poll(handles)] == [0, 0, 0]


def test_failure_of_one_replica_names_it_with_its_code_and_last_words(make):
    executor = make()
    code = RANK + "print('last words', rank); raise SystemExit(3 if rank == 1 else 0)"
    handles = launch(executor, code)
    with pytest.raises(ReplicaFailedError, match=r"(?s)replica 1 .*exit code 3.*last words 1"):
        executor.collect(handles, timeout_s=60, poll_s=0.02)


def test_a_replica_that_outlives_its_time_is_ended(make):
    executor = make()
    handles = launch(executor, "import time; time.sleep(60)", 1, timeout_s=1)
    with pytest.raises(ReplicaFailedError, match="timed out"):
        executor.collect(handles, timeout_s=60, poll_s=0.05)
    assert executor.poll(handles)[0].state is ReplicaState.TIMED_OUT


def test_polling_does_not_wait_and_cancelling_ends(make):
    executor = make()
    handles = launch(executor, "import time; time.sleep(60)")
    assert not any(status.state.is_final for status in executor.poll(handles))
    with pytest.raises(OuterTimeoutError, match=r"ranks \[0, 1\] still run"):
        executor.collect(handles, timeout_s=0, poll_s=0.01)
    executor.cancel(handles)
    assert {status.state for status in executor.poll(handles)} == {ReplicaState.CANCELLED}
    executor.cancel(handles)


def test_supervision_starts_dead_replicas_anew_until_all_succeed(make):
    executor = make()
    code = RANK + "raise SystemExit(rank == 1 and os.environ['REPLICA_ATTEMPT'] < '2')"
    handles = supervise(executor, launch(executor, code), poll_s=0.02)
    assert [handle.attempt for handle in handles] == [0, 2]


def test_another_process_takes_over_the_watch_from_saved_handles(make):
    first = make()
    handles = launch(first, "print('hello')")
    first.collect(handles, timeout_s=60, poll_s=0.02)
    saved = [ReplicaHandle.from_json(handle.to_json()) for handle in handles]
    assert saved == handles
    second = make()
    assert [status.exit_code for status in second.poll(saved)] == [0, 0]
    assert second.logs(saved[0]).strip() == "hello"


def test_secrets_reach_the_replica_and_not_the_handle(make):
    executor = make()
    code = "import os; print(len(os.environ['KEY']))"
    handles = launch(executor, code, 1, secrets={"KEY": "very-secret"})
    assert executor.collect(handles, timeout_s=60, poll_s=0.02)[0].log.strip() == "11"
    assert "very-secret" not in json.dumps([handle.to_json() for handle in handles])


@pytest.fixture
def hf(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return quick(
        HFJobsExecutor("a10g-large", endpoint=hub.url, token="hf_x", python=sys.executable)
    )


def test_hf_jobs_gets_flavor_image_labels_and_secrets_apart(hub, hf):
    handles = launch(hf, "print()", 1, secrets={"KEY": "s"}, env={"A": "b"}, run_id="run-7")
    hf.collect(handles, timeout_s=60, poll_s=0.02)
    body = hub.bodies[-1]
    assert body["flavor"] == "a10g-large"
    assert body["dockerImage"] == "python:3.12"
    assert body["labels"].items() >= {"run": "run-7", "rank": "0", "attempt": "0"}.items()
    assert body["secrets"] == {"KEY": "s"}
    assert "KEY" not in body["environment"]


def test_hf_jobs_cancels_what_it_started_when_the_next_is_refused(hub, hf):
    before = set(hub.jobs)
    hub.failing[:] = ["", "402"]
    with pytest.raises(ReplicaFailedError, match="replica 1 was refused"):
        launch(hf, "import time; time.sleep(60)", 2)
    (started,) = set(hub.jobs) - before
    assert hub.jobs[started].ended_by == "cancel"


@pytest.mark.parametrize("gpu", [None, "A100"])
def test_modal_starts_no_twin_after_a_lost_answer_and_waits_while_it_is_away(cloud, gpu):
    executor = quick(ModalExecutor("python:3.12", gpu, python=sys.executable))
    before, requests = len(cloud.jobs), itertools.count()
    cloud.failing[:] = ["lost"] * 4
    handles = launch(executor, "import time; time.sleep(1); print('once')", 2, run_id=f"r-{gpu}")
    cloud.is_offline = lambda: next(requests) in range(3, 20)
    try:
        finished = supervise(executor, handles, poll_s=0.02)
    finally:
        cloud.is_offline = lambda: False
    assert next(requests) > 20
    assert len(cloud.jobs) == before + 2
    assert not any(job.ended_by for job in list(cloud.jobs.values())[before:])
    assert [one.log.strip() for one in executor.collect(finished, timeout_s=60)] == ["once"] * 2


def test_prices_are_those_of_the_platforms_and_bound_every_life(hf):
    assert hf.usd_per_hour == pytest.approx(1.5)
    assert hf.bound_usd(61) == pytest.approx(3 * 0.025), "two minutes, and the one begun last"
    modal = ModalExecutor("python:3.12", "H100:2", cpu=4, memory_mib=16384)
    assert modal.usd_per_hour == pytest.approx(3600 * (2 * 0.001097 + 4 * 3.93e-5 + 16 * 6.67e-6))
    with pytest.raises(TrainerConfigError, match="--usd-per-hour"):
        _ = ModalExecutor("python:3.12", "Z9").usd_per_hour
    hf.hardware, hf._usd_per_hour = "abacus", None
    with pytest.raises(TrainerConfigError, match="choose one of a10g-large, cpu-basic"):
        _ = hf.usd_per_hour


@pytest.mark.parametrize("gpu", [None, "A100"])
def test_modal_lists_what_a_run_has_and_forgets_what_is_gone(cloud, gpu):
    executor = ModalExecutor("python:3.12", gpu, python=sys.executable)
    (handle,) = launch(executor, "import time; time.sleep(60)", 1, run_id=f"outer-{gpu}-3")
    (found,) = executor.listed(f"outer-{gpu}-3")
    assert (found.job_id, found.label) == (handle.job_id, handle.label)
    gone = dataclasses.replace(handle, job_id=handle.job_id[:-4] + "0000", run_id="other")
    assert executor.poll([gone])[0].message.endswith("does not know it any more")
    assert executor.cancel([gone, handle]) == []
    assert executor.listed(handle.run_id) == []
