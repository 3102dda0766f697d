"""The round protocol under thousands of seeded faults, and its rules one by one."""

import dataclasses

import pytest

from tests.trainer.outer import simulation
from trainer.errors import OuterLoopError
from trainer.outer.protocol import (
    Apply,
    Commit,
    Contribution,
    Listing,
    ListRound,
    LoadSnapshot,
    Look,
    Manifest,
    Merge,
    Merged,
    PutDelta,
    PutJoin,
    ReadManifest,
    ReplicaLife,
    Snapshot,
    Train,
    adaptive_grace_s,
    decide_round,
    turn_of,
)


def contribution(rank, *, incarnation="000000-aa", base="b0", sha=None):
    return Contribution(rank, incarnation, base, 1, sha or f"sha{rank}")


UNDECIDED = Look(None)
POLL = ReadManifest(0, is_poll=True)


def a_round(rank, *replies, quorum=2):
    """Start a round of three, answer its first actions; return it with the action it is at."""
    protocol = decide_round(0, contribution(rank), frozenset((0, 1, 2)), quorum)
    assert next(protocol) == ReadManifest(0)
    return protocol, answered(protocol, *replies)


def answered(protocol, *replies):
    """Answer a protocol's actions in turn; return the last action."""
    return [protocol.send(reply) for reply in replies][-1]


def listing(*contributions, graces=0, joining=()):
    return Listing(tuple(contributions), frozenset(joining), graces)


def result_of(protocol, reply):
    with pytest.raises(StopIteration) as ended:
        protocol.send(reply)
    return ended.value.value


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
        return Merged(sha, len(payload))

    monkeypatch.setattr(simulation.SimulatedReplica, "_merge", merge)
    assert "a wrong mean was applied" in simulation.run_schedule(1).violations[0]


def test_first_choice_uploads_its_own_delta_and_reduces_when_all_are_there():
    protocol, action = a_round(0, UNDECIDED)
    assert action == PutDelta(0)
    assert answered(protocol, None) == ListRound(0)
    action = answered(protocol, listing(contribution(1), contribution(2)))
    assert action == Merge(0, tuple(map(contribution, range(3))))


def test_the_others_upload_and_wait():
    protocol, action = a_round(1, UNDECIDED)
    assert action == PutDelta(0)
    assert answered(protocol, None) == POLL
    assert answered(protocol, UNDECIDED) == POLL


def test_a_delta_is_uploaded_again_after_long_waits_ever_rarer():
    protocol, _ = a_round(2, UNDECIDED, None)
    uploads = []
    for graces in (1, 3, 4, 5, 7, 8, 9, 15, 16):
        action = protocol.send(Look(None, graces))
        if action == PutDelta(0):
            uploads.append(graces)
            action = protocol.send(None)
        if action == ListRound(0):
            protocol.send(listing(graces=0))
    assert uploads == [4, 8, 16]


def test_reducing_rotates_over_rounds():
    assert [turn_of(1, round_id, (0, 1, 2)) for round_id in range(3)] == [1, 0, 2]
    assert turn_of(7, 5, (0, 1, 2)) == 3, "who is not waited for is the last to reduce"


def test_a_straggler_is_left_out_only_after_a_grace_and_with_a_quorum():
    protocol, _ = a_round(0, UNDECIDED, None)
    assert answered(protocol, listing(contribution(1), graces=0)) == POLL
    assert answered(protocol, UNDECIDED, listing(graces=9)) == POLL
    action = answered(protocol, UNDECIDED, listing(contribution(1), graces=1))
    assert isinstance(action, Merge)


def test_the_next_in_turn_takes_over_from_a_silent_reducer():
    protocol, _ = a_round(1, UNDECIDED, None)
    assert answered(protocol, Look(None, 1)) == ListRound(0)
    found = (contribution(1), contribution(2))
    assert answered(protocol, listing(*found, graces=1)) == POLL
    assert answered(protocol, Look(None, 2), listing(*found, graces=2)) == Merge(0, found)


