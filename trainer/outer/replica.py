"""One replica of an outer loop over an object store.

    replica = OuterReplica(store, theta, rank=0, world_size=4)
    replica.join()
    while not replica.is_finished:
        ...  # H inner steps from replica.theta
        report = replica.exchange(local, weight=n_tokens)

After the same round, all replicas have the same global state (parameters and velocity), bit for
bit, and its hash is in the next manifest. The private state of a replica (the inner optimizer, the
error of the codec) can be kept in a state store. A restart after `kill -9` then continues exactly
where it was.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ObjectStoreError, OuterLoopError, TrainerConfigError
from trainer.outer import exchange
from trainer.outer.exchange import Patience, RoundDriver, RoundReport, agree_on_run
from trainer.outer.lease import claim
from trainer.outer.object_store import ObjectStore, SubStore
from trainer.outer.outer_step import OuterStep
from trainer.outer.protocol import (
    Apply,
    Contribution,
    LoadSnapshot,
    Manifest,
    ProtocolAction,
    ReplicaLife,
    Snapshot,
    Train,
    round_prefix,
    snapshot_key,
)
from trainer.outer.tensor_file import seal_tensors, sha256, unseal_tensors

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]

SNAPSHOTS = "snapshots/"
MARK = ".kept"
"""Suffix of an object that records that private state was stored, so that its loss is noticed."""


def fragment_folder(fragment: int) -> str:
    """Return the folder in the store for the run of one parameter fragment."""
    return f"fragments/{fragment:03d}/"


@dataclass(frozen=True)
class OuterSettings:
    """The settings that all replicas of a run share, and each one's timeouts.

    The first replica of a run decides the first four. A different value later is an error.
    """

    codec: str = "ternary"
    """Wire format: fp32, bf16, int8, int4 or ternary."""
    outer: OuterStep = OuterStep()  # noqa: RUF009 - frozen
    """The outer optimizer."""
    n_rounds: int | None = None
    """Number of rounds. With None, the caller decides when to stop."""
    signature: str = ""
    """Hash of the exchanged parameters; see `ParameterVector.signature`."""
    quorum: int | None = None
    """Fewest contributions per round. None means half of the replicas, rounded up."""
    timeout_s: float = 1800.0
    """Seconds without a decision of the round after which an error is raised."""
    first_grace_s: float = 120.0
    """Seconds that round 0 waits for machines that are still booting, after it has a quorum."""
    snapshot_every: int = 5
    """Rounds between snapshots of the global state."""


class OuterReplica(RoundDriver):
    """A replica that joins a run, exchanges once per round, and survives the loss of others.

    Args:
        store: Store of the run, which all replicas share.
        theta: The initial parameters. Those of the first replica count, and the others adopt them.
        rank: This replica's rank, from 0.
        world_size: Number of replicas that round 0 waits for.
        settings: The common settings of the run.
        state: Store for private state between processes. With None, a restarted replica begins with
            a new inner optimizer.
    """

    mode = "synchronous"

    def __init__(
        self,
        store: ObjectStore,
        theta: Vector,
        *,
        rank: int,
        world_size: int,
        settings: OuterSettings | None = None,
        state: ObjectStore | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise TrainerConfigError(f"rank {rank} is not in 0..{world_size - 1}")
        self.settings = settings or OuterSettings()
        patience = Patience(self.settings.timeout_s, self.settings.first_grace_s)
        n = int(np.size(theta))
        super().__init__(store, self.settings.codec, patience, rank=rank, n=n)
        self.world_size = world_size
        self.theta = np.array(theta, dtype=np.float32)
        self.velocity = np.zeros_like(self.theta)
        self.inner_state: dict[str, NDArray] = {}
        self.is_finished = False
        self.snapshot_every = self.settings.snapshot_every
        self._state = state
        self._private_key = f"private/{rank:04d}.safetensors"
        self._has_marked = False
        self.claimed = ""
        quorum = self.settings.quorum or -(-world_size // 2)
        self._life = ReplicaLife(rank, self.settings.n_rounds, quorum)
        self._protocol = self._life.live()
        self._is_training = False
        self._n_made = 0
        self._n_applied = 0
        self._prepare()

    def _prepare(self) -> None:
        """Set up what only one kind of rounds has."""

    @property
    def round_id(self) -> int:
        """Return the round in training, or the number of rounds if the run is finished."""
        return self._life.round_id

    @property
    def n_trained(self) -> int:
        """Return the number of rounds whose inner steps this replica may skip."""
        return self.round_id

    @property
    def base(self) -> str:
        """Hash of the present global state."""
        return self._life.base

    def join(self) -> None:
        """Agree on the run, load the newest state, and catch up with the log of rounds.

        This needs no live replica. If an earlier process of this rank died between training and the
        outcome of its round, its contribution is sent again without new training. Afterwards,
        `theta` and `round_id` are up to date, and `inner_state` is the last saved one.

        Raises:
            TrainerConfigError: The run was started with other settings, or the store ignores the
                condition of a conditional write.
            OuterTimeoutError: A round in flight was not decided in time.
        """
        self.patience.begin_wait()
        self.retried(self._agree)
        self.claimed = self.claimed or self.retried(lambda: claim(self.store, self.rank))
        self.incarnation = self.claimed
        self.retried(self._load_private)
        self._catch_up()

    def _catch_up(self) -> None:
        self._advance(None)

    def exchange(
        self, local: Vector, *, weight: int = 1, inner_state: Mapping[str, NDArray] | None = None
    ) -> RoundReport:
        """Finish a round: send θ_initial − θ_local, apply the outer step, and advance.

        Args:
            local: The parameters after the inner steps.
            weight: Weight of this replica in the mean, usually its number of tokens.
            inner_state: Private arrays to store with the contribution (an optimizer's state).

        Raises:
            OuterLoopError: The parameters are not finite, or a newer process has this rank.
            OuterTimeoutError: The round was not decided in time.
        """
        n_applied = self._n_applied
        own = self._made(local, weight, inner_state)
        self._advance(own)
        manifest = self._life.decided
        if manifest is None:
            raise OuterLoopError(f"round {self._own_round} has no outcome")
        return self.report(manifest, own, self.base, n_missed=self._n_applied - n_applied - 1)

    def _made(
        self, local: Vector, weight: int, inner_state: Mapping[str, NDArray] | None
    ) -> Contribution:
        """Make the contribution of a round, and keep it before it is sent.

        Raises:
            OuterLoopError: nothing is to be exchanged, or a value is wrong.
        """
        if not self._is_training:
            raise OuterLoopError("exchange() before join(), or after the last round")
        if weight < 1:
            raise OuterLoopError(f"weight must be at least 1, not {weight}")
        own = self.contribute(
            self.theta - local, round_id=self.round_id, base=self.base, weight=weight
        )
        self._n_made += 1
        self.inner_state = dict(inner_state or {})
        # Once the others count on this delta, a process that takes over must neither train the
        # round again nor forget what the codec kept back.
        self.retried(self._keep_private)
        return own

    def _advance(self, own: Contribution | None) -> None:
        """Go on until the caller's turn comes."""
        self._is_training = False
        self._is_training = isinstance(self.drive(self._protocol, own), Train)
        self.is_finished = not self._is_training
        self.patience.begin_round()

    def perform(self, action: ProtocolAction) -> Any:
        """Perform one action of a replica's life, and return its reply."""
        match action:
            case LoadSnapshot():
                return self.load_snapshot()
            case Apply(manifest=manifest):
                return self._apply(manifest)
        return super().perform(action)

    def _apply(self, manifest: Manifest) -> str | None:
        """Make the outer step of a decided round; return the new state's hash, None if lost."""
        merged = self.read_merged(manifest, n=self.theta.size)
        if merged is None:
            logger.warning(
                "the merged delta of round %d is gone, so this replica joins again",
                manifest.round_id,
            )
            return None
        _check_not_replaced(manifest, self.own, self.rank, self.incarnation)
        self.settle(manifest)
        self.settings.outer.apply(self.theta, self.velocity, merged)
        self._n_applied += 1
        base = self._base()
        if self.has_reduced:
            self._maybe_snapshot(manifest.round_id + 1, base, manifest.expected)
        return base

    def _base(self) -> str:
        return sha256(self.theta, self.velocity)[:20]

    def _agree(self) -> None:
        """Fix the run's settings by creating its description, or check them against it."""
        settings = self.settings
        mine = {
            "mode": self.mode,
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
            self._put_snapshot(0, initial_base, range(self.world_size))

    def load_snapshot(self, until: int | None = None) -> Snapshot:
        """Load the newest readable snapshot, or wait for the first one.

        Args:
            until: Highest number of rounds of the snapshot. None allows any.

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
                    return Snapshot(
                        header["round_id"], header["base"], frozenset(header["expected"])
                    )
            if (first := snapshot_key(0, self._base())) in keys:
                logger.warning("%s was rewritten", first)
                self._put_snapshot(0, self._base(), range(self.world_size))
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

    def _maybe_snapshot(self, round_id: int, base: str, expected: Sequence[int]) -> None:
        if round_id % self.snapshot_every:
            return
        try:
            key = self._put_snapshot(round_id, base, expected)
            # What is about to be deleted can be replaced by this snapshot only if it is whole.
            if self._read_snapshot(key) is not None:
                collect_garbage(self.store, round_id, snapshot_every=self.snapshot_every)
        except ObjectStoreError as error:
            # The run does not depend on any single snapshot: the log is still there.
            logger.warning("no snapshot of round %d: %s", round_id, error)

    def _put_snapshot(self, round_id: int, base: str, expected: Sequence[int]) -> str:
        header = {"round_id": round_id, "base": base, "expected": list(expected)}
        key = snapshot_key(round_id, base)
        tensors = {"theta": self.theta, "velocity": self.velocity}
        self.put(key, seal_tensors(header, tensors))
        return key

    def _keep_private(self) -> None:
        """Keep what another process of this rank would need to go on."""
        if self._state is None or self.own is None:
            return
        header = {
            "round_id": self._own_round,
            "n_made": self._n_made,
            "contribution": asdict(self.own),
        }
        tensors: dict[str, NDArray] = {
            f"feedback.{name}": value for name, value in self.feedback.tensors().items()
        }
        tensors |= {f"inner.{name}": value for name, value in self.inner_state.items()}
        tensors["payload"] = np.frombuffer(self.payload, np.uint8)
        self._state.put(self._private_key, seal_tensors(header, tensors))
        if not self._has_marked:
            self._state.put(f"{self._private_key}{MARK}", b"")
            self._has_marked = True

    def _load_private(self) -> None:
        """Take up the private state of the process before us, if it left any.

        Raises:
            OuterLoopError: the private state is missing or damaged.
        """
        if self._state is None:
            return
        kept = exchange.read_whole(self._state, self._private_key, unseal_tensors)
        if kept is None:
            if self._state.get(f"{self._private_key}{MARK}") is not None:
                raise OuterLoopError(
                    f"{self._state.place}{self._private_key} is missing: restore it, or also delete {self._private_key}{MARK} to continue with a new optimizer"
                )
            return
        header, tensors = kept
        self.payload = tensors.pop("payload").tobytes()
        for name, value in tensors.items():
            room, _, rest = name.partition(".")
            (self.inner_state if room == "inner" else vars(self.feedback))[rest] = value
        self._own_round, self.own = header["round_id"], Contribution(**header["contribution"])
        self._n_made = header["n_made"]
        self._resume_own(self.own)

    def _resume_own(self, own: Contribution) -> None:
        """Take up the contribution that the process before us had made."""
        manifest = self.read_manifest(self._own_round, is_thorough=True)
        if manifest is None:
            self._life.prepared = (self._own_round, own)
        else:
            # Decided while we were away; a snapshot may be past it, so settle the account now. Who
            # answers for what the mean has lost needs all deltas again: ours must be whole.
            if manifest.names(own):
                self.put(own.key(self._own_round), self.payload)
            self.settle(manifest)


def collect_garbage(store: ObjectStore, round_id: int, *, snapshot_every: int) -> None:
    """Delete payloads that no newer snapshot needs. Manifests stay, because they are the log.

    Args:
        store: Where the run lives.
        round_id: The round of a snapshot that is known to be undamaged.
        snapshot_every: Rounds between two snapshots.
    """
    snapshots = [key for key in store.keys(SNAPSHOTS) if _round_of(key) <= round_id]
    kept = sorted({_round_of(key) for key in snapshots})[-2:]
    old = [key for key in snapshots if _round_of(key) < kept[0]]
    began = max(0, kept[0] - 2 * snapshot_every)
    for past in range(began, kept[0]):
        keys = store.keys(round_prefix(past))
        old += [key for key in keys if not key.endswith("/manifest.json")]
    store.delete(old)


def newest_state(
    store: ObjectStore, round_id: int | None = None
) -> tuple[int, Vector, dict[str, Any]]:
    """Return a run's parameters from its store alone, by a snapshot and the log of rounds.

    Args:
        store: The run's store.
        round_id: The state after this many rounds. None takes the newest.

    Returns:
        The number of rounds of the state, the parameters, and the run's description.

    Raises:
        OuterLoopError: The state doesn't exist.
    """
    known = exchange.read_run(store)
    if known is None:
        raise OuterLoopError(f"{store.place or 'the store'} has no run")
    run = known[1]
    if "fragments" in run:
        folders = map(fragment_folder, range(run["fragments"]))
        parts = [newest_state(SubStore(store, folder), round_id) for folder in folders]
        theta = np.concatenate([theta for _, theta, _ in parts])
        return min(found for found, _, _ in parts), theta, run
    settings = OuterSettings(codec=run["codec"], outer=OuterStep(**run["outer"]), timeout_s=60.0)
    watcher = OuterReplica(store, np.zeros(run["n"]), rank=0, world_size=1, settings=settings)
    # Higher than any that is claimed: no replica's process replaces one that only looks on.
    watcher.incarnation = "999999-watcher"
    at: Snapshot = watcher.retried(lambda: watcher.load_snapshot(until=round_id))
    found = at.round_id
    while (
        found != round_id
        and (manifest := watcher.read_manifest(found, is_thorough=True)) is not None
    ):
        if watcher.perform(Apply(found, manifest)) is None:
            raise OuterLoopError(f"the mean of round {found} is missing, and no snapshot is newer")
        found += 1
    if round_id is not None and found != round_id:
        raise OuterLoopError(f"the run has made {found} rounds, not {round_id}")
    return found, watcher.theta, run


def _round_of(snapshot: str) -> int:
    return int(snapshot.rpartition("/")[2].partition(".")[0])


def _check_not_replaced(
    manifest: Manifest, own: Contribution | None, rank: int, incarnation: str
) -> None:
    for contribution in manifest.contributions:
        is_twin = contribution.rank == rank and contribution != own
        if is_twin and contribution.incarnation[:6] > incarnation[:6]:
            raise OuterLoopError(
                f"rank {rank}: a newer process ({contribution.incarnation}) has taken over from "
                f"this one ({incarnation}); stop this one"
            )
