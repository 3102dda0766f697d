"""One object of a run's store is altered, cut or deleted: it is healed, or named in an error."""

import copy
import time

import numpy as np
import pytest

from tests.trainer.diloco.in_threads import in_threads
from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, OuterStep, exchange
from trainer.diloco.protocol import DELTAS, MERGED, manifest_key
from trainer.diloco.replica import ROUNDS as ROUND_KINDS
from trainer.errors import OuterLoopError

N, WORLD, ROUNDS, STOP_AT = 400, 3, 10, 8


def flipped(data, at):
    """Return bytes with one bit turned over."""
    return data[:at] + bytes([(data[at] if data else 0) ^ 1]) + data[at + 1 :]


DAMAGE = {
    "flipped": lambda data: flipped(data, len(data) // 2),
    "cut": lambda data: data[: len(data) // 2],
    "deleted": lambda data: None,
}


def replicas_until(store, last_round, start=0.0):
    """Run all replicas until a round; return the hashes of their states, and what they raised."""
    bases, errors = [], []
    settings = OuterSettings(
        codec="ternary", n_rounds=ROUNDS, quorum=WORLD, snapshot_every=2, timeout_s=2.0
    )

    def one(rank):
        try:
            replica = OuterReplica(
                store, np.full(N, start), rank=rank, world_size=WORLD, settings=settings
            )
            replica.join()
            while not replica.is_finished and replica.round_id < last_round:
                dice = np.random.default_rng(100 * rank + replica.round_id)
                replica.exchange(replica.theta + dice.standard_normal(N).astype(np.float32))
            bases.append(replica.base)
        except OuterLoopError as error:
            errors.append(str(error))

    in_threads(one, WORLD)
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
    bases, errors = replicas_until(copy_of(half_way), ROUNDS)
    assert not errors
    return bases[0]


patient_s = exchange.DAMAGE_S


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    # What is damaged stays so here: it need not be waited for.
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
def test_any_damaged_object_leads_to_the_same_hash_or_is_named(half_way, wanted, kind):
    for key in half_way.keys(""):
        began = time.monotonic()
        bases, errors = replicas_until(damaged(half_way, key, kind), ROUNDS)
        assert bases == [wanted] * WORLD or any(key in error for error in errors), (key, errors)
        assert set(bases) <= {wanted}, key
        assert time.monotonic() - began < 5
    assert 2 * patient_s + 5 <= 15, "what is read on the way to another object waits, too"


def in_turn(store, until):
    """Run two asynchronous replicas, one exchange each in turn; return the hashes of their states."""
    settings = OuterSettings(
        rounds="asynchronous", codec="ternary", n_rounds=ROUNDS, snapshot_every=2, timeout_s=2.0,
        outer=OuterStep(1.0, 0.0),
    )  # fmt: skip
    replicas = [
        OuterReplica(store, np.zeros(N), rank=rank, world_size=2, settings=settings)
        for rank in range(2)
    ]
    for replica in replicas:
        replica.join()
    for n_made in range(replicas[0].n_trained, until):
        for rank, replica in enumerate(replicas):
            dice = np.random.default_rng(100 * rank + n_made)
            replica.exchange(replica.theta + dice.standard_normal(N).astype(np.float32))
    replicas[0].take_up()
    return {replica.base for replica in replicas}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.slow
def test_any_damaged_object_of_asynchronous_rounds_is_healed_or_named_as_well(kind):
    store = MemoryStore()
    in_turn(store, STOP_AT)
    expected = in_turn(copy_of(store), ROUNDS)
    assert len(expected) == 1
    named = []
    for key in store.keys(""):
        try:
            ended = in_turn(damaged(store, key, kind), ROUNDS)
        except OuterLoopError as error:
            named.append((key, str(error)))
        else:
            assert ended == expected, key
    assert all(key in error for key, error in named), named
    assert len(named) <= 1, "what the run is"


@pytest.mark.parametrize("kind", ["flipped", "deleted"])
def test_the_last_decision_is_not_made_again_when_its_manifest_is_lost(half_way, wanted, kind):
    newest = manifest_key(STOP_AT - 1)
    store = damaged(half_way, newest, kind)
    store.delete([key for key in store.keys("snapshots/") if f"{STOP_AT:06d}." in key])
    bases, errors = replicas_until(store, ROUNDS)
    assert not errors
    assert bases == [wanted] * WORLD
    assert store.get(newest) == half_way.get(newest)


@pytest.mark.parametrize("rounds", ROUND_KINDS)
def test_of_two_processes_of_one_rank_the_later_one_stays(rounds):
    store = MemoryStore()
    settings = OuterSettings(
        rounds=rounds, codec="fp32", n_rounds=24, quorum=1, outer=OuterStep(1.0, 0.0)
    )
    first, second = (
        OuterReplica(store, np.zeros(N), rank=0, world_size=1, settings=settings) for _ in range(2)
    )
    first.join()
    for _ in range(3):
        first.exchange(first.theta + 1)
    second.join()
    second.exchange(second.theta + 1)
    with pytest.raises(OuterLoopError, match="a newer process"):
        [first.exchange(first.theta + 1) for _ in range(2)]
    while not second.is_finished:
        second.exchange(second.theta + 1)
    assert second.theta.max() <= 24 + 3, "what one rank trains does not count twice"


def test_where_nothing_can_heal_a_merged_object_the_error_says_so(half_way):
    store = copy_of(half_way)
    store.delete([key for key in store.keys("snapshots/") if f"{STOP_AT:06d}." in key])
    for folder in (DELTAS, MERGED):
        store.delete(store.keys(f"{folder}{STOP_AT - 1:06d}/"))
    bases, errors = replicas_until(store, ROUNDS)
    assert not bases
    assert all("no snapshot fits" in error for error in errors)
