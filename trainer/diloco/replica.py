"""One replica of an outer loop over an object store.

    replica = OuterReplica(store, theta, rank=0, world_size=4)
    replica.join()
    while not replica.is_finished:
        ...  # H inner steps from replica.theta
        report = replica.exchange(local, weight=n_tokens)

All replicas hold the same global state (parameters and velocity) after the same round, bit for
bit; its hash is in the next manifest. What differs between replicas (the inner optimizer, what
the codec kept back) is private and optionally kept in a state store, which makes a restart after
`kill -9` continue exactly where it was.
"""

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trainer.diloco.codecs import codec_named
from trainer.diloco.exchange import ErrorFeedback, Patience, RoundReport, RoundStore, sha256
from trainer.diloco.object_store import ObjectStore
from trainer.diloco.outer_step import OuterStep
from trainer.diloco.protocol import (
    Action,
    Apply,
    Commit,
    Contribution,
    Finish,
    List,
    LoadSnapshot,
    Manifest,
    Merge,
    PutDelta,
    PutJoin,
    ReadManifest,
    ReplicaMachine,
    Train,
    snapshot_key,
)
from trainer.errors import ObjectStoreError, OuterLoopError, TrainerConfigError

__all__ = ["OuterReplica", "OuterSettings", "new_incarnation"]

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]

MAX_RESYNCS = 3
RUN_KEY = "run.json"


@dataclass(frozen=True)
class OuterSettings:
    """What all replicas of a run agree on, and how patient each is.

    The first four are fixed by the first replica of a run; another value later is an error.
    """

    codec: str = "ternary"
    """Wire format: fp32, bf16, int8, int4, ternary or topk."""
    outer: OuterStep = OuterStep()  # noqa: RUF009 - frozen
    """The outer optimizer."""
    n_rounds: int | None = None
    """Rounds of the run; None to go on as long as the caller does."""
    signature: str = ""
    """Names the parameters that are exchanged; see `ParameterVector.signature`."""
    quorum: int | None = None
    """Fewest contributions per round; None means half of the replicas, rounded up."""
    timeout_s: float = 1800.0
    """A round without decision for this long is an error."""
    first_grace_s: float = 120.0
    """How long round 0 waits for machines that are still booting, once there is a quorum."""
    snapshot_every: int = 5
    """Rounds between snapshots of the global state."""
    always_upload: bool = False
    """Upload the own delta also when it is this replica's turn to merge."""


def new_incarnation(attempt: int = 0) -> str:
    """Return a name for this process: a later attempt sorts after an earlier one."""
    return f"{attempt:06d}-{uuid.uuid4().hex[:8]}"


