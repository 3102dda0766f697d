"""Fragments are exchanged while training goes on, and all replicas still end in the same bits."""

import threading
from collections import Counter

import numpy as np
import pytest

from tests.trainer.outer.in_threads import in_threads
from trainer.errors import TrainerConfigError
from trainer.outer import (
    AsyncReplica,
    FragmentedReplica,
    MemoryStore,
    OuterReplica,
    OuterSettings,
    OuterStep,
)
from trainer.outer.replica import newest_state

N, BEATS = 90, 9


def settings(**options):
    return OuterSettings(
        **{"codec": "fp32", "outer": OuterStep(1.0, 0.0), "n_rounds": BEATS, **options}
    )


def replica_of(store, rank=0, world_size=1, *, kind=OuterReplica, n_fragments=3, **options):
    state = options.pop("state", None)
    replica = FragmentedReplica(
        kind, n_fragments, store, np.zeros(N, np.float32), rank=rank, world_size=world_size,
        settings=settings(**options), state=state,
    )  # fmt: skip
    replica.join()
    return replica


def train_on(replica, rank):
    while not replica.is_finished:
        dice = np.random.default_rng(100 * rank + replica.n_trained)
        replica.exchange(replica.theta + dice.standard_normal(N).astype(np.float32))


def train_all(store, world_size=3, **options):
    replicas = {}

    def one(rank):
        replicas[rank] = replica_of(store, rank, world_size, quorum=world_size, **options)
        train_on(replicas[rank], rank)

    in_threads(one, world_size)
    return [replicas[rank].theta for rank in range(world_size)]


class ClosedStore(MemoryStore):
    """A store that takes no delta before it is opened."""

    def __init__(self):
        super().__init__()
        self.is_open = threading.Event()

    def _put(self, key, data):
        if "/rounds/" in key:
            assert self.is_open.wait(30), "the replica waits for the store instead of training on"
        super()._put(key, data)


def test_the_next_inner_steps_are_made_while_a_fragment_is_under_way():
    store = ClosedStore()
    replica = replica_of(store)
    report = replica.exchange(replica.theta - 1)
    assert report.n_contributions == 0
    local = replica.theta - 1  # the next inner steps: nothing of the exchange has arrived
    assert not [key for key in store.keys("fragments/") if "/rounds/" in key]
    store.is_open.set()
    report = replica.exchange(local)
    assert report.n_contributions == 1
    assert replica.theta.tolist() == [-2.0] * N, "what was trained meanwhile is kept"


def test_a_fragment_moves_to_the_mean_plus_what_was_trained_meanwhile():
    store, done = MemoryStore(), {}
    both = threading.Barrier(2)

    def one(rank):
        replica = replica_of(store, rank, 2, n_fragments=2, n_rounds=3, quorum=2)
        replica.exchange(replica.theta - (rank + 1))
        both.wait()
        replica.exchange(replica.theta - 10)
        done[rank] = replica.theta.copy()
        replica.exchange(replica.theta)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert done[rank][: N // 2].tolist() == [-1.5 - 10] * (N // 2)
        assert done[rank][N // 2 :].tolist() == [-(rank + 1.0) - 10] * (N // 2)


class LateStore(MemoryStore):
    """A store in which an object of a round shows when it is asked for the third time."""

    def __init__(self):
        super().__init__()
        self._asked_for = Counter()

    def _get(self, key):
        self._asked_for[key] += 1
        is_late = "/rounds/" in key and self._asked_for[key] < 3
        return None if is_late else super()._get(key)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "ternary"])
def test_synchronous_fragments_end_in_the_same_bits_however_quick_the_store_is(codec):
    quick, late = (train_all(store, codec=codec) for store in (MemoryStore(), LateStore()))
    assert len({theta.tobytes() for theta in quick + late}) == 1
    assert np.abs(quick[0]).max() > 0


def test_the_store_alone_gives_the_state_in_which_all_have_ended():
    store = MemoryStore()
    ended = train_all(store)[0]
    n_rounds, theta, _ = newest_state(store)
    assert n_rounds == BEATS // 3
    assert theta.tobytes() == ended.tobytes()


class Killed(BaseException):
    """The process is gone."""


class MortalStore(MemoryStore):
    """Fails from one request on; its objects outlive that."""

    def __init__(self, objects, fatal):
        super().__init__()
        self._objects, self._left = objects, fatal

    def _asked(self, verb, key, request):
        self._left -= 1
        if self._left < 0:
            raise Killed
        return super()._asked(verb, key, request)


@pytest.mark.parametrize("kind", [OuterReplica, AsyncReplica])
@pytest.mark.slow
def test_killed_at_any_request_it_ends_in_the_bits_of_the_undisturbed_run(kind):
    options = {"kind": kind, "codec": "fp32"}
    calm = MortalStore({}, 10**6)
    undisturbed = replica_of(calm, state=calm, **options)
    train_on(undisturbed, 0)
    n_requests = 10**6 - calm._left
    n_resumed = 0
    for fatal in range(1, n_requests, 2):
        objects = {}
        mortal = MortalStore(objects, fatal)
        with pytest.raises(Killed):
            train_on(replica_of(mortal, state=mortal, **options), 0)
        store = MortalStore(objects, 10**6)
        again = replica_of(store, state=store, **options)
        n_resumed += again.n_trained > 0
        train_on(again, 0)
        assert again.theta.tobytes() == undisturbed.theta.tobytes(), fatal
    assert n_resumed > n_requests / 4


def test_asynchronous_fragments_wait_for_nobody():
    store = MemoryStore()
    slow, quick = (replica_of(store, rank, 2, kind=AsyncReplica) for rank in range(2))
    train_on(quick, 1)
    assert quick.n_trained == BEATS
    assert slow.n_trained == 0


def test_a_run_in_other_fragments_is_refused():
    store = MemoryStore()
    replica_of(store)
    for other in (
        lambda: replica_of(store, n_fragments=2),
        lambda: OuterReplica(
            store, np.zeros(N), rank=0, world_size=1, settings=settings()
        ).join(),
    ):  # fmt: skip
        with pytest.raises(TrainerConfigError, match="other settings"):
            other()
