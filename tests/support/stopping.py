"""The ways in which the program is started, stopped while it buys, against a server with its own bill."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
from dagster._cli.job import execute_launch_command
from dagster._cli.workspace.cli_target import WorkspaceOpts

from replay_pipeline.assets.instance import prepare_home
from replay_pipeline.replay import ledger_status
from replay_pipeline.storage.processes import child_environment
from replay_pipeline.testing.sample import ANSWERS_FILE
from tests.integration.processes import wait_until
from tests.roots import pipeline_at, served_root
from tests.support.dagster_web import process_tree
from tests.support.ports import free_port
from tests.support.teachers import TeacherServer

LATENCY_S = 1.0
"""How long every call takes."""
PATIENCE_S = 10.0
"""What a busy machine may take to hear the signal; what there is to buy takes three times as long."""
N_IN_FLIGHT = 8
"""Calls at once: what a kill may lose."""
_N_BEFORE = 10
"""Answers that are paid for when the signal comes."""
FORMS = ("command line", "cron", "compose entry point", "Kubernetes job")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What came of one signal."""

    n_late: int
    """Calls that reached the server later than `PATIENCE_S` after the signal."""
    n_lost: int
    """Answers that were charged and are not in the ledger."""
    n_twice: int
    """Calls that were charged twice, once the same work was done again."""
    n_off_nano: int
    """Nanodollars by which the ledger and the bill differ then."""
    seconds: float
    """From the signal to the end of the last process."""
    status: int


def stop(form: str, number: signal.Signals, folder: Path, *, is_first: bool, is_deaf: bool) -> Stop:
    """Start the program in one of the `FORMS`, send it a signal while it buys, and look at the bill.

    Args:
        form: how it is started.
        number: the signal; it goes to the one process that whoever started the program knows.
        folder: an empty folder.
        is_first: as process 1 of a namespace of its own, which `unshare` makes.
        is_deaf: started with the signals ignored, as a shell starts background jobs.
    """
    root = folder / "data"
    with TeacherServer(ANSWERS_FILE, latency=LATENCY_S) as server:
        work = served_root(root, server)
        file = root / "settings.toml"
        named = f"[replay]\nmax_concurrency = {N_IN_FLIGHT}\n"
        file.write_text(file.read_text("utf-8").replace("[replay]\n", named), "utf-8")
        batches = work.ingest_new()
        environment = child_environment(
            REPLAY_DATA=str(root),
            REPLAY_SETTINGS=str(root / "settings.toml"),
            DAGSTER_HOME=str(_home_without_queue(root)),
        )
        with ExitStack() as stack:
            process = stack.enter_context(
                _started(form, environment, folder / "log", is_first=is_first, is_deaf=is_deaf)
            )
            if form == "compose entry point":
                _launch_run(root, process, batches[0], folder / "log")
            wait_until(
                lambda: server.bill().n_charged >= _N_BEFORE, process.popen, log=folder / "log"
            )
            everyone = process_tree(process.popen.pid)
            began = time.monotonic()
            os.kill(process.target(), number)
            everyone += process_tree(process.popen.pid)
            _wait_for_ends(everyone, began + PATIENCE_S)
            n_requests = server.bill().n_requests
            everyone += process_tree(process.popen.pid)
            _wait_for_ends(everyone, began + 120)
            process.popen.wait(120)
            seconds = time.monotonic() - began
        time.sleep(LATENCY_S)  # what was in flight when it was killed is charged by now
        bill = server.bill()
        answered = ledger_status(root / "ledger.sqlite").calls.get("answered", 0)
        server.set_latency(0)
        pipeline_at(root, replay={"max_concurrency": 64}).replay(batches[0])
        final, spent_usd = server.bill(), ledger_status(root / "ledger.sqlite").spent_usd
        return Stop(
            n_late=bill.n_requests - n_requests,
            n_lost=bill.n_charged - answered,
            n_twice=final.n_duplicates,
            n_off_nano=final.total_nano - round(spent_usd * 1e9),
            seconds=seconds,
            status=process.popen.returncode,
        )


@dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[bytes]
    is_first: bool
    port: int

    def target(self) -> int:
        """The process that gets the signal: in a namespace of its own, the child of `unshare`."""
        return process_tree(self.popen.pid)[1] if self.is_first else self.popen.pid


@contextmanager
def _started(
    form: str, environment: dict[str, str], log: Path, *, is_first: bool, is_deaf: bool
) -> Iterator[_Process]:
    port = free_port()
    command = _command(form, port)
    if is_first:
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
    with log.open("wb") as lines:
        popen = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,
            preexec_fn=_be_deaf if is_deaf else None,
        )
    try:
        yield _Process(popen, is_first, port)
    finally:
        for pid in process_tree(popen.pid):
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        popen.wait(30)


def _command(form: str, port: int) -> list[str]:
    bin_dir = Path(sys.executable).parent
    program, dagster = str(bin_dir / "replay-pipeline"), str(bin_dir / "dagster")
    supervised = [sys.executable, "-P", "-m", "replay_pipeline.assets.supervise"]
    night = [program, "run", "--yes", "--no-train"]
    match form:
        case "command line":
            return night
        case "cron":
            return [
                shutil.which("sh") or "sh",
                "-c",
                f"cd . && exec {' '.join(night)} >> night.log 2>&1",
            ]
        case "compose entry point":
            served = f"exec {dagster} api grpc -h 127.0.0.1 -p {port} -m replay_pipeline.assets.definitions"
            return [*supervised, "sh", "-c", f"{program} ui --no-serve --runs-are-here && {served}"]
        case _:
            return [*supervised, *night]


def _launch_run(root: Path, process: _Process, batch: str, log: Path) -> None:
    """Have the code location start a run, as the daemon does when a run leaves the queue."""
    wait_until(lambda: _listens(process.port), process.popen, log=log)
    home = root / ".dagster"
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.add_dynamic_partitions("trace_batch", [batch])
        execute_launch_command(
            instance=instance,
            workspace_opts=WorkspaceOpts(grpc_host="127.0.0.1", grpc_port=process.port),
            job_name="replay_batches",
            tags=f'{{"dagster/partition": "{batch}"}}',
        )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _home_without_queue(root: Path) -> Path:
    """Dagster's home with runs that start at once, as they do when they have left the queue."""
    home = prepare_home(root)
    (home / "dagster.yaml").write_text(
        "telemetry: {enabled: false}\n"
        "run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}\n"
    )
    return home


def _be_deaf() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _wait_for_ends(pids: list[int], deadline: float) -> None:
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
