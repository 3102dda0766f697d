"""Real processes, real SIGKILL: no round is lost, no state diverges, nothing is forgotten."""

import json
import os
import random
import time

import numpy as np
import pytest

from trainer.diloco import OuterReplica, OuterSettings, open_store

pytestmark = pytest.mark.slow

N_REPLICAS = 4


def replica(folder, rank, n_rounds, quorum):
    """Be a replica that trains by dice."""
    store = open_store(f"file://{folder}/run")
    settings = OuterSettings(
        codec="ternary", n_rounds=n_rounds, quorum=quorum, timeout_s=60, first_grace_s=5,
        snapshot_every=2,
    )  # fmt: skip
    one = OuterReplica(store, np.zeros(500), rank=rank, world_size=N_REPLICAS, settings=settings)
    one.join()
    with (folder / f"log-{rank}.jsonl").open("a", buffering=1) as log:
        while not one.is_finished:
            dice = np.random.default_rng(10_000 * rank + one.round_id)
            report = one.exchange(one.theta - dice.standard_normal(500).astype(np.float32))
            log.write(json.dumps([one.round_id, report.base]) + "\n")
    (folder / f"result-{rank}.json").write_text(json.dumps(one.base))


def start(folder, rank, n_rounds, quorum):
    """Start a replica as a child process; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        replica(folder, rank, n_rounds, quorum)
        code = 0
    finally:
        os._exit(code)


def run(folder, n_rounds, quorum, kill):
    """Run all replicas to the end; those that `kill(n_committed)` names die and start anew."""
    folder.mkdir()
    children = {rank: start(folder, rank, n_rounds, quorum) for rank in range(N_REPLICAS)}
    n_killed = 0
    while children:
        time.sleep(0.005)
        n_committed = len(list((folder / "run" / "rounds").glob("*/manifest.json")))
        victims = [rank for rank in kill(n_committed) if rank in children]
        for rank in victims:
            os.kill(children[rank], 9)
        for rank, pid in list(children.items()):
            done, status = os.waitpid(pid, 0 if rank in victims else os.WNOHANG)
            if done:
                del children[rank]
                code = os.waitstatus_to_exitcode(status)
                assert code in (0, -9), "none fails by itself"
                n_killed += code == -9
        for rank in victims:
            if not (folder / f"result-{rank}.json").exists():
                children[rank] = start(folder, rank, n_rounds, quorum)
    ended = {path.read_text() for path in folder.glob("result-*.json")}
    bases = {}
    for path in folder.glob("log-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                round_id, base = json.loads(line)
                bases.setdefault(round_id, set()).add(base)
    assert all(len(found) == 1 for found in bases.values()), "equal states after every round"
    assert len(ended) == 1
    return n_killed


def test_twenty_rounds_survive_eight_random_kills(tmp_path):
    dice, due = random.Random(0), iter(range(1, 20))
    wanted = [next(due)]

    def kill(n_committed):
        if n_committed < wanted[0]:
            return []
        wanted[0] = next(due, 99)
        return [dice.randrange(N_REPLICAS)]

    assert run(tmp_path / "run", 20, 2, kill) >= 8
    assert len(list((tmp_path / "run/run/rounds").glob("*/manifest.json"))) == 20
