"""Seeded fault schedules: the protocol against a hostile store and a hostile scheduler.

One schedule is one seed. Replicas run in any interleaving, die and come back, have twins, and
their store loses requests, loses answers, cuts objects short, and gives old listings and old
reads. The state is a hash chain, so a schedule takes milliseconds; the decisions are those of
`trainer.outer.protocol`, the same code that real replicas run.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from trainer.errors import OuterLoopError
from trainer.outer.protocol import (
    Apply,
    Commit,
    Contribution,
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
    delta_prefix,
    join_key,
    manifest_key,
    merged_key,
    read_listing,
    round_prefix,
    snapshot_key,
)

__all__ = ["Faults", "ScheduleReport", "run_schedule"]

MAX_TICKS = 20_000
SNAPSHOT_EVERY = 2


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong, as probabilities per request or per tick.

    Uploads of contributions and snapshots can arrive torn, and every read can be cut short.
    """

    error: float = 0.08
    lost_answer: float = 0.08
    truncated: float = 0.05
    stale_list: float = 0.15
    stale_read: float = 0.1
    kill: float = 0.006
    twin: float = 0.003


@dataclass(frozen=True)
class ScheduleReport:
    """What one schedule did. `violations` is empty unless the protocol is broken."""

    seed: int
    n_replicas: int
    n_rounds: int
    n_ticks: int
    faults: Counter[str]
    violations: tuple[str, ...]


class LostRequestError(Exception):
    """The store did not answer; the request may or may not have been carried out."""


