"""A month of nights under Dagster's own daemon: sessions grow, things break, nobody is there.

    python benchmarks/month.py [--small] [--json FILE] [--keep DIR]

Every day sessions are written and grow; every night the daemon's sensor finds them, its schedules
replay, publish and sum up. On given days the run's process is killed, its disk is full, the provider
is down, the budget is nearly nothing, the provider charges a new price. At the end every session is
in once, the ledger is the server's bill to the nano-dollar, and the dataset loads.

What is real: the daemon, its code server and its run processes, the teacher server and its bill, the
files, the ledger. What is not: time. The daemon is started with its clock moved through the two
functions that Dagster itself has for that, and with loops that look again after half a second; the
runs live in real time. A full disk is a limit on the size of the files that the run's process may
write, set from outside while it runs: every write beyond it fails as on a full disk.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dagster as dg

from benchmarks.shared_log import shared_log, wait_for_writers
from replay_pipeline.assets.instance import open_instance, ui_command
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.spending import completed_batches
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.views.status import status_of
from tests.support.sessions import SessionBuilder, ToolCall
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer

MONTH = {5: "crash", 10: "disk", 15: "outage", 20: "budget", 25: "price"}
SMALL = {1: "crash"}
ANSWER = {
    "content": "I look at the test first.",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "Read",
                "arguments": json.dumps({"file_path": "/home/dev/project/tests/test_parser.py"}),
            },
        }
    ],
}
PATIENCE_S = 300.0


# The daemon's process


def serve_daemon(clock: Path) -> None:
    """Dagster's daemon with the clock of `clock`: seconds ahead of the real one."""
    import dagster._daemon.controller as controller
    import dagster._daemon.monitoring.run_monitoring as monitoring
    import dagster._daemon.sensor as sensor
    import dagster._scheduler.scheduler as scheduler
    from dagster import _time
    from dagster._daemon.cli import run_command

    def ahead() -> float:
        return float(clock.read_text())

    _time._mockable_get_current_timestamp = lambda: time.time() + ahead()
    _time._mockable_get_current_datetime = lambda: datetime.now(UTC) + timedelta(seconds=ahead())
    scheduler._get_next_scheduler_iteration_time = lambda start_time: start_time + 0.5
    sensor.MIN_INTERVAL_LOOP_TIME = 0.5
    # Runs take place in real time: the days that are skipped are none in which one has hung.
    monitoring.get_current_timestamp = time.time
    # Under `dagster dev` one code server serves all the time; here it would start anew each night.
    controller.RELOAD_WORKSPACE_INTERVAL = 10**12
    run_command(["-w", os.environ["WORKSPACE"], "--log-level", "warning"])


# The world outside


class Sessions:
    """People at work: new sessions, and old ones that go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[SessionBuilder] = []
        self.n_sessions = 0

    def work(self, day: int) -> None:
        """One day: two new sessions, and yesterday's last one grows."""
        if self.open:
            self._steps(self.open[-1], 4, f"day {day}")
        for _ in range(2):
            self.n_sessions += 1
            self.open.append(SessionBuilder(f"month-{self.n_sessions}"))
            self._steps(self.open[-1], 6, f"task {self.n_sessions}")
        for builder in self.open[-3:]:
            builder.write(self.folder)

    def state_ids(self) -> set[str]:
        return {message.state_id for builder in self.open for message in builder.messages}

    def _steps(self, builder: SessionBuilder, n: int, what: str) -> None:
        module = len(builder.messages)
        builder.user(f"Go on with the parser, {what}: tests/test_parser.py fails, module {module}.")
        for i in range(n):
            call = ToolCall(
                "Read", {"file_path": f"{builder.cwd}/src/{what.replace(' ', '_')}_{i}.py"}
            )
            message = builder.assistant(f"Step {i} of {what}.", [call])
            builder.result(message.tool_use_ids[0], f"def part_{i}(): # {what}\n    return {i}\n")
        builder.assistant(f"That was all for {what}.")


