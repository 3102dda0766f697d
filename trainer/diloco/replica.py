"""One replica of an outer loop over an object store.

    replica = OuterReplica(store, theta, rank=0, world_size=4)
    replica.join()
    while not replica.is_finished:
        ...  # H inner steps from replica.theta
        report = replica.exchange(local, weight=n_tokens)

After the same round, all replicas have the same global state (parameters and velocity), bit for
bit, and its hash is in the next manifest. What a replica has for itself alone (the inner optimizer,
the error of the codec) ends with its process: another process of its rank starts from the newest
state of the run.
"""

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.diloco import exchange
from trainer.diloco.codecs import seal_tensors, sha256, unseal_tensors
from trainer.diloco.exchange import (
    MIN_POLL_S,
    Patience,
    RoundLog,
    RoundReport,
    Vector,
    agree_on_run,
    claim,
)
from trainer.diloco.object_store import ObjectStore
from trainer.diloco.protocol import (
    DELTAS,
    MAX_AGE,
    MERGED,
    SNAPSHOTS,
    Manifest,
    OuterStep,
    manifest_key,
    snapshot_key,
)
from trainer.errors import ObjectStoreError, OuterLoopError, TrainerConfigError

logger = logging.getLogger(__name__)

MAX_RESYNCS = 10
"""After this many snapshots without progress, the log can't be repaired."""
ROUNDS = ("synchronous", "asynchronous")


@dataclass(frozen=True)
class OuterSettings:
    """The settings that all replicas of a run share, and each one's timeouts.

    The first replica of a run decides the first five. A different value later is an error.
    """

    rounds: str = "synchronous"
    """`synchronous`: the next round begins with what all (or a quorum) have made of this one.
    `asynchronous`: nobody waits, and a delta is merged when it arrives."""
    codec: str = "ternary"
    """Wire format: fp32 or ternary."""
    outer: OuterStep = OuterStep()  # noqa: RUF009 - frozen
    """The outer optimizer. Asynchronous rounds need one without momentum."""
    n_rounds: int | None = None
    """Number of rounds. With None, the caller decides when to stop."""
    signature: str = ""
    """Hash of the exchanged parameters; see `ParameterVector.signature`."""
    quorum: int | None = None
    """Fewest contributions per synchronous round. None means half of the replicas, rounded up."""
    timeout_s: float = 1800.0
    """Seconds without a decision of the round after which an error is raised."""
    first_grace_s: float = 120.0
    """Seconds that round 0 waits for machines that are still booting, after it has a quorum."""
    snapshot_every: int = 5
    """Rounds between snapshots of the global state."""


