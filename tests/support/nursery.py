"""Replays in processes of their own, to be killed or told to stop: loaded once, then forked."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120

_SERVE = """
import asyncio, json, os, pathlib, sys, threading, httpx_aiohttp
sys.path.insert(0, sys.argv[1])
from replay_pipeline.cli import _hear_stops
from replay_pipeline.replay import replay_in_thread, replay_states
from replay_pipeline.replay.money.ledger import Ledger
from replay_pipeline.types import RetryPolicy, TeacherSpec
from tests.replay_pipeline.replay.conftest import make_states
from tests.support.looking import TOOLS, answer_looks

def work(job):
    if job["how"] == "open":
        Ledger(job["ledger"], is_durable=False).close()
        return
    states = make_states(job["n"], n_sessions=job["n"], words=job.get("words", 40))
    looks = {"looks": answer_looks, "looks_share": job["looks"]} if job.get("looks") else {}
    if "without" in job:
        del states[slice(*job["without"])]
    made = {
        "states": [{**state, "tools": TOOLS} for state in states] if looks else states,
        "teachers": [TeacherSpec(**job["teacher"])],
    }
    options = {
        "max_total_usd": job["usd"], "ledger": job["ledger"], "max_concurrency": job["concurrency"],
        "run_id": job.get("run_id"), "is_durable": job.get("is_durable", False), **looks,
        "retry": RetryPolicy(max_attempts=4, first_wait_s=0.01, settle_s=job["settle_s"]),
    }
    if job["how"] == "thread":
        _hear_stops()
        report = replay_in_thread(made["states"], made["teachers"], **options)
    else:
        report = asyncio.run(replay_states(made["states"], made["teachers"], **options))
    if "told" in job:
        pathlib.Path(job["told"]).write_text(json.dumps([report.newly_spent_usd, report.n_sent]))

for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        _, status = os.waitpid(job["wait"], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    code = 1
    try:
        sys.stdin = open(os.devnull)
        work(job)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        print(repr(error)[:500], file=sys.stderr, flush=True)
    finally:
        threading._shutdown()  # as every interpreter ends
        os._exit(code)
"""


class Nursery:
    """Starts replays as processes, by fork."""

    def __init__(self, process):
        self._process = process

    def start(self, **job):
        """Start a job: `how` is `async` (`asyncio.run`), `thread` (as a command does) or `open`."""
        self._tell(job)
        return int(self._process.stdout.readline())

    def wait(self, pid):
        """Wait until a job has ended; give its exit code, negative for a signal."""
        self._tell({"wait": pid})
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            os.kill(pid, signal.SIGKILL)
            self._process.stdout.readline()
            raise AssertionError(f"job {pid} had not ended after {PATIENCE_S} s")
        return int(self._process.stdout.readline())

    def has_ended(self, pid):
        """Whether a job has ended; it is still to be waited for."""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def run(self, **job):
        """Start a job and wait until it has ended."""
        return self.wait(self.start(**job))

    def kill(self, pid):
        """Kill a job, which loses what it has in flight."""
        os.kill(pid, signal.SIGKILL)
        return self.wait(pid)

    def _tell(self, job):
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()


@contextmanager
def nursery():
    """A process that has loaded all that a replay needs."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(ROOT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        yield Nursery(running)
        running.stdin.close()


def until(what, patience_s=PATIENCE_S):
    """Wait for something that depends on what was sent, not on how fast this machine is."""
    deadline = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)