class World:
    """The data root, its daemon and the teachers."""

    def __init__(self, folder: Path, server: TeacherServer) -> None:
        self.server = server
        self.root = folder / "data"
        self.clock = folder / "clock"
        self.log = folder / "daemon.log"
        self.sessions = Sessions(folder / "projects")
        self.today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        self.root.mkdir(parents=True)
        self.sessions.folder.mkdir()
        self.write_settings(budget_usd=5.0)
        self.clock.write_text("0")

    def write_settings(self, *, budget_usd: float) -> None:
        # The nights pass in seconds here: a call that a crash lost is given up as quickly.
        teachers = [t.model_copy(update={"timeout_s": 5.0}) for t in self.server.teachers()]
        write_settings(
            self.root,
            ingest={"sources": [self.sessions.folder], "settle_s": 0},
            replay={"max_nightly_usd": budget_usd, "teachers": teachers},
        )

    def pipeline(self) -> Pipeline:
        return Pipeline(Settings.load(data_dir=self.root))

    def start(self) -> "subprocess.Popen[bytes]":
        """Prepare as `replay-pipeline ui` does, switch everything on, and start the daemon."""
        _, environment = ui_command(self.pipeline().settings, port=3000)
        with open_instance(self.pipeline()):
            pass
        home = Path(environment["DAGSTER_HOME"])
        yaml = (home / "dagster.yaml").read_text().split("\n", 1)[1]
        (home / "dagster.yaml").write_text(
            yaml.replace("poll_interval_seconds: 30", "poll_interval_seconds: 1")
        )
        environment["WORKSPACE"] = str(home / "workspace.yaml")
        for kind in ("schedule", "sensor"):
            command = [sys.executable, "-m", "dagster", kind, "start", "--start-all"]
            command += ["-w", environment["WORKSPACE"]]
            subprocess.run(command, env=environment, check=True, capture_output=True)
        with shared_log(self.log) as log:
            return subprocess.Popen(
                [sys.executable, __file__, "--daemon", str(self.clock)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def jump(self, day: int, hour: int) -> None:
        """Put the daemon's clock to an hour of a day; never back."""
        then = self.today + timedelta(days=day, hours=hour, seconds=5)
        ahead = (then - datetime.now(UTC)).total_seconds()
        temporary = self.clock.with_suffix(".new")
        temporary.write_text(str(max(ahead, float(self.clock.read_text()))))
        temporary.replace(self.clock)


def wait(what: str, done: Callable[[], object], daemon: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        if daemon.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{what}: {'the daemon has ended' if daemon.poll() else 'no end'}")
        time.sleep(0.1)


# The nights


class Night:
    """One night, and what goes wrong in it."""

    def __init__(
        self, world: World, instance: dg.DagsterInstance, daemon: "subprocess.Popen[bytes]"
    ) -> None:
        self.world, self.instance, self.daemon = world, instance, daemon

    def pass_by(self, day: int, event: str | None) -> list[str]:
        """Let one night happen. Returns how each of its runs ended."""
        faults: list[dict[str, Any]] = []
        if event == "outage":
            faults = [{"kind": "status", "status": 503, "retry_after_s": 3600.0}]
        if event == "price":
            faults = [{"kind": "overcharge", "factor": 1.5}]
        self.world.server.set_faults(faults)
        self.world.write_settings(budget_usd=0.0002 if event == "budget" else 5.0)
        self.world.jump(day, 1)
        wait("sensor", self._has_all_partitions, self.daemon)
        ended = [self._run(day, 2, "replay_batches", event)]
        self._check_effect(event, ended[0])
        ended.append(self._run(day, 5, "publish", None))
        ended.append(self._run(day, 6, "summarize_night", None))
        return ended

    def _check_effect(self, event: str | None, ended: str) -> None:
        """See that what was to go wrong did go wrong: else the month proves nothing."""
        work = self.world.pipeline()
        n_open = len(set(work.batches()) - completed_batches(work))
        n_dearer = self.world.server.bill().faults.get("overcharge", 0)
        happened = {
            "crash": ended == "FAILURE",
            "disk": ended == "FAILURE",
            "outage": ended == "SUCCESS" and n_open > 0,
            "budget": ended == "SUCCESS" and n_open > 0,
            "price": ended == "SUCCESS" and n_open == 0 and n_dearer > 0,
            None: ended == "SUCCESS" and n_open == 0,
        }
        assert happened[event], f"{event}: the run ended with {ended}, {n_open} batches are open"

    def _has_all_partitions(self) -> bool:
        work = self.world.pipeline()
        found = set(self.instance.get_dynamic_partitions("trace_batch"))
        return set(work.batches()) == found and not self._new_bytes(work)

    def _new_bytes(self, work: Pipeline) -> bool:
        from replay_pipeline.ingesters import discover, read_manifest

        known = [read_manifest(key, work.root.path) for key in work.batches()]
        return bool(discover(work.settings.ingest.sources, known=known))

    def _run(self, day: int, hour: int, job: str, event: str | None) -> str:
        runs = dg.RunsFilter(job_name=job)
        n_before = self.instance.get_runs_count(runs)
        n_paid = self.world.server.bill().n_charged
        self.world.jump(day, hour)
        wait(job, lambda: self.instance.get_runs_count(runs) > n_before, self.daemon)
        if event in ("crash", "disk"):
            pid = self._worker(runs)
            if event == "crash":
                wait(
                    "first paid calls",
                    lambda: self.world.server.bill().n_charged > n_paid + 2,
                    self.daemon,
                )
                os.kill(pid, signal.SIGKILL)
            else:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (65_536, 65_536))
        wait(f"end of {job}", lambda: self._last(runs).is_finished, self.daemon)
        return self._last(runs).status.value

    def _last(self, runs: dg.RunsFilter) -> dg.DagsterRun:
        return self.instance.get_runs(runs, limit=1)[0]

    def _worker(self, runs: dg.RunsFilter) -> int:
        starts: list[Any] = []

        def has_started() -> bool:
            starts[:] = self.instance.all_logs(
                self._last(runs).run_id, of_type=dg.DagsterEventType.RUN_START
            )
            return bool(starts)

        wait("start", has_started, self.daemon)
        return starts[-1].get_dagster_event().pid


def checked(world: World) -> dict[str, Any]:
    """What must hold at the end. Raises AssertionError where it does not."""
    from datasets import load_dataset

    work = world.pipeline()
    status = status_of(work)
    ids = work.root.read_all("states")["state_id"].to_pylist()
    twice = [name for name, n in Counter(ids).items() if n > 1]
    assert not twice, f"states that are in twice: {twice[:3]}"
    assert set(ids) == world.sessions.state_ids(), "states are missing"
    sessions = {row["session_id"] for row in work.root.read_all("sessions").to_pylist()}
    assert sessions == {builder.session_id for builder in world.sessions.open}
    bill = world.server.bill()
    ledger = status["ledger"]
    assert round(ledger["spent_usd"] * 1e9) == bill.total_nano, (
        ledger["spent_usd"],
        bill.total_usd,
    )
    assert ledger["unknown_usd"] == ledger["held_usd"] == 0
    assert completed_batches(work) == set(work.batches()), "batches with open questions"
    rows = load_dataset(str(work.settings.dataset_dir()))
    n_rows = sum(split.num_rows for split in rows.values())
    assert n_rows == work.root.read_all("normalized_pairs").num_rows > 0
    return {
        "sessions": len(sessions),
        "states": len(ids),
        "batches": len(work.batches()),
        "calls": bill.n_charged,
        "paid_twice": bill.n_duplicates,
        "spent_usd": ledger["spent_usd"],
        "dataset_rows": n_rows,
    }


def live(folder: Path, n_days: int, events: dict[int, str]) -> dict[str, Any]:
    """Let the days pass, then look at what is there."""
    began = time.perf_counter()
    nights: dict[str, int] = Counter()
    with TeacherServer(script=ANSWER, latency=0.15) as server:
        world = World(folder, server)
        daemon = world.start()
        try:
            with dg.DagsterInstance.from_config(str(world.root / ".dagster")) as instance:
                night = Night(world, instance, daemon)
                for day in range(1, n_days + 1):
                    world.sessions.work(day)
                    ended = night.pass_by(day, events.get(day))
                    nights.update(ended)
                    seconds = time.perf_counter() - began
                    print(f"day {day:2d} {events.get(day, ''):7s} {' '.join(ended)}  {seconds:.0f} s",
                          flush=True)  # fmt: skip
        finally:
            os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
            wait_for_writers(world.log)
        figures = checked(world)
    return {"days": n_days, "events": sorted(set(events.values())), "runs": dict(nights),
            **figures, "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="two days instead of thirty")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    parser.add_argument("--daemon", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.daemon:
        serve_daemon(arguments.daemon)
        return
    days, events = (2, SMALL) if arguments.small else (30, MONTH)
    with tempfile.TemporaryDirectory(prefix="month-") as temporary:
        folder = (arguments.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        figures = live(folder, days, events)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