class OuterReplica:
    """A replica: joins a run, exchanges once per round, survives what happens to the others.

    Args:
        store: Where the run lives; all replicas see the same one.
        theta: The initial parameters. The first replica's count; the others take them over.
        rank: This replica's rank, from 0.
        world_size: Replicas that round 0 waits for.
        settings: What the run agrees on.
        attempt: How many processes of this rank came before.
        state: Where private state is kept between processes; None keeps none, and a restarted
            replica begins with a fresh inner optimizer.
        patience: Clock and sleep, for tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        theta: Vector,
        *,
        rank: int,
        world_size: int,
        settings: OuterSettings | None = None,
        attempt: int = 0,
        state: ObjectStore | None = None,
        patience: Patience | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise TrainerConfigError(f"rank {rank} is not in 0..{world_size - 1}")
        self.rank = rank
        self.settings = settings or OuterSettings()
        self.theta = np.array(theta, dtype=np.float32)
        self.velocity = np.zeros_like(self.theta)
        self.inner_state: dict[str, NDArray] = {}
        self.incarnation = new_incarnation(attempt)
        codec = codec_named(self.settings.codec)
        self.rounds = RoundStore(store, codec)
        self._feedback = ErrorFeedback(codec, np.zeros_like(self.theta))
        self._state = state
        self._patience = patience or Patience(self.settings.timeout_s, self.settings.first_grace_s)
        self._payload = b""
        self._n_applied = 0
        self.machine = ReplicaMachine(
            rank=rank,
            incarnation=self.incarnation,
            world_size=world_size,
            n_rounds=self.settings.n_rounds,
            quorum=self.settings.quorum or -(-world_size // 2),
            base=self._base(),
            always_upload=self.settings.always_upload,
        )

    @property
    def round_id(self) -> int:
        """The round that is being trained, or the number of rounds if the run is finished."""
        return self.machine.round_id

    @property
    def is_finished(self) -> bool:
        """Whether all rounds of the run are applied."""
        return isinstance(self.machine.action, Finish)

    @property
    def base(self) -> str:
        """Hash of the present global state."""
        return self.machine.base

    def join(self) -> None:
        """Agree on the run, load the newest state and catch up with the log of rounds.

        Needs no live replica. If an earlier process of this rank died between training and the
        outcome of its round, its contribution is sent again, not trained again. Afterwards
        `theta` and `round_id` are current and `inner_state` holds what was last saved.

        Raises:
            TrainerConfigError: The run was started with other settings, or the store ignores the
                condition of a conditional write.
            OuterTimeoutError: A round in flight was not decided in time.
        """
        self._patience.begin_wait()
        self._retried(self._agree)
        self._retried(self._load_private)
        self._advance()

    def exchange(
        self,
        local: Vector,
        *,
        weight: int = 1,
        inner_state: Mapping[str, NDArray] | None = None,
    ) -> RoundReport:
        """Finish a round: send θ_initial − θ_local, apply the outer step, move to the next.

        Args:
            local: The parameters after the inner steps.
            weight: What this replica counts in the mean; usually the tokens it saw.
            inner_state: Private arrays to keep with the contribution (an optimizer's state).

        Raises:
            OuterLoopError: The parameters are not finite, or a newer process has this rank.
            OuterTimeoutError: The round was not decided in time.
        """
        if not isinstance(self.machine.action, Train):
            raise OuterLoopError("exchange() before join(), or after the last round")
        if weight < 1:
            raise OuterLoopError(f"weight must be at least 1, not {weight}")
        traffic = self.rounds.traffic
        up, down, applied = traffic.up_bytes, traffic.down_bytes, self._n_applied
        round_id = self.round_id
        payload = self._feedback.encode(self.theta - local)
        contribution = Contribution(self.rank, self.incarnation, self.base, weight, sha256(payload))
        self._payload = payload
        self._own = contribution
        self.inner_state = dict(inner_state or {})
        self._retried(lambda: self._save_private(round_id, contribution))
        self._patience.begin_wait()
        self.machine.on_trained(contribution)
        self._advance()
        return RoundReport(
            round_id=round_id,
            n_contributions=self._last_contributions,
            was_included=self.machine.was_included,
            n_missed=self._n_applied - applied - 1,
            wait_s=self._waited_s,
            up_bytes=traffic.up_bytes - up,
            down_bytes=traffic.down_bytes - down,
            base=self.base,
        )

    _own: Contribution | None = None
    _last_contributions: int = 0
    _waited_s: float = 0.0

    def _advance(self) -> None:
        """Perform what the machine asks for until the caller's turn comes."""
        while not isinstance(self.machine.action, Train | Finish):
            self._retried(lambda: self._perform(self.machine.action))
        self._patience.begin_round()

    def _retried(self, request: Callable[[], None]) -> None:
        while True:
            try:
                request()
            except ObjectStoreError as error:
                self.rounds.traffic.n_failed += 1
                self._patience.retry(error)
            else:
                self._patience.succeeded()
                return

    def _perform(self, action: Action) -> None:
        machine = self.machine
        match action:
            case ReadManifest():
                if action.is_poll:
                    self._patience.poll(f"rank {self.rank}, round {action.round_id}")
                manifest = self.rounds.read_manifest(action.round_id)
                machine.on_manifest(manifest, graces=self._patience.graces)
            case PutDelta() if self._own is not None:
                self.rounds.put_delta(action.round_id, self._own, self._payload)
                machine.on_delta_put()
            case List():
                found, joining = self.rounds.list_round(action.round_id)
                machine.on_listed(found, joining=joining, graces=self._patience.graces)
            case Merge():
                self._merge(action)
            case Commit():
                self._commit(action.manifest)
            case Apply():
                self._apply(action.manifest)
            case PutJoin():
                self.rounds.put_join(action.round_id, self.rank, self.incarnation)
                machine.on_join_put()
            case LoadSnapshot():
                self._load_snapshot()
            case _:
                raise OuterLoopError(f"rank {self.rank} cannot perform {action}")

    def _merge(self, action: Merge) -> None:
        own = self._own
        if own is None:
            raise OuterLoopError("nothing to merge with")
        outcome = self.rounds.merge(
            action.round_id, action.contributions, (own, self._payload), n=self.theta.size
        )
        if outcome.damaged:
            self.machine.on_damaged(outcome.damaged)
            return
        total = sum(contribution.weight for contribution in action.contributions)
        self._feedback.answer_for(outcome.lost, times=total / own.weight)
        self._save_private(action.round_id, own)
        self.machine.on_merged(self.rounds.put_merged(action.round_id, outcome.payload))

    def _commit(self, manifest: Manifest) -> None:
        try:
            self.rounds.commit(manifest)
        except ObjectStoreError as error:
            # The answer may be lost although the write was not: read before trying again.
            logger.warning("round %d: unclear commit: %s", manifest.round_id, error)
            self._patience.retry(error)
        self.machine.on_committed()

    def _apply(self, manifest: Manifest) -> None:
        merged = self.rounds.read_merged(manifest, n=self.theta.size)
        if merged is None:
            logger.warning("the merged delta of round %d is gone: rejoin", manifest.round_id)
            self.machine.on_lost()
            return
        self._check_not_replaced(manifest)
        own = self._own
        if own is not None and manifest.base == own.base:
            self._settle(manifest, own)
        self.settings.outer.apply(self.theta, self.velocity, merged)
        self._n_applied += 1
        self._waited_s = self._patience.end_round()
        self.machine.on_applied(self._base())
        if manifest.by == self.rank and manifest.incarnation == self.incarnation:
            self._maybe_snapshot()

    def _settle(self, manifest: Manifest, own: Contribution) -> None:
        reduced = manifest.by == own.rank and manifest.incarnation == own.incarnation
        self._feedback.settle(was_included=manifest.names(own), reduced=reduced)
        self._last_contributions = len(manifest.contributions)
        self._own = None

    def _check_not_replaced(self, manifest: Manifest) -> None:
        for contribution in manifest.contributions:
            is_twin = contribution.rank == self.rank and contribution != self._own
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
            "codec": settings.codec,
            "outer": asdict(settings.outer),
            "n_rounds": settings.n_rounds,
            "signature": settings.signature,
            "n": int(self.theta.size),
        }
        data = self.rounds.get(RUN_KEY)
        if data is None:
            run = {**mine, "base": self._base()}
            self.rounds.store.put_if_absent(RUN_KEY, json.dumps(run, sort_keys=True).encode())
            data = self.rounds.get(RUN_KEY)
        if data is None:
            raise ObjectStoreError(f"{RUN_KEY} was created and cannot be read")
        self.rounds.check_condition(RUN_KEY, data)
        run = json.loads(data)
        self._initial_base = str(run.pop("base"))
        different = {name: (run.get(name), value) for name, value in mine.items()}
        different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
        if different:
            raise TrainerConfigError(
                f"the run was started with other settings (theirs, ours): {different}; "
                "use them, or another store URI"
            )
        if self._base() == self._initial_base:
            self._put_snapshot(0, tuple(range(self.machine.world_size)), only_if_absent=True)

    _initial_base: str = ""

    def _load_snapshot(self) -> None:
        """Take the newest readable snapshot; wait for the first one if there is none yet."""
        self._resync_allowed("the log of rounds does not continue the state we hold")
        keys = self.rounds.store.keys("snapshots/")
        for key in reversed(keys):
            loaded = self._read_snapshot(key)
            if loaded is None:
                continue
            header, tensors = loaded
            self.theta, self.velocity = tensors["theta"].copy(), tensors["velocity"].copy()
            if (base := self._base()) != header["base"]:
                logger.warning("%s does not hold the state it names", key)
                continue
            self.machine.on_snapshot(header["round_id"], base, header["expected"])
            return
        self._patience.poll(f"rank {self.rank}, waiting for the first snapshot")

    def _read_snapshot(self, key: str) -> tuple[dict[str, Any], dict[str, NDArray]] | None:
        data = self.rounds.get(key)
        try:
            return None if data is None else _unpack(data)
        except OuterLoopError as error:
            logger.warning("%s: %s", key, error)
            return None

    def _maybe_snapshot(self) -> None:
        if self.round_id % self.settings.snapshot_every:
            return
        try:
            key = self._put_snapshot(self.round_id, tuple(sorted(self.machine.expected)))
            # What is about to be deleted can be replaced by this snapshot only if it is whole.
            if key is not None and self._read_snapshot(key) is not None:
                self._collect_garbage()
        except ObjectStoreError as error:
            # The run does not depend on any single snapshot: the log is still there.
            logger.warning("no snapshot of round %d: %s", self.round_id, error)

    def _put_snapshot(
        self, round_id: int, expected: tuple[int, ...], *, only_if_absent: bool = False
    ) -> str | None:
        base = self._base()
        key = snapshot_key(round_id, base)
        if only_if_absent and key in self.rounds.store.keys("snapshots/"):
            return None
        header = {"round_id": round_id, "base": base, "expected": list(expected)}
        data = _pack(header, {"theta": self.theta, "velocity": self.velocity})
        self.rounds.put(key, data)
        return key

    def _collect_garbage(self) -> None:
        """Delete payloads that no newer snapshot needs. Manifests stay: they are the log."""
        store = self.rounds.store
        snapshots = [key for key in store.keys("snapshots/") if _round_of(key) <= self.round_id]
        kept = sorted({_round_of(key) for key in snapshots})[-2:]
        old = [key for key in snapshots if _round_of(key) < kept[0]]
        began = max(0, kept[0] - 2 * self.settings.snapshot_every)
        for round_id in range(began, kept[0]):
            keys = store.keys(f"rounds/{round_id:06d}/")
            old += [key for key in keys if not key.endswith("/manifest.json")]
        store.delete(old)

    def _private_key(self) -> str:
        return f"private/{self.rank:04d}.safetensors"

    def _save_private(self, round_id: int, contribution: Contribution) -> None:
        """Keep what this process would need to go on, before anybody can count on it."""
        if self._state is None:
            return
        header = {"round_id": round_id, "contribution": asdict(contribution)}
        tensors: dict[str, NDArray] = {
            f"feedback.{k}": v for k, v in self._feedback.tensors().items()
        }
        tensors |= {f"inner.{name}": value for name, value in self.inner_state.items()}
        tensors["payload"] = np.frombuffer(self._payload, np.uint8)
        self._state.put(self._private_key(), _pack(header, tensors))

    def _load_private(self) -> None:
        """Take up the private state of the process before us, if it left any."""
        data = self._state.get(self._private_key()) if self._state is not None else None
        if data is None:
            return
        header, tensors = _unpack(data)
        named: dict[str, dict[str, NDArray]] = {"feedback": {}, "inner": {}}
        for name, value in tensors.items():
            room, _, rest = name.partition(".")
            if rest:
                named[room][rest] = value.copy()
        self._feedback.restore(named["feedback"])
        self.inner_state = named["inner"]
        self._payload = tensors["payload"].tobytes()
        round_id, own = header["round_id"], Contribution(**header["contribution"])
        self._own = own
        self.machine.prepared = (round_id, own)
        manifest = self.rounds.read_manifest(round_id)
        if manifest is not None:
            # Decided while we were away; a snapshot may be past it, so settle the account now.
            self._settle(manifest, own)
            self.machine.prepared = None

    def _resync_allowed(self, why: str) -> None:
        if self.machine.n_resyncs > MAX_RESYNCS:
            raise OuterLoopError(f"rank {self.rank}: {why}, and no snapshot helps")


def _round_of(snapshot: str) -> int:
    return int(snapshot.rpartition("/")[2].partition(".")[0])


def _pack(header: Mapping[str, Any], tensors: Mapping[str, NDArray]) -> bytes:
    named = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    digest = sha256(*(named[name].tobytes() for name in sorted(named)))
    text = json.dumps({**header, "sha256": digest}, sort_keys=True)
    return save(named, metadata={"header": text})


def _unpack(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray]]:
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["header"])
        tensors = load(data)
        digest = sha256(*(tensors[name].tobytes() for name in sorted(tensors)))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise OuterLoopError(f"damaged state of {len(data)} bytes: {error}") from error
    if header.pop("sha256") != digest:
        raise OuterLoopError("damaged state: its hash does not match")
    return header, tensors
