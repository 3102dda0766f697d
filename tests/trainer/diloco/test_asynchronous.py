"""Asynchronous rounds: nobody waits, old deltas count less, and the log is one for all."""

import numpy as np

from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, OuterStep
from trainer.diloco.protocol import Manifest, manifest_key

N = 500


def settings(**options):
    return OuterSettings(
        **{
            "rounds": "asynchronous",
            "codec": "fp32",
            "outer": OuterStep(1.0, 0.0),
            "n_rounds": 3,
            **options,
        }
    )


def replica_of(store, rank, world_size, **options):
    start = np.zeros(N, np.float32)
    replica = OuterReplica(
        store, start, rank=rank, world_size=world_size, settings=settings(**options)
    )
    replica.join()
    return replica


def manifests(store):
    keys = [key for key in store.keys("rounds/") if key.endswith("manifest.json")]
    return [Manifest.from_bytes(store.get(manifest_key(r))) for r in range(len(keys))]


def test_one_of_n_moves_the_state_by_an_nth_and_an_old_delta_by_less():
    store = MemoryStore()
    slow, quick = replica_of(store, 0, 2), replica_of(store, 1, 2)
    quick.exchange(quick.theta - 1)
    np.testing.assert_allclose(quick.theta, -0.5)
    quick.exchange(quick.theta - 1)
    np.testing.assert_allclose(quick.theta, -1.0)
    slow.exchange(np.full(N, -1, np.float32))
    late = 2 - 1  # two manifests since, and one of the other is usual
    np.testing.assert_allclose(slow.theta, -1.0 - 0.5 * (1 + late / 2) ** -0.5, rtol=1e-6)


def test_a_slow_replica_takes_up_what_the_others_make_and_its_delta_counts_in_full():
    store = MemoryStore()
    slow, quick = replica_of(store, 0, 2, n_rounds=99), replica_of(store, 1, 2, n_rounds=99)
    local = slow.theta - 1
    assert slow.take_up() is None, "nobody has moved"
    for _ in range(slow.max_age + 1):
        quick.exchange(quick.theta - 2)
    moved = slow.take_up()
    np.testing.assert_allclose(local + moved, quick.theta - 1, err_msg="its own progress stays")
    report = slow.exchange(local + moved)
    assert (report.was_included, report.n_missed) == (True, slow.max_age + 1)
    np.testing.assert_allclose(slow.theta, quick.theta - 0.5)
    merged = sum(len(store.get(key)) for key in store.keys("merged/")[:-1])
    assert merged <= report.down_bytes < 2 * merged, "read once, and counted"


def test_what_is_pending_is_merged_once_by_whoever_comes_next():
    store = MemoryStore()
    first, second = replica_of(store, 0, 2), replica_of(store, 1, 2)
    propose = first._propose
    first._propose = lambda own: second.exchange(second.theta - 3)
    first.exchange(first.theta - 1)
    first._propose = propose
    (manifest,) = manifests(store)
    assert [c.rank for c in manifest.contributions] == [0, 1]
    np.testing.assert_allclose(first.theta, -2.0)
    assert first.base == second.base


def test_a_delta_beyond_the_bound_is_dropped_and_reported():
    store = MemoryStore()
    slow, quick = replica_of(store, 0, 2, n_rounds=20), replica_of(store, 1, 2, n_rounds=20)
    for _ in range(slow.max_age + 1):
        quick.exchange(quick.theta - 1)
    assert not slow.exchange(slow.theta + 100).was_included
    assert slow.base == quick.base