@dataclass
class HostileStore:
    """A dictionary that behaves as badly as a network allows, and counts how."""

    random: random.Random
    odds: Faults
    objects: dict[str, bytes] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def put(self, key: str, data: bytes, *, is_exclusive: bool = False) -> bool:
        """Write an object; with `is_exclusive` only if there is none."""
        self._maybe("error", self.odds.error)
        if is_exclusive and key in self.objects:
            return False
        can_tear = not is_exclusive and "/merged/" not in key and key not in self.objects
        is_torn = can_tear and self._happens("truncated", self.odds.truncated)
        self.objects[key] = data[: len(data) // 2] if is_torn else data
        self.created.append(key)
        self._maybe("lost answer", self.odds.lost_answer)
        return True

    def get(self, key: str) -> bytes | None:
        """Read an object, or what seems to be it."""
        self._maybe("error", self.odds.error)
        if self._happens("stale read", self.odds.stale_read):
            return None
        data = self.objects.get(key)
        if data and self._happens("truncated", self.odds.truncated):
            return data[:-1]
        return data

    def keys(self, prefix: str) -> list[str]:
        """List keys; sometimes the newest are not there yet."""
        self._maybe("error", self.odds.error)
        found = [key for key in self.objects if key.startswith(prefix)]
        if found and self._happens("stale list", self.odds.stale_list):
            return found[: self.random.randrange(len(found))]
        return found

    def _happens(self, name: str, odds: float) -> bool:
        if self.random.random() >= odds:
            return False
        self.counts[name] += 1
        return True

    def _maybe(self, name: str, odds: float) -> None:
        if self._happens(name, odds):
            raise LostRequestError(name)


def digest(*parts: str | bytes) -> str:
    """Return a short hash."""
    whole = b"|".join(p if isinstance(p, bytes) else p.encode() for p in parts)
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


class SimulatedReplica:
    """Performs what the protocol asks for on the hostile store, one action per tick."""

    def __init__(self, world: "World", rank: int, attempt: int) -> None:
        self.world = world
        self.rank = rank
        self.attempt = attempt
        self.incarnation = f"{attempt:06d}-{world.random.getrandbits(32):08x}"
        self.life = ReplicaLife(rank, world.n_rounds, world.quorum, world.prepared.get(rank))
        self.own = self.life.prepared and self.life.prepared[1]
        self.payload = world.payloads.get(rank, b"")
        self.ticks_waited = 0
        self.is_finished = False
        self.protocol = self.life.live()
        self.action = next(self.protocol)

    @property
    def graces(self) -> int:
        """How many graces this replica has waited in this round."""
        return self.ticks_waited // self.world.ticks_per_grace

    def tick(self) -> None:
        """Perform the present action; a lost request leaves it to be performed again."""
        self.ticks_waited += 1
        try:
            reply = self._perform()
        except LostRequestError:
            return
        try:
            self.action = self.protocol.send(reply)
        except StopIteration:
            self.is_finished = True

    def _perform(self):
        store, action = self.world.store, self.action
        match action:
            case LoadSnapshot():
                return self._load_snapshot()
            case ReadManifest(round_id=round_id):
                return Look(self._manifest(round_id), self.graces)
            case PutJoin(round_id=round_id):
                store.put(join_key(round_id, self.rank, self.incarnation), b"")
            case Train(round_id=round_id):
                return self._train(round_id)
            case PutDelta(round_id=round_id):
                store.put(self.own.key(round_id), self.payload)
            case ListRound(round_id=round_id):
                return read_listing(store.keys(delta_prefix(round_id)), self.graces)
            case Merge():
                return self._merge(action)
            case Commit(manifest=manifest):
                self._commit(manifest)
            case Apply(manifest=manifest):
                return self._apply(manifest)
        return None

    def _manifest(self, round_id: int) -> Manifest | None:
        data = self.world.store.get(manifest_key(round_id))
        if data is None:
            return None
        try:
            return Manifest.from_bytes(data)
        except OuterLoopError as error:
            raise LostRequestError("a manifest cut short is read again") from error

    def _load_snapshot(self) -> Snapshot:
        for key in sorted(self.world.store.keys("snapshots/"), reverse=True):
            data = self.world.store.get(key)
            if data and digest(data[:-16]) == data[-16:].decode():
                round_id, base, expected = data[:-16].decode().split(" ")
                ranks = frozenset(int(rank) for rank in expected.split(","))
                return Snapshot(int(round_id), base, ranks)
        return Snapshot(0, digest("start"), frozenset(range(self.world.n_replicas)))

    def _train(self, round_id: int) -> Contribution:
        world = self.world
        noise = f"{world.random.getrandbits(32):08x}"
        self.payload = f"delta {self.rank} {self.incarnation} {round_id} {noise}".encode()
        self.own = Contribution(
            self.rank, self.incarnation, self.life.base, 1, digest(self.payload)
        )
        world.prepared[self.rank] = (round_id, self.own)
        world.payloads[self.rank] = self.payload
        self.ticks_waited = 0
        return self.own

    def _merge(self, merge: Merge) -> Merged | tuple[Contribution, ...]:
        store = self.world.store
        damaged = []
        for contribution in merge.contributions:
            if contribution == self.own:
                continue
            payload = store.get(contribution.key(merge.round_id))
            if payload is None or digest(payload) != contribution.sha:
                damaged.append(contribution)
        if damaged:
            return tuple(damaged)
        merged = merged_payload(merge.contributions)
        store.put(merged_key(merge.round_id, digest(merged)), merged)
        return Merged(digest(merged), len(merged))

    def _commit(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.round_id)
        try:
            if self.world.store.put(key, manifest.to_bytes(), is_exclusive=True):
                self.world.n_created[manifest.round_id] += 1
        except LostRequestError as lost:
            created = str(lost) == "lost answer"
            self.world.n_created[manifest.round_id] += created

    def _apply(self, manifest: Manifest) -> str | None:
        world = self.world
        key = merged_key(manifest.round_id, manifest.merged.sha)
        if key not in world.store.objects:
            return None
        payload = world.store.get(key)
        if payload is None or digest(payload) != manifest.merged.sha:
            raise LostRequestError("a merged delta cut short is read again")
        base = digest(manifest.base, payload)
        world.check_applied(manifest, payload, base)
        self.ticks_waited = 0
        next_round = manifest.round_id + 1
        if manifest.incarnation == self.incarnation and not next_round % SNAPSHOT_EVERY:
            self._snapshot(next_round, base, manifest.expected)
        return base

    def _snapshot(self, round_id: int, base: str, expected: tuple[int, ...]) -> None:
        store = self.world.store
        body = f"{round_id} {base} {','.join(map(str, expected))}".encode()
        key, data = snapshot_key(round_id, base), body + digest(body).encode()
        try:
            store.put(key, data)
            if store.get(key) != data:
                return
        except LostRequestError:
            return
        for key in list(store.objects):
            old = key.startswith(round_prefix(round_id - 2 * SNAPSHOT_EVERY))
            if old and not key.endswith("manifest.json"):
                del store.objects[key]


def merged_payload(contributions: tuple[Contribution, ...]) -> bytes:
    """Return what the merged delta of these contributions must be."""
    return ("mean of " + " ".join(c.sha for c in contributions)).encode()


@dataclass
class World:
    """One schedule's replicas and what is known about what they did."""

    random: random.Random
    store: HostileStore
    n_replicas: int
    n_rounds: int
    quorum: int
    ticks_per_grace: int
    prepared: dict[int, tuple[int, Contribution]] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    n_created: Counter[int] = field(default_factory=Counter)
    bases: dict[int, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def check_applied(self, manifest: Manifest, payload: bytes, base: str) -> None:
        """Check one replica's application of a round against everybody else's."""
        round_id = manifest.round_id
        ranks = [contribution.rank for contribution in manifest.contributions]
        if payload != merged_payload(manifest.contributions):
            self.violations.append(f"round {round_id}: a wrong mean was applied")
        if len(set(ranks)) != len(ranks) or len(ranks) < self.quorum:
            self.violations.append(f"round {round_id}: contributors {ranks}")
        if any(c.base != manifest.base for c in manifest.contributions):
            self.violations.append(f"round {round_id}: a contribution from another state")
        if self.bases.setdefault(round_id, base) != base:
            self.violations.append(f"round {round_id}: replicas diverged")

    def finish(self, replicas: list[SimulatedReplica]) -> None:
        """Check that every round was decided once and everybody came to the end."""
        for round_id in range(self.n_rounds):
            if self.n_created[round_id] != 1:
                self.violations.append(
                    f"round {round_id}: {self.n_created[round_id]} manifests created"
                )
        late = [replica.rank for replica in replicas if not replica.is_finished]
        if late:
            self.violations.append(f"ranks {late} never finished")
        elif len({replica.life.base for replica in replicas}) != 1:
            self.violations.append("final states differ")


def run_schedule(seed: int, *, faults: Faults | None = None) -> ScheduleReport:
    """Run one schedule to the end and report what was violated.

    Args:
        seed: Determines everything: sizes, interleaving and faults.
        faults: How often what goes wrong.
    """
    dice = random.Random(seed)
    odds = faults or Faults()
    n_replicas = dice.randint(2, 4)
    world = World(
        random=dice,
        store=HostileStore(dice, odds),
        n_replicas=n_replicas,
        n_rounds=dice.randint(2, 6),
        quorum=dice.randint(1, n_replicas),
        ticks_per_grace=dice.choice((3, 10, 40)),
    )
    replicas = [SimulatedReplica(world, rank, 0) for rank in range(n_replicas)]
    ticks = 0
    while ticks < MAX_TICKS and not world.violations:
        running = [replica for replica in replicas if not replica.is_finished]
        if not running:
            break
        ticks += 1
        chosen = dice.choice(running)
        if dice.random() < odds.kill:
            world.store.counts["kill"] += 1
            successor = SimulatedReplica(world, chosen.rank, chosen.attempt + 1)
            replicas[replicas.index(chosen)] = successor
        elif dice.random() < odds.twin and len(replicas) < n_replicas + 2:
            world.store.counts["twin"] += 1
            replicas.append(SimulatedReplica(world, chosen.rank, chosen.attempt))
        else:
            chosen.tick()
    world.finish(replicas)
    return ScheduleReport(
        seed, n_replicas, world.n_rounds, ticks, world.store.counts, tuple(world.violations)
    )