class OuterReplica(RoundLog):
    """A replica that joins a run, exchanges once per round, and survives the loss of others.

    Raises:
        TrainerConfigError: Asynchronous rounds would have momentum.
    """

    def __init__(
        self,
        store: ObjectStore,
        theta: Vector,
        *,
        rank: int,
        world_size: int,
        settings: OuterSettings | None = None,
    ) -> None:
        self.settings = settings = settings or OuterSettings()
        self.is_synchronous = settings.rounds == "synchronous"
        if settings.outer.momentum and not self.is_synchronous:
            # Liu et al. 2024, arXiv:2401.09135: outer momentum does harm there.
            raise TrainerConfigError(
                "asynchronous rounds need an outer optimizer without momentum: choose average"
            )
        quorum = settings.quorum or -(-world_size // 2)
        super().__init__(
            store,
            settings.codec,
            Patience(settings.timeout_s, settings.first_grace_s),
            rank=rank,
            n=int(np.size(theta)),
            quorum=quorum if self.is_synchronous else 1,
            max_age=0 if self.is_synchronous else MAX_AGE * world_size,
            n_full=None if self.is_synchronous else world_size,
        )
        self.world_size = world_size
        self.theta = np.array(theta, dtype=np.float32)
        self.velocity = np.zeros_like(self.theta)
        # Asynchronous manifests come once a replica, not once for all.
        self.snapshot_every = settings.snapshot_every * (self._n_full or 1)
        self._n_made: int | None = None
        self._n_resyncs, self._stuck_at = 0, -1

    @property
    def n_trained(self) -> int:
        """Return the number of rounds whose inner steps this replica may skip."""
        if self.is_synchronous:
            return self.round_id
        # A new process starts at the average round of the others.
        return self.round_id // self.world_size if self._n_made is None else self._n_made

    @property
    def is_finished(self) -> bool:
        """Return whether all rounds are made."""
        n_rounds = self.settings.n_rounds
        return n_rounds is not None and self.n_trained >= n_rounds

    def join(self) -> None:
        """Agree on the run, load the newest state, and catch up with the log of rounds.

        This needs no live replica. Afterwards, `theta` and `round_id` are up to date.

        Raises:
            TrainerConfigError: The run was started with other settings, or the store ignores the
                condition of a conditional write.
        """
        self.patience.begin_wait()
        self.retried(self._agree)
        self.incarnation = self.retried(lambda: claim(self.store, self.rank))
        self.retried(self._start)
        self._follow()
        self._n_made = self.n_trained
        self._begin_round()
        self._reported = self._progress()

    def exchange(self, local: Vector, *, weight: int = 1) -> RoundReport:
        """Finish a round: send θ_initial − θ_local, apply what was decided, and advance.

        Raises:
            OuterLoopError: The parameters are not finite, or a newer process has this rank.
            OuterTimeoutError: The round was not decided in time.
        """
        if self._n_made is None or self.is_finished:
            raise OuterLoopError("exchange() before join(), or after the last round")
        index = self.n_trained
        self.contribute(self.theta - local, weight=weight)
        self._n_made += 1
        self.decide()
        self._begin_round()
        return self.report(index)

    def take_up(self) -> Vector | None:
        """Follow the log in the middle of an asynchronous round.

        So even a slow replica trains from a state that is at most one inner step old. Source: Shen
        et al. 2019, arXiv:1906.12043 (others' progress + what was trained meanwhile).

        Returns:
            The change of the state, to be added to the local parameters, or None without a change.
        """
        if self.is_synchronous:
            return None
        first, before = self.round_id, self.theta.copy()
        self._follow(is_thorough=False)
        return None if self.round_id == first else self.theta - before

    def _follow(self, *, is_thorough: bool = True) -> None:
        """Apply all rounds that are decided."""
        while self.advance(is_thorough=is_thorough):
            pass

    def _begin_round(self) -> None:
        """Let the caller train, after catching up if its contribution was left out."""
        if self.is_synchronous and not self.is_finished:
            if self.outcome is None:
                self._follow()
            if self.rank not in self.expected and not self.is_finished:
                self.ask_to_join()
        self.patience.begin_round()

    def _apply(self, manifest: Manifest) -> str | None:
        merged = None
        if manifest.base == self.base:
            merged = self.read_merged(manifest, n=self.theta.size)
        if merged is None:
            self._start_again()
            return None
        self._check_not_replaced(manifest)
        self.settle(manifest)
        self.settings.outer.apply(self.theta, self.velocity, merged)
        base = self._base()
        if self.has_reduced and (manifest.round_id + 1) % self.snapshot_every == 0:
            self._snapshot(manifest.round_id + 1, base, manifest.expected)
        return base

    def _check_not_replaced(self, manifest: Manifest) -> None:
        for contribution in manifest.contributions:
            is_twin = contribution.rank == self.rank and contribution != self.own
            if is_twin and contribution.incarnation[:6] > self.incarnation[:6]:
                raise OuterLoopError(
                    f"rank {self.rank}: a newer process ({contribution.incarnation}) has taken "
                    f"over from this one ({self.incarnation}); stop this one"
                )

    def _base(self) -> str:
        return sha256(self.theta, self.velocity)[:20]

    def _agree(self) -> None:
        """Fix the run's settings by creating its description, or check them against it."""
        settings = self.settings
        mine = {
            "rounds": settings.rounds,
            "codec": settings.codec,
            "outer": asdict(settings.outer),
            "n_rounds": settings.n_rounds,
            "signature": settings.signature,
            "n": int(self.theta.size),
        }
        run = agree_on_run(self.store, mine, {"base": self._base()})
        initial_base = str(run["base"])
        key = snapshot_key(0, initial_base)
        if self._base() == initial_base and key not in self.store.keys(SNAPSHOTS):
            self._put_snapshot(0, initial_base, tuple(range(self.world_size)))

    def _start(self) -> None:
        """Load a snapshot, and learn from the rounds before it what was merged already."""
        self.load_snapshot()
        for round_id in range(max(0, self.round_id - self.max_age), self.round_id):
            manifest = self.read_manifest(round_id, is_thorough=True)
            if manifest is not None:
                self.settle(manifest)

    def _start_again(self) -> None:
        """Load a snapshot because the present round can't be applied.

        Either we hold a state that the run doesn't know, or the mean is gone, with its deltas: both
        are mended by a newer snapshot, or by somebody who sends a delta again.

        Raises:
            OuterLoopError: No snapshot fits the decided round.
        """
        self._n_resyncs = 1 if self.round_id > self._stuck_at else self._n_resyncs + 1
        self._stuck_at = max(self._stuck_at, self.round_id)
        if self._n_resyncs > MAX_RESYNCS:
            raise OuterLoopError(
                f"rank {self.rank}: {manifest_key(self.round_id)} does not continue the state of this replica, or its merged object is missing, and no snapshot fits"
            )
        logger.warning("round %d cannot be applied: starting from a snapshot", self.round_id)
        time.sleep(MIN_POLL_S * self._n_resyncs)
        self.patience.begin_wait()
        self._start()

    def load_snapshot(self, until: int | None = None) -> None:
        """Load the newest readable snapshot of at most `until` rounds, or wait for the first one.

        Raises:
            OuterLoopError: The run has begun, but has no undamaged snapshot.
            OuterTimeoutError: The run doesn't begin in time.
        """
        began = time.monotonic()
        while True:
            keys = [k for k in self.store.keys(SNAPSHOTS) if until is None or _round_of(k) <= until]
            for key in reversed(keys):
                if (loaded := self._read_snapshot(key)) is not None:
                    header, tensors = loaded
                    self.theta, self.velocity = tensors["theta"], tensors["velocity"]
                    self.round_id, self.base = header["round_id"], header["base"]
                    self.expected = frozenset(header["expected"])
                    return
            if (first := snapshot_key(0, self._base())) in keys:
                logger.warning("%s was rewritten", first)
                self._put_snapshot(0, self._base(), tuple(range(self.world_size)))
            elif time.monotonic() - began > exchange.DAMAGE_S and (
                keys or self.read_manifest(0, is_thorough=True) is not None
            ):
                lost = keys[-1] if keys else SNAPSHOTS
                raise OuterLoopError(
                    f"{self.store.place}{lost} is damaged or missing, and there is no other snapshot: no replica can join this run any more; use another store URI"
                )
            self.patience.poll(f"rank {self.rank}, waiting for a snapshot")

    def _read_snapshot(self, key: str) -> tuple[dict[str, Any], dict[str, NDArray]] | None:
        data = self.get(key)
        try:
            return None if data is None else unseal_tensors(data)
        except OuterLoopError as error:
            logger.warning("%s: %s", key, error)
            return None

    def _snapshot(self, round_id: int, base: str, expected: tuple[int, ...]) -> None:
        try:
            key = self._put_snapshot(round_id, base, expected)
            # What is about to be deleted can be replaced by this snapshot only if it is whole.
            if self._read_snapshot(key) is not None:
                self._collect_garbage(round_id)
        except ObjectStoreError as error:
            # The run does not depend on any single snapshot: the log is still there.
            logger.warning("no snapshot of round %d: %s", round_id, error)

    def _put_snapshot(self, round_id: int, base: str, expected: tuple[int, ...]) -> str:
        # Nobody is waited for in asynchronous rounds.
        waited_for = expected if self.is_synchronous else ()
        header = {"round_id": round_id, "base": base, "expected": list(waited_for)}
        key = snapshot_key(round_id, base)
        self.put(key, seal_tensors(header, {"theta": self.theta, "velocity": self.velocity}))
        return key

    def _collect_garbage(self, round_id: int) -> None:
        """Delete payloads that no newer snapshot needs. Manifests stay, because they are the log."""
        snapshots = [key for key in self.store.keys(SNAPSHOTS) if _round_of(key) <= round_id]
        kept = sorted({_round_of(key) for key in snapshots})[-2:]
        if len(kept) < 2:
            return
        old = [key for key in snapshots if _round_of(key) < kept[0]]
        for folder in (DELTAS, MERGED):
            keys = self.store.keys(folder)
            old += [key for key in keys if int(key.split("/")[1]) < kept[0] - self.max_age]
        self.store.delete(old)


def newest_state(
    store: ObjectStore, round_id: int | None = None
) -> tuple[int, Vector, dict[str, Any]]:
    """Return a run's parameters after some rounds (the newest by default), from its store alone.

    Returns:
        The number of rounds, the parameters, and the run's description.

    Raises:
        OuterLoopError: The state doesn't exist.
    """
    known = exchange.read_run(store)
    if known is None:
        raise OuterLoopError(f"{store.place or 'the store'} has no run")
    run = known[1]
    settings = OuterSettings(
        rounds=run["rounds"], codec=run["codec"], outer=OuterStep(**run["outer"]), timeout_s=60.0
    )
    watcher = OuterReplica(store, np.zeros(run["n"]), rank=0, world_size=1, settings=settings)
    # Higher than any that is claimed: no replica's process replaces one that only looks on.
    watcher.incarnation = "999999-watcher"
    watcher.retried(lambda: watcher.load_snapshot(until=round_id))
    while watcher.round_id != round_id and watcher.advance(is_thorough=True):
        pass
    if round_id is not None and watcher.round_id != round_id:
        raise OuterLoopError(f"the run has made {watcher.round_id} rounds, not {round_id}")
    return watcher.round_id, watcher.theta, run


def _round_of(snapshot: str) -> int:
    return int(snapshot.rpartition("/")[2].partition(".")[0])
