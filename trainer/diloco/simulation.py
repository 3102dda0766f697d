"""Seeded fault schedules: the protocol against a hostile store and a hostile scheduler.

One schedule is one seed. Replicas run in any interleaving, die and come back, have twins, and
their store loses requests, loses answers, cuts objects short, and gives old listings and old
reads. The state is a hash chain, so a schedule takes milliseconds; the decisions are those of
`trainer.diloco.protocol`, the same code that real replicas run.
"""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

from trainer.diloco.protocol import (
    Apply,
    Commit,
    Contribution,
    Finish,
    List,
    LoadSnapshot,
    Manifest,
    Merge,
    Merged,
    PutDelta,
    PutJoin,
    ReadManifest,
    ReplicaMachine,
    Train,
    delta_prefix,
    join_key,
    manifest_key,
    merged_key,
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
    """Performs what a machine asks for on the hostile store, one action per tick."""

    def __init__(self, world: "World", rank: int, attempt: int) -> None:
        self.world = world
        tail = f"{world.random.getrandbits(32):08x}"
        self.machine = ReplicaMachine(
            rank=rank,
            incarnation=f"{attempt:06d}-{tail}",
            world_size=world.n_replicas,
            n_rounds=world.n_rounds,
            quorum=world.quorum,
            base=digest("start"),
            prepared=world.prepared.get(rank),
            always_upload=world.always_upload,
        )
        self.attempt = attempt
        self.payload = world.payloads.get(rank, b"")
        self.ticks_waited = 0

    @property
    def graces(self) -> int:
        """How many graces this replica has waited in this round."""
        return self.ticks_waited // self.world.ticks_per_grace

    def tick(self) -> None:
        """Perform the present action; a lost request leaves it to be performed again."""
        self.ticks_waited += 1
        try:
            self._perform()
        except LostRequestError:
            return

    def _perform(self) -> None:
        machine, store, action = self.machine, self.world.store, self.machine.action
        match action:
            case LoadSnapshot():
                self._load_snapshot()
            case ReadManifest(round_id=round_id):
                machine.on_manifest(self._manifest(round_id), graces=self.graces)
            case PutJoin(round_id=round_id):
                store.put(join_key(round_id, machine.rank, machine.incarnation), b"")
                machine.on_join_put()
            case Train(round_id=round_id):
                self._train(round_id)
            case PutDelta(round_id=round_id) if machine.exchange is not None:
                store.put(machine.exchange.own.key(round_id), self.payload)
                machine.on_delta_put()
            case List(round_id=round_id):
                keys = store.keys(delta_prefix(round_id))
                joining = [int(k.rpartition("/")[2][:4]) for k in keys if k.endswith(".join")]
                found = [c for c in map(Contribution.from_key, keys) if c is not None]
                machine.on_listed(found, joining=joining, graces=self.graces)
            case Merge():
                self._merge(action)
            case Commit(manifest=manifest):
                self._commit(manifest)
            case Apply(manifest=manifest):
                self._apply(manifest)

    def _manifest(self, round_id: int) -> Manifest | None:
        data = self.world.store.get(manifest_key(round_id))
        if data is None:
            return None
        if not data.endswith(b"}"):
            raise LostRequestError("a manifest cut short is read again")
        return Manifest.from_bytes(data)

    def _load_snapshot(self) -> None:
        for key in sorted(self.world.store.keys("snapshots/"), reverse=True):
            data = self.world.store.get(key)
            if data and digest(data[:-16]) == data[-16:].decode():
                round_id, base, expected = data[:-16].decode().split(" ")
                ranks = [int(rank) for rank in expected.split(",")]
                self.machine.on_snapshot(int(round_id), base, ranks)
                return
        self.machine.on_snapshot(0, digest("start"))

    def _train(self, round_id: int) -> None:
        machine, world = self.machine, self.world
        noise = f"{world.random.getrandbits(32):08x}"
        self.payload = f"delta {machine.rank} {machine.incarnation} {round_id} {noise}".encode()
        own = Contribution(machine.rank, machine.incarnation, machine.base, 1, digest(self.payload))
        world.prepared[machine.rank] = (round_id, own)
        world.payloads[machine.rank] = self.payload
        self.ticks_waited = 0
        machine.on_trained(own)

    def _merge(self, merge: Merge) -> None:
        store, exchange = self.world.store, self.machine.exchange
        damaged = []
        for contribution in merge.contributions:
            if exchange is not None and contribution == exchange.own:
                continue
            payload = store.get(contribution.key(merge.round_id))
            if payload is None or digest(payload) != contribution.sha:
                damaged.append(contribution)
        if damaged:
            self.machine.on_damaged(damaged)
            return
        merged = merged_payload(merge.contributions)
        key = merged_key(merge.round_id, digest(merged))
        store.put(key, merged)
        self.machine.on_merged(Merged(digest(merged), len(merged)))

    def _commit(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.round_id)
        try:
            if self.world.store.put(key, manifest.to_bytes(), is_exclusive=True):
                self.world.n_created[manifest.round_id] += 1
        except LostRequestError as lost:
            created = str(lost) == "lost answer"
            self.world.n_created[manifest.round_id] += created
        self.machine.on_committed()

    def _apply(self, manifest: Manifest) -> None:
        world, machine = self.world, self.machine
        key = merged_key(manifest.round_id, manifest.merged.sha)
        if key not in world.store.objects:
            machine.on_lost()
            return
        payload = world.store.get(key)
        if payload is None or digest(payload) != manifest.merged.sha:
            raise LostRequestError("a merged delta cut short is read again")
        base = digest(machine.base, payload)
        world.check_applied(manifest, payload, base)
        self.ticks_waited = 0
        machine.on_applied(base)
        if manifest.incarnation == machine.incarnation and not machine.round_id % SNAPSHOT_EVERY:
            self._snapshot()

    def _snapshot(self) -> None:
        machine, store = self.machine, self.world.store
        expected = ",".join(map(str, sorted(machine.expected)))
        body = f"{machine.round_id} {machine.base} {expected}".encode()
        key, data = snapshot_key(machine.round_id, machine.base), body + digest(body).encode()
        try:
            store.put(key, data)
            if store.get(key) != data:
                return
        except LostRequestError:
            return
        for key in list(store.objects):
            old = key.startswith(round_prefix(machine.round_id - 2 * SNAPSHOT_EVERY))
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
    always_upload: bool
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
        late = [r.machine.rank for r in replicas if not isinstance(r.machine.action, Finish)]
        if late:
            self.violations.append(f"ranks {late} never finished")
        elif len({replica.machine.base for replica in replicas}) != 1:
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
        always_upload=dice.random() < 0.3,
    )
    replicas = [SimulatedReplica(world, rank, 0) for rank in range(n_replicas)]
    ticks = 0
    while ticks < MAX_TICKS and not world.violations:
        running = [r for r in replicas if not isinstance(r.machine.action, Finish)]
        if not running:
            break
        ticks += 1
        chosen = dice.choice(running)
        if dice.random() < odds.kill:
            world.store.counts["kill"] += 1
            successor = SimulatedReplica(world, chosen.machine.rank, chosen.attempt + 1)
            replicas[replicas.index(chosen)] = successor
        elif dice.random() < odds.twin and len(replicas) < n_replicas + 2:
            world.store.counts["twin"] += 1
            replicas.append(SimulatedReplica(world, chosen.machine.rank, chosen.attempt))
        else:
            chosen.tick()
    world.finish(replicas)
    return ScheduleReport(
        seed, n_replicas, world.n_rounds, ticks, world.store.counts, tuple(world.violations)
    )
