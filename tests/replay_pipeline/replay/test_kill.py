"""A real process is killed with SIGKILL again and again, and started again on the same ledger."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replay_pipeline.replay import ledger_status, replay_trace_sync
from replay_pipeline.testing import TeacherServer
from tests.replay_pipeline.replay.conftest import make_states

ROOT = Path(__file__).parents[3]
CONCURRENCY = 128
N_KILLS = 50

# Imports once, then forks one replay per line of its input: fifty starts cost as much as one.
NURSERY = """
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from replay_pipeline.replay import replay_states
from replay_pipeline.types import RetryPolicy, TeacherSpec
from tests.replay_pipeline.replay.conftest import make_states

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    asyncio.run(replay_states(
        make_states(job["n"], n_sessions=job["n"]), [TeacherSpec(**job["teacher"])],
        max_total_usd=50, ledger=job["ledger"], max_concurrency=job["concurrency"],
        retry=RetryPolicy(max_attempts=4, first_wait_s=0.01, settle_s=2.0)))
    os._exit(0)
"""


def n_rows(ledger, state):
    with sqlite3.connect(ledger) as database:
        [(n,)] = database.execute("select count(*) from calls where state = ?", (state,)).fetchall()
    database.close()
    return n


def wait_for_requests(server, n):
    """Until a moment that depends on what was sent, not on how fast this machine is."""
    deadline = time.monotonic() + 60
    while server.bill().n_requests < n:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_fifty_times_nothing_is_lost_and_nothing_is_paid_twice(tmp_path):
    chance = random.Random(7)
    n = 6000
    ledger = tmp_path / "ledger.sqlite"
    nursery = subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(ROOT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    faults = [{"kind": "status", "status": 429, "probability": 0.02, "retry_after_s": 0.01}]
    with TeacherServer(
        script={"content": "yes"}, latency={"median_s": 0.06, "p95_s": 0.12}, faults=faults
    ) as server:
        [teacher] = server.teachers(["deepseek/deepseek-v4-pro"])
        teacher = teacher.model_copy(update={"max_concurrency": CONCURRENCY, "timeout_s": 1.0})
        job = {"n": n, "teacher": teacher.model_dump(), "ledger": str(ledger),
               "concurrency": CONCURRENCY}  # fmt: skip
        n_kills = n_answered = n_killed_in_flight = 0
        while True:
            nursery.stdin.write(json.dumps(job) + "\n")
            nursery.stdin.flush()
            child = int(nursery.stdout.readline())
            if n_kills < N_KILLS:
                wait_for_requests(server, server.bill().n_requests + chance.randint(20, 110))
                os.kill(child, signal.SIGKILL)
                n_kills += 1
            assert nursery.stdout.readline() == "ended\n"
            now_answered = n_rows(ledger, "answered")
            assert now_answered >= n_answered
            n_answered = now_answered
            n_killed_in_flight += n_rows(ledger, "open")
            if n_kills == N_KILLS and n_answered == n:
                break
        nursery.communicate()
        bill = server.bill()
        states = make_states(n, n_sessions=n)
        actions = replay_trace_sync(states, [teacher], 0, ledger=ledger)
    status = ledger_status(ledger)
    assert n_killed_in_flight > N_KILLS * 10
    assert len(actions) == n
    assert all(action.error_code is None for action in actions)
    assert bill.n_duplicates == 0
    assert bill.n_charged == n
    assert bill.total_nano == round(status.spent_usd * 1e9)
    # Only calls in flight were sent again; each was free, from the response cache, or the first.
    n_sent = sum(status.calls.values())
    assert n_sent - n <= n_killed_in_flight
    assert bill.n_requests - bill.faults.get("status", 0) <= n_sent
    assert status.calls["answered"] == n
