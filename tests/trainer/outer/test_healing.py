"""One object of a run's store is altered, cut or deleted: it is healed, or named in an error."""

import copy
import threading

import numpy as np
import pytest

from trainer.errors import OuterLoopError
from trainer.outer import MemoryStore, OuterReplica, OuterSettings, exchange

N, WORLD, ROUNDS, STOP_AT = 400, 3, 6, 4

DAMAGE = {
    "flipped": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
    ),
    "cut": lambda data: data[: len(data) // 2],
    "deleted": lambda data: None,
}


def replicas_until(store, last_round, attempt=0):
    """Run all replicas until a round; return the hashes of their states, and what they raised."""
    bases, errors = [], []
    settings = OuterSettings(
        codec="ternary", n_rounds=ROUNDS, quorum=WORLD, snapshot_every=2, timeout_s=2.0
    )

    def one(rank):
        try:
            replica = OuterReplica(
                store, np.zeros(N), rank=rank, world_size=WORLD, settings=settings,
                attempt=attempt, state=store,
            )  # fmt: skip
            replica.join()
            while not replica.is_finished and replica.round_id < last_round:
                dice = np.random.default_rng(100 * rank + replica.round_id)
                replica.exchange(replica.theta + dice.standard_normal(N).astype(np.float32))
            bases.append(replica.base)
        except OuterLoopError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bases, errors


def copy_of(store):
    other = MemoryStore()
    other._objects = copy.copy(store._objects)
    return other


@pytest.fixture(scope="module")
def half_way():
    store = MemoryStore()
    bases, errors = replicas_until(store, STOP_AT)
    assert not errors
    assert len(bases) == WORLD
    return store


@pytest.fixture(scope="module")
def wanted(half_way):
    bases, errors = replicas_until(copy_of(half_way), ROUNDS, attempt=1)
    assert not errors
    return bases[0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(exchange, "DAMAGE_S", 0.05)


def damaged(half_way, key, kind):
    store = copy_of(half_way)
    data = DAMAGE[kind](store.get(key))
    store.delete([key])
    if data is not None:
        store.put(key, data)
    return store


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.slow
def test_any_damaged_object_is_healed_or_named_and_never_makes_replicas_differ(half_way, kind):
    for key in half_way.keys(""):
        bases, errors = replicas_until(damaged(half_way, key, kind), ROUNDS, attempt=1)
        assert len(set(bases)) <= 1, key
        named = [e for e in errors if key in e or "no snapshot helps" in e or "still damaged" in e]
        assert len(bases) == WORLD or named, (key, errors)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_merged_object_is_made_again_from_its_deltas(half_way, wanted, kind):
    newest = [key for key in half_way.keys("rounds/") if "/merged/" in key][-1]
    store = damaged(half_way, newest, kind)
    store.delete([key for key in store.keys("snapshots/") if "/000004." in key])
    bases, errors = replicas_until(store, ROUNDS, attempt=1)
    assert not errors
    assert bases == [wanted] * WORLD
    assert store.get(newest) == half_way.get(newest)


def test_where_nothing_can_heal_a_merged_object_the_error_says_so(half_way):
    store = copy_of(half_way)
    store.delete([key for key in store.keys("snapshots/") if "/000004." in key])
    store.delete([key for key in store.keys("rounds/000003/") if not key.endswith("json")])
    bases, errors = replicas_until(store, ROUNDS, attempt=1)
    assert not bases
    assert all("no snapshot helps" in error for error in errors)
