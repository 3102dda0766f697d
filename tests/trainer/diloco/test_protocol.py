"""The round protocol under thousands of seeded faults, and its rules one by one."""

import dataclasses

import pytest

from trainer.diloco import simulation
from trainer.diloco.protocol import (
    Apply,
    Commit,
    Contribution,
    Finish,
    List,
    Manifest,
    Merge,
    Merged,
    PutDelta,
    PutJoin,
    ReadManifest,
    ReplicaMachine,
    RoundMachine,
    Train,
    adaptive_grace_s,
)
from trainer.errors import OuterLoopError


def contribution(rank, *, incarnation="000000-aa", base="b0", sha=None):
    return Contribution(rank, incarnation, base, 1, sha or f"sha{rank}")


def a_round(rank, *, round_id=0, quorum=2):
    return RoundMachine(round_id, contribution(rank), frozenset((0, 1, 2)), quorum)


def manifest(round_id=0, ranks=(0, 1), *, base="b0", expected=(0, 1)):
    return Manifest(
        round_id, base, 0, "i", tuple(map(contribution, ranks)), Merged("m", 1), tuple(expected)
    )


@pytest.mark.slow
def test_ten_thousand_fault_schedules_keep_one_manifest_per_round_and_equal_states():
    reports = [simulation.run_schedule(seed) for seed in range(1500)]
    assert [r for r in reports if r.violations] == []
    seen = set().union(*(report.faults for report in reports))
    faults = {"error", "lost answer", "truncated", "stale list", "stale read", "kill", "twin"}
    assert seen == faults


@pytest.mark.slow
def test_the_remaining_of_ten_thousand_fault_schedules():
    broken = [
        report for report in map(simulation.run_schedule, range(1500, 10_000)) if report.violations
    ]
    assert broken == []


def test_a_store_without_conditional_create_is_caught_by_the_schedules(monkeypatch):
    put = simulation.HostileStore.put

    def overwriting(self, key, data, *, is_exclusive=False):
        return put(self, key, data)

    monkeypatch.setattr(simulation.HostileStore, "put", overwriting)
    calm = simulation.Faults(truncated=0.0)
    reports = [simulation.run_schedule(seed, faults=calm) for seed in range(60)]
    assert any("manifests created" in v for report in reports for v in report.violations)


def test_a_wrong_mean_is_caught_by_the_schedules(monkeypatch):
    honest = simulation.merged_payload

    def merge(self, action):
        payload = honest(action.contributions[1:])
        sha = simulation.digest(payload)
        self.world.store.objects[simulation.merged_key(action.round_id, sha)] = payload
        self.machine.on_merged(Merged(sha, len(payload)))

    monkeypatch.setattr(simulation.SimulatedReplica, "_merge", merge)
    assert "a wrong mean was applied" in simulation.run_schedule(1).violations[0]


def test_first_choice_reduces_without_uploading_its_own_delta():
    machine = a_round(0)
    machine.on_manifest(None)
    assert machine.action == List(0)
    machine.on_listed([contribution(1), contribution(2)])
    assert machine.action == Merge(0, tuple(map(contribution, range(3))))


def test_the_others_upload_and_wait():
    machine = a_round(1)
    machine.on_manifest(None)
    assert machine.action == PutDelta(0)
    machine.on_delta_put()
    machine.on_manifest(None, graces=0)
    assert machine.action == ReadManifest(0, is_poll=True)


def test_reducing_rotates_over_rounds():
    assert [a_round(1, round_id=r).turn for r in range(3)] == [1, 0, 2]


def test_a_straggler_is_left_out_only_after_a_grace_and_with_a_quorum():
    machine = a_round(0, quorum=2)
    machine.on_manifest(None)
    machine.on_listed([contribution(1)], graces=0)
    assert machine.action == ReadManifest(0, is_poll=True)
    machine.on_manifest(None)
    machine.on_listed([], graces=9)
    assert machine.action == ReadManifest(0, is_poll=True)
    machine.on_manifest(None)
    machine.on_listed([contribution(1)], graces=1)
    assert isinstance(machine.action, Merge)


