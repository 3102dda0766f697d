"""A replica's round: arithmetic, sign, and equal bits everywhere."""

import numpy as np
import pytest

from tests.trainer.diloco.in_threads import in_threads
from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, OuterStep
from trainer.diloco.protocol import Manifest, manifest_key
from trainer.errors import OuterLoopError, OuterTimeoutError, TrainerConfigError

N = 1000


def run_replicas(store, settings, *, world_size=3, train=None, make=OuterReplica):
    """Run replicas as threads to the end; return them by rank."""
    replicas = {}
    train = train or (lambda rank, round_id, theta: theta - np.float32(0.1 * (rank + 1)))

    def one(rank):
        start = np.zeros(N, np.float32)
        replica = make(store, start, rank=rank, world_size=world_size, settings=settings)
        replica.join()
        while not replica.is_finished:
            replica.exchange(train(rank, replica.round_id, replica.theta))
        replicas[rank] = replica

    in_threads(one, world_size)
    return replicas


def test_pseudo_gradient_is_initial_minus_local_and_averaging_gives_the_mean_of_the_locals():
    settings = OuterSettings(codec="fp32", outer=OuterStep(1.0, 0.0), n_rounds=1, quorum=3)
    replicas = run_replicas(MemoryStore(), settings)
    for replica in replicas.values():
        np.testing.assert_allclose(replica.theta, -0.2, rtol=1e-6)
        assert replica.base == replicas[0].base


def test_nesterov_step_equals_the_one_computed_by_hand():
    settings = OuterSettings(codec="fp32", outer=OuterStep(0.8, 0.5), n_rounds=3, quorum=2)
    replicas = run_replicas(
        MemoryStore(), settings, world_size=2, train=lambda rank, round_id, theta: theta - 1
    )
    velocity = theta = 0.0
    for _ in range(3):
        velocity = 0.5 * velocity + 1.0
        theta -= 0.8 * (1.0 + 0.5 * velocity)
    np.testing.assert_allclose(replicas[0].theta, theta, rtol=1e-6)


class BlindReplica(OuterReplica):
    """A first replica that never sees the others' deltas: somebody else must merge for it."""

    def _waiting(self):
        found, joining = super()._waiting()
        return (set() if self.rank == 0 else found), joining


def test_the_result_does_not_depend_on_who_merges():
    def train(rank, round_id, theta):
        noise = np.random.default_rng(100 * rank + round_id).standard_normal(N)
        return theta + noise.astype(np.float32)

    settings = OuterSettings(codec="ternary", n_rounds=6, quorum=3, first_grace_s=0.05)
    usual = run_replicas(MemoryStore(), settings, train=train)
    store = MemoryStore()
    other = run_replicas(store, settings, train=train, make=BlindReplica)
    mergers = {Manifest.from_bytes(store.get(manifest_key(r))).by for r in range(6)}
    assert 0 not in mergers
    assert other[0].base == usual[0].base


def test_another_setting_than_the_runs_is_refused():
    store = MemoryStore()
    OuterReplica(
        store, np.zeros(N), rank=0, world_size=2, settings=OuterSettings(codec="fp32")
    ).join()
    other = OuterReplica(
        store, np.zeros(N), rank=1, world_size=2, settings=OuterSettings(codec="ternary")
    )
    with pytest.raises(TrainerConfigError, match=r"other settings.*codec"):
        other.join()


def test_a_missing_quorum_is_an_error_that_says_what_to_do():
    settings = OuterSettings(codec="fp32", quorum=2, timeout_s=0.2, first_grace_s=0.01)
    replica = OuterReplica(MemoryStore(), np.zeros(N), rank=1, world_size=2, settings=settings)
    replica.join()
    with pytest.raises(OuterTimeoutError, match="lower the quorum"):
        replica.exchange(replica.theta)


def test_parameters_that_are_not_finite_never_leave_the_replica():
    store = MemoryStore()
    replica = OuterReplica(store, np.zeros(N), rank=0, world_size=1)
    replica.join()
    with pytest.raises(OuterLoopError, match="not finite"):
        replica.exchange(np.full(N, np.nan, np.float32))
    assert not store.keys("deltas/")
