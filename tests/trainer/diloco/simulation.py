"""Seeded fault schedules: real replicas against a hostile store, scheduler and clock.

One schedule is one seed. Replicas are threads of which one runs at a time: at every request to the
store and at every sleep, dice decide who goes on. They die and come back, have twins, and their
store loses requests, loses answers, cuts objects short, and gives old listings and old reads.
"""

import random
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, OuterStep, exchange, replica
from trainer.errors import ObjectStoreError, OuterLoopError

N = 40
MAX_TURNS = 200_000


@dataclass(frozen=True)
class Faults:
    """How often what goes wrong, as probabilities per request or per turn."""

    error: float = 0.06
    lost_answer: float = 0.06
    truncated: float = 0.04
    stale_list: float = 0.12
    stale_read: float = 0.08
    kill: float = 0.004
    twin: float = 0.001


@dataclass(frozen=True)
class ScheduleReport:
    """What one schedule did. `violations` is empty unless the protocol is broken."""

    seed: int
    rounds: str
    n_turns: int
    faults: Counter[str]
    violations: tuple[str, ...]


class Killed(BaseException):
    """The process is gone."""


class Process(threading.Thread):
    """One replica's process, which runs only in its turns."""

    def __init__(self, world, rank):
        super().__init__(daemon=True)
        self.world, self.rank = world, rank
        self.turn = threading.Semaphore(0)
        self.wakes_at = 0.0
        self.is_killed = self.has_ended = False
        self.base = ""

    def run(self):
        self.turn.acquire()
        try:
            self.base = self.world.live(self.rank)
        except Killed:
            pass
        except OuterLoopError as error:
            if "a newer process" not in str(error):
                self.world.violations.append(f"rank {self.rank}: {error}")
        except Exception as error:  # noqa: BLE001 - a violation as well
            self.world.violations.append(f"rank {self.rank}: {error!r}")
        self.has_ended = True
        self.world.turns.release()

    def pause(self, seconds):
        """Let others run, for some seconds of the world's time."""
        self.wakes_at = self.world.now + seconds
        self.world.turns.release()
        self.turn.acquire()
        if self.is_killed:
            raise Killed