def test_the_next_in_turn_takes_over_from_a_silent_reducer():
    machine = a_round(1)
    machine.on_manifest(None)
    machine.on_delta_put()
    machine.on_manifest(None, graces=1)
    assert machine.action == List(0)
    machine.on_listed([contribution(1), contribution(2)], graces=1)
    assert isinstance(machine.action, ReadManifest)
    machine.on_manifest(None, graces=2)
    machine.on_listed([contribution(1), contribution(2)], graces=2)
    assert machine.action == Merge(0, (contribution(1), contribution(2)))


def test_of_twins_the_newer_counts_and_another_base_is_rejected():
    machine = a_round(0)
    machine.on_manifest(None)
    newer = contribution(1, incarnation="000001-aa", sha="other")
    machine.on_listed([contribution(1), newer, contribution(2, base="b9")], graces=1)
    assert machine.action.contributions == (contribution(0), newer)
    machine.on_merged(Merged("m", 1))
    assert machine.action.manifest.rejected == 1


def test_a_damaged_contribution_is_left_out_and_looked_at_again():
    machine = a_round(0)
    found = [contribution(1), contribution(2)]
    machine.on_manifest(None)
    machine.on_listed(found)
    machine.on_damaged([contribution(2)])
    machine.on_listed(found, graces=0)
    assert isinstance(machine.action, ReadManifest)
    machine.on_manifest(None)
    machine.on_listed(found)
    assert len(machine.action.contributions) == 3


def test_a_commit_is_repeated_until_somebodys_manifest_is_read():
    machine = a_round(0)
    machine.on_manifest(None)
    machine.on_listed([contribution(1), contribution(2)])
    machine.on_merged(Merged("m", 1))
    proposed = machine.action
    assert isinstance(proposed, Commit)
    machine.on_committed()
    machine.on_manifest(None)
    assert machine.action == proposed
    machine.on_committed()
    machine.on_manifest(manifest())
    assert machine.decided == manifest()


def a_replica(rank=0, **options):
    settings = {"world_size": 2, "n_rounds": 3, "quorum": 1, "base": "b0", **options}
    return ReplicaMachine(rank=rank, incarnation="000000-aa", **settings)


def test_a_joiner_replays_the_log_and_asks_to_be_waited_for():
    machine = a_replica(rank=1)
    machine.on_snapshot(1, "b1", expected=[0])
    machine.on_manifest(manifest(1, ranks=(0,), base="b1", expected=(0,)))
    assert isinstance(machine.action, Apply)
    machine.on_applied("b2")
    machine.on_manifest(None)
    assert machine.action == PutJoin(2)
    machine.on_join_put()
    assert machine.action == Train(2)


def test_a_manifest_about_another_state_makes_a_replica_rejoin():
    machine = a_replica()
    machine.on_snapshot(0, "b0")
    machine.on_manifest(manifest(0, base="elsewhere"))
    assert machine.n_resyncs == 1
    assert type(machine.action).__name__ == "LoadSnapshot"


def test_a_prepared_contribution_is_sent_again_and_not_trained_again():
    own = contribution(1)
    machine = a_replica(rank=1, prepared=(0, own))
    machine.on_snapshot(0, "b0")
    assert machine.action == ReadManifest(0)
    machine.on_manifest(None)
    assert machine.action == PutDelta(0)
    assert machine.exchange.own == own


def test_the_last_round_finishes():
    machine = a_replica()
    machine.on_snapshot(2, "b2")
    machine.on_manifest(manifest(2, base="b2"))
    machine.on_applied("b3")
    assert isinstance(machine.action, Finish)


def test_manifests_and_keys_read_back():
    whole = manifest()
    assert Manifest.from_bytes(whole.to_bytes()) == whole
    key = contribution(3).key(12)
    assert Contribution.from_key(key) == contribution(3)
    assert Contribution.from_key("rounds/000012/delta/0003.i.join") is None
    with pytest.raises(OuterLoopError, match="not a manifest"):
        Manifest.from_bytes(b'{"round_id": 1')
    assert dataclasses.replace(whole, rejected=2) != whole


def test_grace_follows_what_was_measured():
    assert adaptive_grace_s([], [], first_s=9.0) == 9.0
    assert adaptive_grace_s([0.1, 0.1], [10.0, 10.0], first_s=9.0) == 5.0
    assert adaptive_grace_s([8.0, 8.0, 9.0], [10.0, 10.0], first_s=9.0) == 8.0
    assert adaptive_grace_s([6.0, 8.0, 10.0], [10.0], first_s=9.0) == 20.0
