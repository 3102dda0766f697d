"""The round protocol under seeded faults, and its rules one by one."""

import dataclasses
import time

import numpy as np
import pytest

from tests.trainer.diloco import simulation
from trainer.diloco import MemoryStore, OuterReplica, OuterSettings
from trainer.diloco.protocol import (
    Contribution,
    chosen_of,
    shares_of,
)


def contribution(rank, *, incarnation="000000-aa", round_id=0, base="b0", weight=1, sha=None):
    return Contribution(rank, incarnation, round_id, base, weight, sha or f"sha{rank}")


@pytest.mark.slow
def test_fault_schedules_keep_one_manifest_per_round_right_means_and_equal_states():
    reports = [simulation.run_schedule(seed) for seed in range(80)]
    assert [report for report in reports if report.violations] == []
    assert {report.rounds for report in reports} == {"synchronous", "asynchronous"}
    seen = {name for report in reports for name, n in report.faults.items() if n}
    assert seen == {field.name for field in dataclasses.fields(simulation.Faults)}


def test_a_store_without_conditional_create_is_caught_by_the_schedules(monkeypatch):
    def overwriting(self, key, data):
        self._put(key, data)
        self.world.n_created[key] += key.endswith("manifest.json")
        return not key.startswith("run.")

    monkeypatch.setattr(simulation.HostileStore, "_create", overwriting)
    found = [v for seed in range(8) for v in simulation.run_schedule(seed).violations]
    assert any("was changed" in violation for violation in found)


def test_a_wrong_mean_is_caught_by_the_schedules(monkeypatch):
    honest = OuterReplica._mean

    def without_the_first(self, contributions, shares, n):
        return honest(self, contributions, [0.0, *shares[1:]], n)

    monkeypatch.setattr(OuterReplica, "_mean", without_the_first)
    calm = simulation.Faults(*[0.0] * 7)
    found = [v for seed in range(4) for v in simulation.run_schedule(seed, faults=calm).violations]
    assert any("a wrong mean was applied" in violation for violation in found)


@pytest.mark.parametrize(
    ("ranks", "is_overdue", "chosen"),
    [((1, 2), False, 3), ((1,), False, 0), ((1,), True, 2), ((), True, 0)],
)
def test_a_straggler_is_left_out_only_after_a_grace_and_with_a_quorum(ranks, is_overdue, chosen):
    found = chosen_of(
        map(contribution, ranks), contribution(0),
        expected=frozenset((0, 1, 2)), quorum=2, is_overdue=is_overdue,
    )  # fmt: skip
    assert len(found) == chosen
    assert list(found) == sorted(found)


def test_what_a_contribution_counts_follows_from_its_weight_and_its_age():
    both = [contribution(0, weight=1), contribution(1, weight=3)]
    assert shares_of(both, 0, 2) == [0.25, 0.75]
    assert sum(shares_of(both[:1], 0, 4)) == 0.25, "one of four moves the state by a quarter"
    ages = [shares_of([contribution(0)], age, 4)[0] for age in (0, 3, 4, 7)]
    assert ages == [0.25, 0.25, 0.25 * 1.25**-0.5, 0.25 * 2**-0.5]


def test_a_replica_that_was_left_out_asks_to_be_waited_for():
    store = MemoryStore()
    settings = OuterSettings(codec="fp32", quorum=1, first_grace_s=0.01, n_rounds=2)
    first, late = (
        OuterReplica(store, np.zeros(3), rank=rank, world_size=2, settings=settings)
        for rank in range(2)
    )
    first.join()
    first.exchange(first.theta)
    assert first.expected == {0}
    late.join()
    assert [key for key in store.keys("deltas/000001/") if key.endswith(".join")]
    began = time.monotonic()
    first.exchange(first.theta)
    assert first.expected == {0, 1}
    assert time.monotonic() - began < 5
