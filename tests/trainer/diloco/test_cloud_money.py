"""Launches in a cloud: what was started is known, and costs no more than it may, whatever happens."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http
import pytest

from tests.trainer.diloco.cloud_schedules import PLATFORMS, Rig
from tests.trainer.diloco.virtual_jobs import Clock, Killed, VirtualHub
from trainer.diloco import HFJobsExecutor
from trainer.diloco.executors.ledger import JobLedger
from trainer.diloco.launch import Launch, Limits, launch_command
from trainer.errors import (
    BudgetReachedError,
    LeaseHeldError,
    OuterLoopError,
    PlatformUnreachableError,
    ReplicaFailedError,
)

REPO = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # The client's own short retries of reads; the tests' clock does not reach them.
    monkeypatch.setattr(hub_http.time, "sleep", lambda s: None)


@pytest.fixture
def cloud():
    """Return a maker of a Hub on a clock, closed at the end."""
    hubs = []

    def make(deaths=(), gaps=()):
        hubs.append(VirtualHub(Clock(deaths), gaps))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()


@pytest.mark.parametrize("gap_s", [9, 300])
def test_a_network_that_is_away_is_waited_for_and_no_job_is_cancelled(cloud, tmp_path, gap_s):
    hub = cloud(gaps=[(600, gap_s), (1500, gap_s)])
    results = Rig(hub, tmp_path).launch()
    assert [result.attempt for result in results] == [0] * 4
    assert len(hub.jobs) == 4 + 1, "one each, and the probe"
    assert all(job.cancelled_at > job.ends for job in hub.jobs.values())


def test_a_network_that_is_away_while_jobs_are_started_costs_no_second_start(cloud, tmp_path):
    hub = cloud(gaps=[(0, 40), (95, 100)])
    hub.lost = 3
    rig = Rig(hub, tmp_path)
    rig.launch()
    assert len(hub.jobs) == 5
    assert rig.known() == set(hub.jobs)


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("n_started", [0, 2])
def test_a_launch_that_is_killed_while_starting_goes_on_with_what_it_started(
    cloud, tmp_path, n_started, is_sent
):
    hub = cloud()
    rig = Rig(hub, tmp_path)
    executor = rig.executor()
    start, numbers = executor._api.run_job, itertools.count()

    def run_job(**options):
        is_fatal = next(numbers) == n_started
        if is_fatal and not is_sent:
            raise Killed
        job = start(**options)
        if is_fatal:
            raise Killed
        return job

    executor._api.run_job = run_job
    with pytest.raises(Killed):
        rig.launch(executor)
    results = rig.launch()
    assert len(results) == 4
    assert len([job for job in hub.jobs.values() if not job.is_probe]) == 4, "not six"
    assert rig.known() == set(hub.jobs)


def test_a_probe_that_fails_is_the_only_paid_start(cloud, tmp_path):
    hub = cloud()
    rig = Rig(hub, tmp_path, lives={"-1": [[5, 1]]})
    with pytest.raises(ReplicaFailedError, match=r"(?s)no replica was started.*No module named"):
        rig.launch()
    assert len(hub.jobs) == 1


def test_a_cloud_launch_without_an_image_starts_nothing(tmp_path, capsys):
    options = ["--executor", "hf_jobs", "--uri", f"file://{tmp_path}", "--work-dir", str(tmp_path)]
    assert launch_command(options) == 2
    assert "--image is needed" in capsys.readouterr().err


def test_what_hangs_is_started_anew_once(cloud, tmp_path):
    hub = cloud()
    rig = Rig(hub, tmp_path, n=2, lives={"1": [[1e9, 0]]}, max_usd=None, max_hours=48, quorum=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "life_s", lambda self, n: 7200.0)
        with pytest.raises(ReplicaFailedError, match="timed out"):
            rig.launch()
    assert len([job for job in hub.jobs.values() if job.labels["rank"] == "1"]) == 2


def test_two_that_die_together_share_what_they_have_left(cloud, tmp_path):
    lives = {"0": [[600, 1], [3000, 0]], "1": [[610, 1], [3000, 0]]}
    hub = cloud(gaps=[(700, 300)])
    results = Rig(hub, tmp_path, lives=lives, max_usd=10.0).launch()
    assert [result.attempt for result in results] == [1, 1, 0, 0]
    assert hub.bill_usd <= 10.0


def test_a_replica_that_cannot_be_paid_again_is_lost_and_the_others_go_on(cloud, tmp_path):
    hub = cloud()
    lives = {"1": [[2900, 1]]}
    results = Rig(hub, tmp_path, lives=lives, max_usd=5.3).launch()
    assert [result.rank for result in results] == [0, 2, 3]
    assert hub.bill_usd <= 5.3


def test_a_users_error_is_not_started_again(cloud, tmp_path):
    hub = cloud()
    with pytest.raises(ReplicaFailedError, match="exit code 2"):
        Rig(hub, tmp_path, n=2, lives={"1": [[60, 2], [60, 0]]}).launch()
    assert len(hub.jobs) == 3
    assert not hub.running


@pytest.mark.parametrize("lag_s", [0, 120])
def test_a_start_without_an_answer_is_not_made_twice_however_late_it_is_listed(
    cloud, tmp_path, lag_s
):
    hub = cloud()
    hub.lost, hub.lag_s = 3, lag_s
    rig = Rig(hub, tmp_path)
    rig.launch(is_detached=True)
    assert len(hub.jobs) == 5
    assert rig.known() == set(hub.jobs)


def test_a_twin_that_is_listed_too_late_is_stopped_and_counted(cloud, tmp_path):
    hub = cloud()
    hub.lost, hub.lag_s = 1, 400
    rig = Rig(hub, tmp_path)
    rig.launch()
    assert rig.known() == set(hub.jobs)
    assert len(hub.jobs) == 6
    spent, _, _ = JobLedger(tmp_path / "outer" / "ledger.sqlite").totals_usd()
    assert hub.bill_usd <= spent


def test_a_lost_start_whose_lookup_is_refused_stays_on_the_books(cloud, tmp_path):
    hub = cloud()
    rig = Rig(hub, tmp_path, n=1)
    executor = rig.executor()

    def refused(**_):
        raise OuterLoopError("401")

    executor._api.list_jobs = refused
    hub.lost = 1
    with pytest.raises(PlatformUnreachableError, match="may run"):
        rig.launch(executor)
    (row,) = rig.rows()
    assert row.is_open
    assert row.reserved_usd > 0


def test_a_job_that_is_not_found_for_once_is_not_taken_for_dead(cloud, tmp_path):
    hub = cloud()
    rig = Rig(hub, tmp_path)
    rig.launch(is_detached=True)
    hub.clock.sleep(600)
    hub.blind = 3
    assert [result.attempt for result in rig.launch()] == [0] * 4


def test_lives_are_cut_to_what_the_ceiling_pays_and_a_restart_to_what_is_left(cloud, tmp_path):
    hub = cloud()
    lives = {"0": [[1e9, 0]], "1": [[300, 1], [1e9, 0]]}
    rig = Rig(hub, tmp_path, n=2, lives=lives, max_usd=4.0)
    with pytest.raises(BudgetReachedError, match="max_usd=4"):
        rig.launch()
    assert hub.bill_usd <= 4.0
    assert hub.bill_usd > 3.0, "the ceiling is used"
    assert not hub.running
    spent, held, _ = JobLedger(tmp_path / "outer" / "ledger.sqlite").totals_usd()
    assert hub.bill_usd <= spent <= 4.0
    assert held == 0


def test_a_second_launch_on_one_store_is_refused_until_the_first_has_lapsed(cloud, tmp_path):
    hub = cloud()
    rig = Rig(hub, tmp_path)
    rig.launch(is_detached=True)
    with pytest.raises(LeaseHeldError, match="belongs to a launch from"):
        rig.launch(work_dir="second")
    assert len(hub.jobs) == 5
    hub.clock.sleep(3600 * rig.limits.max_hours + 1)
    assert not hub.running
    rig.limits = Limits(max_usd=100.0, max_hours=2 * rig.limits.max_hours)
    rig.launch(is_detached=True)
    with pytest.raises(LeaseHeldError, match="belongs to a launch from"):
        rig.launch(work_dir="second")
    hub.clock.sleep(3600 * rig.limits.max_hours)
    assert len(rig.launch(work_dir="third")) == 4


def test_status_and_stop_from_the_command_line(cloud, tmp_path, capsys, monkeypatch):
    hub = cloud()
    monkeypatch.setattr(HFJobsExecutor, "now", staticmethod(hub.clock.now))
    monkeypatch.setattr(HFJobsExecutor, "sleep", staticmethod(hub.clock.sleep))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    work_dir = ["--work-dir", str(tmp_path / "outer")]
    rest = ["--image", "me/image", "--hardware", "a10g-large", "--uri", f"file://{tmp_path}/store"]
    started = ["--executor", "hf_jobs", "--max-usd", "6", "--detach", *rest]
    assert launch_command([*work_dir, *started]) == 0
    capsys.readouterr()
    hub.clock.sleep(600)
    assert launch_command([*work_dir, "--status"]) == 0
    told = capsys.readouterr().out
    assert "replica 1 (attempt 0): running, may cost $2.95" in told
    assert "probe (attempt 0): succeeded, cost $0.05" in told
    assert "max_usd=6.0" in told
    assert launch_command([*work_dir, "--stop"]) == 0
    assert not hub.running
    assert launch_command([*work_dir, "--status"]) == 0
    assert "$0.00 held" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_in_random_schedules_every_job_is_known_and_the_bill_stays_below_the_ceiling(
    platform,
):
    """A few of them; `python -m tests.trainer.diloco.cloud_schedules --count N` runs many."""
    command = ["-m", "tests.trainer.diloco.cloud_schedules", "--count", "3", "--platform", platform]
    done = subprocess.run(
        [sys.executable, *command], cwd=REPO, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"3 schedules, \d+ jobs, [1-3] of [1-3] payable", done.stdout)