class HostileStore(MemoryStore):
    """A dictionary that behaves as badly as a network allows, and counts how."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def _happens(self, name):
        dice, odds = self.world.dice, getattr(self.world.faults, name)
        self.world.counts[name] += (is_so := dice.random() < odds)
        return is_so

    def _asked(self, verb, key, request):
        self.world.pause(self.world.dice.random() * 0.1)
        if self._happens("error"):
            raise ObjectStoreError(f"{key}: no answer")
        answer = super()._asked(verb, key, request)
        if verb in ("write", "create") and self._happens("lost_answer"):
            raise ObjectStoreError(f"{key}: no answer")
        return answer

    def get_many(self, keys):
        return [self.get(key) for key in keys]

    def _put(self, key, data):
        if key.endswith("manifest.json") and self._objects.get(key, data) != data:
            self.world.violations.append(f"{key} was changed")
        can_tear = key not in self._objects and key.startswith(("snapshots/", "deltas/"))
        super()._put(
            key, data[: len(data) // 2] if can_tear and self._happens("truncated") else data
        )

    def _create(self, key, data):
        is_created = super()._create(key, data)
        self.world.n_created[key] += is_created
        return is_created

    def _get(self, key):
        data = None if self._happens("stale_read") else super()._get(key)
        return data[:-1] if data and self._happens("truncated") else data

    def _keys(self, prefix):
        found = sorted(super()._keys(prefix))
        return found[: self.world.dice.randrange(len(found) + 1)] if (
            found and self._happens("stale_list")
        ) else found  # fmt: skip


class WatchedReplica(OuterReplica):
    """A replica whose every applied round is held to what everybody else applied."""

    world = None

    def contribute(self, vector, *, weight):
        own = super().contribute(vector, weight=weight)
        self.world.deltas[own.sha] = vector.astype(np.float64)
        return own

    def _apply(self, manifest):
        before = self.theta.copy()
        base = super()._apply(manifest)
        if base is not None:
            self.world.check(manifest, base, before - self.theta, self.quorum)
        return base


@dataclass
class World:
    """One schedule's processes, and what is known about what they did."""

    dice: random.Random
    faults: Faults
    n_replicas: int
    settings: OuterSettings
    now: float = 0.0
    turns: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    running: Process | None = None
    counts: Counter[str] = field(default_factory=Counter)
    n_created: Counter[str] = field(default_factory=Counter)
    deltas: dict[str, np.ndarray] = field(default_factory=dict)
    bases: dict[int, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.store = HostileStore(self)

    def pause(self, seconds):
        self.running.pause(seconds)

    def monotonic(self):
        return self.now

    sleep = pause

    def live(self, rank):
        """Be one replica from its start to the last round."""
        one = WatchedReplica(
            self.store, np.zeros(N), rank=rank, world_size=self.n_replicas, settings=self.settings
        )
        one.world = self
        one.join()
        while not one.is_finished:
            self.pause(self.dice.random() * 3)
            local = one.theta + np.random.default_rng(self.dice.getrandbits(32)).normal(size=N)
            one.exchange(local.astype(np.float32), weight=self.dice.randint(1, 3))
        return one.base

    def check(self, manifest, base, moved, quorum):
        """Check one replica's application of a round against everybody else's."""
        round_id, given = manifest.round_id, manifest.contributions
        ranks = [c.rank for c in given]
        if len(set(ranks)) != len(ranks) or len(ranks) < quorum:
            self.violations.append(f"round {round_id}: contributors {ranks}")
        if any(c.round_id == round_id and c.base != manifest.base for c in given):
            self.violations.append(f"round {round_id}: a contribution from another state")
        if self.bases.setdefault(round_id, base) != base:
            self.violations.append(f"round {round_id}: replicas diverged")
        is_synchronous = self.settings.rounds == "synchronous"
        if is_synchronous and any(c.round_id != round_id for c in given):
            self.violations.append(f"round {round_id}: an old contribution")
        n = len(given) if is_synchronous else self.n_replicas
        total = n * sum(c.weight for c in given) / len(given)
        wanted = sum(
            self.deltas[c.sha] * c.weight / total
            * (1 + max(0, round_id - c.round_id - n + 1) / n) ** -0.5
            for c in given
        )  # fmt: skip
        if self.settings.codec == "fp32" and not np.allclose(moved, wanted, atol=1e-4):
            self.violations.append(f"round {round_id}: a wrong mean was applied")

    def run(self):
        """Run all replicas to the end, and return the number of turns."""
        processes = [self._started(rank) for rank in range(self.n_replicas)]
        n_turns = 0
        while n_turns < MAX_TURNS and not self.violations:
            alive = [p for p in processes if not p.has_ended]
            if not alive:
                break
            n_turns += 1
            ready = [p for p in alive if p.wakes_at <= self.now]
            if not ready:
                self.now = min(p.wakes_at for p in alive)
                continue
            chosen = self.dice.choice(ready)
            if self.dice.random() < self.faults.kill:
                self.counts["kill"] += 1
                chosen.is_killed = True
                processes.append(self._started(chosen.rank))
            elif self.dice.random() < self.faults.twin:
                self.counts["twin"] += 1
                processes.append(self._started(chosen.rank))
            self._let(chosen)
        self._finish(processes)
        return n_turns

    def _started(self, rank):
        process = Process(self, rank)
        process.start()
        return process

    def _let(self, process):
        self.running = process
        process.turn.release()
        self.turns.acquire()

    def _finish(self, processes):
        if not self.violations:
            finished = {p.rank: p.base for p in processes if p.base}
            if len(finished) != self.n_replicas:
                self.violations.append(f"only ranks {sorted(finished)} finished")
            if self.settings.rounds == "synchronous" and len(set(finished.values())) != 1:
                self.violations.append("final states differ")
        for key, n in self.n_created.items():
            if n != 1:
                self.violations.append(f"{key}: created {n} times")
        for process in processes:
            process.is_killed = True
            while not process.has_ended:
                self._let(process)


@contextmanager
def clock_of(world):
    with mock.patch.object(exchange, "time", world), mock.patch.object(replica, "time", world):
        yield


def run_schedule(seed: int, *, faults: Faults | None = None) -> ScheduleReport:
    """Run one schedule to the end and report what was violated.

    Args:
        seed: Determines everything: sizes, interleaving and faults.
        faults: How often what goes wrong.
    """
    dice = random.Random(seed)
    n_replicas = dice.randint(2, 4)
    settings = OuterSettings(
        rounds=dice.choice(("synchronous", "asynchronous")),
        codec=dice.choice(("fp32", "fp32", "ternary")),
        outer=OuterStep(1.0, 0.0),
        n_rounds=dice.randint(2, 5),
        quorum=dice.randint(1, n_replicas),
        timeout_s=1e6,
        first_grace_s=dice.choice((1.0, 10.0, 60.0)),
        snapshot_every=2,
    )
    world = World(dice, faults or Faults(), n_replicas, settings)
    with clock_of(world):
        n_turns = world.run()
    return ScheduleReport(seed, settings.rounds, n_turns, world.counts, tuple(world.violations))
