"""Real processes, real SIGKILL: no round is lost, no state diverges, nothing is forgotten."""

import dataclasses
import json
import random
import time

import numpy as np
import pytest

from trainer.outer import OuterReplica, OuterSettings, open_store


@pytest.fixture(scope="module")
def bench():
    from benchmarks import outer_loop

    return outer_loop


@pytest.fixture
def small(bench):
    return bench.Regime(inner_steps=1, batch_size=2, width=16, depth=1, codec="ternary")


@pytest.mark.slow
def test_thirty_rounds_survive_twenty_random_kills(bench, small, tmp_path):
    regime = dataclasses.replace(small, n_rounds=30, n_replicas=4)
    report = bench.run_with_kills(bench.ProcessRun(tmp_path, regime, quorum=2), 26)
    assert report["kills"] == report["restarts"] >= 20
    assert report["rounds"] == 30
    assert report["finished"] == 4
    assert report["diverged"] == 0
    assert report["hashes"] == 1


class CountingRun:
    """Replicas that train in no time: what counts is what is on disk at the moment of the kill."""

    def __new__(cls, bench, folder, n_rounds):
        folder.mkdir()
        run = bench.ProcessRun(folder, bench.Regime(n_rounds=n_rounds), quorum=4)
        object.__setattr__(run, "replica", lambda rank, _: count(run, rank))
        return run


def count(run, rank):
    """Be a replica whose inner optimizer is one array that remembers every round."""
    store = open_store(f"file://{run.folder}/run")
    settings = OuterSettings(
        codec="ternary", n_rounds=run.regime.n_rounds, quorum=4, timeout_s=60, snapshot_every=2
    )
    replica = OuterReplica(
        store, np.zeros(500), rank=rank, world_size=4, settings=settings,
        state=store,
    )  # fmt: skip
    replica.join()
    memory = replica.inner_state.get("memory", np.zeros(500, np.float32))
    while not replica.is_finished:
        dice = np.random.default_rng(10_000 * rank + replica.round_id)
        memory = 0.5 * memory + dice.standard_normal(500).astype(np.float32)
        replica.exchange(replica.theta - 0.01 * memory, inner_state={"memory": memory})
    (run.folder / f"result-{rank}.json").write_text(json.dumps({"base": replica.base}))


@pytest.mark.slow
def test_killing_all_at_any_moment_ends_in_the_state_of_the_uninterrupted_run(bench, tmp_path):
    began = time.perf_counter()
    wanted = bench.run_with_blackout(CountingRun(bench, tmp_path / "calm", 5), None)
    calm_s = time.perf_counter() - began
    dice = random.Random(0)
    for trial in range(20):
        run = CountingRun(bench, tmp_path / str(trial), 5)
        assert bench.run_with_blackout(run, dice.uniform(0.05, 0.9) * calm_s) == wanted