def test_of_twins_the_newer_counts_and_another_base_is_rejected():
    newer = contribution(1, incarnation="000001-aa", sha="other")
    stranger = contribution(2, base="b9")
    protocol, action = a_round(
        0, UNDECIDED, None, listing(contribution(1), newer, stranger, graces=1)
    )
    assert action.contributions == (contribution(0), newer)
    assert answered(protocol, Merged("m", 1)).manifest.rejected == 1


def test_a_damaged_contribution_is_left_out_and_looked_at_again():
    found = (contribution(1), contribution(2))
    protocol, _ = a_round(0, UNDECIDED, None, listing(*found))
    assert answered(protocol, (contribution(2),)) == ListRound(0)
    assert answered(protocol, listing(*found)) == POLL
    assert len(answered(protocol, UNDECIDED, listing(*found)).contributions) == 3


def test_a_commit_is_repeated_until_somebodys_manifest_is_read():
    found = (contribution(1), contribution(2))
    protocol, proposed = a_round(0, UNDECIDED, None, listing(*found), Merged("m", 1))
    assert isinstance(proposed, Commit)
    assert answered(protocol, None) == ReadManifest(0)
    assert answered(protocol, UNDECIDED) == proposed
    answered(protocol, None)
    assert result_of(protocol, Look(manifest())) == manifest()


def a_replica(start, *, rank=0, prepared=None):
    """Start a replica from a snapshot; return its life, its protocol and the action it is at."""
    life = ReplicaLife(rank, n_rounds=3, quorum=1, prepared=prepared)
    protocol = life.live()
    assert next(protocol) == LoadSnapshot(0)
    return life, protocol, protocol.send(start)


def test_a_joiner_replays_the_log_and_asks_to_be_waited_for():
    _, protocol, action = a_replica(Snapshot(1, "b1", frozenset([0])), rank=1)
    assert action == ReadManifest(1)
    action = answered(protocol, Look(manifest(1, ranks=(0,), base="b1", expected=(0,))))
    assert isinstance(action, Apply)
    assert answered(protocol, "b2", UNDECIDED) == PutJoin(2)
    assert answered(protocol, None) == Train(2)


def test_a_manifest_about_another_state_makes_a_replica_rejoin():
    life, protocol, _ = a_replica(Snapshot(0, "b0", frozenset((0, 1))))
    assert answered(protocol, Look(manifest(0, base="elsewhere"))) == LoadSnapshot(0)
    assert life.n_resyncs == 1


def test_a_round_whose_mean_is_lost_makes_a_replica_rejoin():
    _, protocol, _ = a_replica(Snapshot(0, "b0", frozenset((0, 1))))
    assert answered(protocol, Look(manifest()), None) == LoadSnapshot(0)
    assert answered(protocol, Snapshot(2, "b2", frozenset((0, 1)))) == ReadManifest(2)


def test_a_prepared_contribution_is_sent_again_and_not_trained_again():
    own = contribution(1)
    start = Snapshot(0, "b0", frozenset((0, 1)))
    _, protocol, action = a_replica(start, rank=1, prepared=(0, own))
    assert action == ReadManifest(0)
    assert answered(protocol, UNDECIDED) == PutDelta(0)


def test_a_prepared_contribution_to_another_state_is_forgotten():
    start = Snapshot(0, "b9", frozenset((0, 1)))
    _, protocol, _ = a_replica(start, rank=1, prepared=(0, contribution(1)))
    assert answered(protocol, UNDECIDED) == Train(0)


def test_the_last_round_ends_a_replicas_life():
    _, protocol, _ = a_replica(Snapshot(2, "b2", frozenset((0, 1))))
    answered(protocol, Look(manifest(2, base="b2")))
    assert result_of(protocol, "b3") is None


def test_a_delta_that_was_trained_from_another_state_is_an_error():
    _, protocol, _ = a_replica(Snapshot(0, "b0", frozenset((0, 1))))
    assert answered(protocol, UNDECIDED) == Train(0)
    with pytest.raises(OuterLoopError, match="trained from another state"):
        protocol.send(contribution(0, base="b7"))


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
