"""A replica's part of a round: its checked and counted transfers to and from the store.

`RoundDriver` performs the actions of the protocol. `ErrorFeedback` keeps the errors of a codec.
`Patience` measures the time of rounds, and counts the grace periods that have passed.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tenacity
from numpy.typing import NDArray

from trainer.errors import (
    ObjectStoreError,
    OuterLoopError,
    OuterTimeoutError,
    TrainerConfigError,
)
from trainer.outer.codecs import Codec, codec_named, decode_payload, encode_payload
from trainer.outer.object_store import ObjectStore
from trainer.outer.protocol import (
    Commit,
    Contribution,
    ListRound,
    Look,
    Manifest,
    Merge,
    Merged,
    Protocol,
    ProtocolAction,
    PutDelta,
    PutJoin,
    ReadManifest,
    Train,
    adaptive_grace_s,
    copy_key,
    delta_prefix,
    join_key,
    manifest_key,
    merged_key,
    read_listing,
)
from trainer.outer.tensor_file import seal_tensors, sha256, unseal_tensors

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]
Result = TypeVar("Result")

RUN_KEY = "run.safetensors"
"""Key of the settings that all replicas of a run share. It is written once."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
DAMAGE_S = 5.0
"""Seconds after which a damaged object won't become complete by itself."""
POLL_SHARE = 0.05
MIN_POLL_S, MAX_POLL_S = 0.02, 2.0


@dataclass(frozen=True)
class RoundReport:
    """One finished round, from the view of one replica.

    `n_missed` counts the earlier rounds that this replica applied without contributing. `base` is
    the hash of the state after the round.
    """

    round_id: int
    n_contributions: int
    was_included: bool
    n_missed: int
    wait_s: float
    up_bytes: int
    down_bytes: int
    base: str


@dataclass
class ErrorFeedback:
    """The part of earlier deltas that lossy codecs left out. The next delta includes it.

    The codec's error of a round's mean is added to one contributor's account, times the total
    weight over its own, so that the next round's mean corrects it. The manifest decides which
    contributor, and not the replica that merged. So the bits are the same, regardless of which
    replica was faster.
    """

    codec: Codec
    residual: Vector
    candidate: Vector | None = None

    def encode(self, delta: Vector) -> bytes:
        """Return the payload for this delta plus the stored error."""
        if not self.codec.is_lossy:
            return encode_payload(self.codec, delta)
        total = delta + self.residual
        payload = encode_payload(self.codec, total)
        total -= decode_payload(self.codec, payload, delta.size)
        self.candidate = total
        return payload

    def settle(self, *, was_included: bool, owed: Vector | None = None) -> None:
        """Close the round. A delta that was left out is dropped completely.

        Args:
            was_included: Whether the last delta was part of the round.
            owed: Error of the merged delta, if this replica must correct it.
        """
        if was_included and self.candidate is not None:
            self.residual = self.candidate
        if owed is not None:
            self.residual = self.residual + owed
        self.candidate = None

    def tensors(self) -> dict[str, Vector]:
        """Return all vectors by name, to be restored in another process."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


@dataclass
class Patience:
    """The clock that measures rounds and decides how long to wait.

    Args:
        timeout_s: Seconds without a decision of the round after which an error is raised.
        first_grace_s: Grace period of the first round, in seconds.
    """

    timeout_s: float
    first_grace_s: float
    _waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _round_began: float | None = None
    _wait_began: float | None = None

    def begin_round(self) -> None:
        """Note the start of a round's inner steps."""
        self._round_began = time.monotonic()
        self._wait_began = None

    def begin_wait(self) -> None:
        """Note that this replica's delta is ready."""
        self._wait_began = time.monotonic()

    def end_round(self) -> float:
        """Note that a round is decided, and return the seconds of waiting."""
        waited = self.waited_s
        if self._wait_began is not None and self._round_began is not None:
            self._waits_s.append(waited)
            self._rounds_s.append(time.monotonic() - self._round_began)
        # Who replays the log may come to a round that is not decided: its wait begins now.
        self._wait_began = time.monotonic()
        return waited

    @property
    def waited_s(self) -> float:
        """Return the seconds since this replica's delta was ready."""
        return 0.0 if self._wait_began is None else time.monotonic() - self._wait_began

    @property
    def graces(self) -> int:
        """Return the number of whole grace periods since this replica's delta was ready."""
        grace = adaptive_grace_s(self._waits_s, self._rounds_s, first_s=self.first_grace_s)
        return int(self.waited_s / max(grace, 1e-3))

    def poll(self, waiting_for: str) -> None:
        """Wait for a fraction of the time waited so far.

        Raises:
            OuterTimeoutError: The timeout has passed.
        """
        waited = self.waited_s
        if waited > self.timeout_s:
            raise OuterTimeoutError(
                f"{waiting_for}: no decision after {waited:.0f} s; start the missing replicas, "
                "lower the quorum, or raise timeout_s"
            )
        time.sleep(min(MAX_POLL_S, max(MIN_POLL_S, waited * POLL_SHARE)))


def agree_on_run(
    store: ObjectStore, description: Mapping[str, Any], first: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write a run's description, or compare it with that of the first replica.

    Args:
        store: Where the run lives.
        description: Settings that all replicas must share.
        first: Settings that the first replica decides.

    Returns:
        The description, with the decisions of the first replica.

    Raises:
        ObjectStoreError: the description cannot be read back.
        TrainerConfigError: The run was started with other settings, or the store ignores the
            condition of a conditional write.
    """
    run = read_run(store)
    if run is None:
        store.put_if_absent(RUN_KEY, seal_tensors({**description, **(first or {})}, {}))
        # Another replica may have been first, or this answer lost: what is there now counts.
        run = read_run(store)
    if run is None:
        raise ObjectStoreError(f"{RUN_KEY} was created and cannot be read")
    check_condition(store, RUN_KEY, run[0])
    different = {
        name: (run[1].get(name), value)
        for name, value in description.items()
        if run[1].get(name) != value
    }
    if different:
        raise TrainerConfigError(
            f"the run was started with other settings (theirs, ours): {different}; "
            "use them, or another store URI"
        )
    return run[1]


def read_run(store: ObjectStore) -> tuple[bytes, dict[str, Any]] | None:
    """Return a run's description, as bytes and parsed, or None if there is none.

    Raises:
        OuterLoopError: The description is damaged.
    """
    return read_whole(store, RUN_KEY, lambda data: (data, unseal_tensors(data)[0]))


def read_whole(store: ObjectStore, key: str, parse: Callable[[bytes], Result]) -> Result | None:
    """Return the contents of an object, or None if there is none.

    An incomplete read is repeated. After `DAMAGE_S`, the object counts as damaged.

    Args:
        store: Where it is.
        key: Which.
        parse: Converts the bytes to the result. Raises OuterLoopError if they are damaged.

    Raises:
        ObjectStoreError: the store fails, or the object is damaged.
        OuterLoopError: The object is damaged.
    """

    def read() -> Result | None:
        data = store.get(key)
        return None if data is None else parse(data)

    try:
        return until_whole(read)
    except ObjectStoreError:
        raise
    except OuterLoopError as error:
        raise OuterLoopError(f"{store.place}{key} is damaged: {error}") from error


def until_whole(request: Callable[[], Result]) -> Result:
    """Return the result of a request, repeated for up to `DAMAGE_S` while the result is damaged."""
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(OuterLoopError)
        & tenacity.retry_if_not_exception_type(ObjectStoreError),
        stop=tenacity.stop_after_delay(DAMAGE_S),
        wait=tenacity.wait_exponential(FIRST_BACKOFF_S, max=MAX_POLL_S),
        reraise=True,
    )
    return attempts(request)


def check_condition(store: ObjectStore, key: str, data: bytes) -> None:
    """Check, on an existing object and its own bytes, that the store honors conditional writes.

    Raises:
        TrainerConfigError: The store overwrites an existing object, so two replicas could commit
            different decisions.
    """
    if store.put_if_absent(key, data):
        raise TrainerConfigError(
            f"the store overwrites {key} although asked to create it only if it is absent: use a store with conditional writes"
        )


def mean_of(
    given: Sequence[tuple[Contribution, bytes | None]], codec: Codec, n: int
) -> tuple[Vector, tuple[Contribution, ...]]:
    """Return the weighted mean of payloads, and the contributions that are missing or damaged.

    Args:
        given: Contributions with their payloads, in the order of addition.
        codec: Wire format of the payloads.
        n: Number of values in each.

    Raises:
        OuterLoopError: no payload is undamaged.
    """
    total = sum(contribution.weight for contribution, _ in given)
    mean = np.zeros(n, np.float32)
    damaged = []
    for contribution, payload in given:
        try:
            if payload is None or sha256(payload) != contribution.sha:
                raise OuterLoopError("missing or torn")
            values = decode_payload(codec, payload, n)
        except OuterLoopError as error:
            logger.warning("rank %d, base %s: %s", contribution.rank, contribution.base, error)
            damaged.append(contribution)
        else:
            mean += values * np.float32(contribution.weight / total)
    return mean, tuple(damaged)


class RoundDriver:
    """The driver that performs the protocol's actions on a store, for every kind of replica.

    Args:
        store: Where the run lives.
        codec: Wire format of deltas and of their mean.
        patience: Decides how long to wait.
        rank: This replica's rank.
        n: Number of exchanged values.
    """

    def __init__(
        self, store: ObjectStore, codec: str, patience: Patience, *, rank: int, n: int
    ) -> None:
        self.store = store
        self.codec = codec_named(codec)
        self.patience = patience
        self.rank = rank
        self.incarnation = f"{0:06d}-{uuid.uuid4().hex[:8]}"
        self.feedback = ErrorFeedback(self.codec, np.zeros(n, np.float32))
        self.own: Contribution | None = None
        self._own_round = 0
        self.payload = b""
        self.has_reduced = False
        self.waited_s = 0.0
        self._up_bytes = self._down_bytes = 0
        self._counted_from = (0, 0)
        self._last_merged: tuple[str, bytes] | None = None
        self._lost: tuple[tuple[Contribution, ...], Vector] | None = None

    def contribute(self, vector: Vector, *, round_id: int, base: str, weight: int) -> Contribution:
        """Make this replica's contribution to a round. Nothing is uploaded yet.

        Raises:
            OuterLoopError: A value is not finite.
        """
        self.payload = self.feedback.encode(vector)
        self._own_round = round_id
        self._counted_from = (self._up_bytes, self._down_bytes)
        self.patience.begin_wait()
        self.own = Contribution(self.rank, self.incarnation, base, weight, sha256(self.payload))
        return self.own

    def drive(self, protocol: Protocol[Result], reply: Any = None) -> Result | Train:
        """Perform a protocol's actions until the replica must train, or the protocol ends.

        Args:
            protocol: A new protocol, or one that waits at `Train`.
            reply: This replica's contribution, if the protocol waits at `Train`.

        Raises:
            OuterTimeoutError: A round was not decided in time.
            ObjectStoreError: The store failed for as long as the timeout.
        """
        while True:
            try:
                action = protocol.send(reply)
            except StopIteration as end:
                return end.value
            if isinstance(action, Train):
                return action
            reply = self.retried(lambda action=action: self.perform(action))

    def retried(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request, repeated as often as needed."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(ObjectStoreError),
            stop=tenacity.stop_after_delay(self.patience.timeout_s),
            wait=tenacity.wait_exponential(FIRST_BACKOFF_S, max=MAX_BACKOFF_S),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        return attempts(request)

    def perform(self, action: ProtocolAction) -> Any:
        """Perform one action of `decide_round`, or a request to join, and return its reply.

        Raises:
            OuterLoopError: the action is unknown.
        """
        match action:
            case ReadManifest(round_id=round_id):
                if action.is_poll:
                    self.patience.poll(f"rank {self.rank}, round {round_id}")
                manifest = self.read_manifest(round_id, is_thorough=not action.is_poll)
                return Look(manifest, self.patience.graces)
            case PutDelta() if self.own is not None:
                return self.put(self.own.key(action.round_id), self.payload)
            case ListRound(round_id=round_id):
                return read_listing(self.store.keys(delta_prefix(round_id)), self.patience.graces)
            case Merge():
                return self._merge(action.round_id, action.contributions)
            case Commit(manifest=manifest):
                return self._commit(manifest)
            case PutJoin(round_id=round_id):
                return self.put(join_key(round_id, self.rank, self.incarnation), b"")
        raise OuterLoopError(f"rank {self.rank} cannot perform {action}")

    def read_whole(self, key: str, parse: Callable[[bytes], Result]) -> Result | None:
        """Return the result of `read_whole`, and count its bytes."""

        def counted(data: bytes) -> Result:
            self._down_bytes += len(data)
            return parse(data)

        return read_whole(self.store, key, counted)

    def read_manifest(self, round_id: int, *, is_thorough: bool = False) -> Manifest | None:
        """Return a round's decision, if there is one. A damaged one is restored.

        Args:
            round_id: The round.
            is_thorough: Whether to look for the copy too, in case the decision was lost.

        Raises:
            ObjectStoreError: the store fails.
            OuterLoopError: The decision and its copy are damaged.
        """
        key = manifest_key(round_id)
        try:
            manifest = self.read_whole(key, Manifest.from_bytes)
            if manifest is None and is_thorough:
                manifest = self._put_back(round_id)
        except ObjectStoreError:
            raise
        except OuterLoopError:
            manifest = self._put_back(round_id)
            if manifest is None:
                raise
        if manifest is not None and manifest.round_id != round_id:
            raise OuterLoopError(f"{key} decides round {manifest.round_id}")
        return manifest

    def _put_back(self, round_id: int) -> Manifest | None:
        """Write a decision again as its copy has it; None if there is no copy."""
        data = self.get(copy_key(round_id))
        try:
            manifest = None if data is None else Manifest.from_bytes(data)
        except OuterLoopError as error:
            logger.warning("%s: %s", copy_key(round_id), error)
            return None
        if manifest is not None and data is not None:
            logger.warning("%s is restored from its copy", manifest_key(round_id))
            self.put(manifest_key(round_id), data)
        return manifest

    def read_merged(self, manifest: Manifest, *, n: int) -> Vector | None:
        """Return a decided round's merged delta. A damaged one is rebuilt.

        Returns:
            The values, or None if neither the object nor its source deltas exist.

        Raises:
            ObjectStoreError: the store fails.
        """
        key = merged_key(manifest.round_id, manifest.merged.sha)

        def checked(payload: bytes) -> Vector:
            if sha256(payload) != manifest.merged.sha:
                raise OuterLoopError(f"{len(payload)} bytes that do not match the hash")
            return decode_payload(self.codec, payload, n)

        if self._last_merged is not None and self._last_merged[0] == key:
            return checked(self._last_merged[1])
        try:
            merged = self.read_whole(key, checked)
        except ObjectStoreError:
            raise
        except OuterLoopError as error:
            logger.warning("%s", error)
            merged = None
        if merged is not None:
            return merged
        # Equal deltas in equal order give equal bytes, so anybody may put them back.
        mean, damaged = self._mean(manifest.round_id, manifest.contributions, n)
        payload = b"" if damaged else encode_payload(self.codec, mean)
        if sha256(payload) != manifest.merged.sha:
            return None
        logger.warning("%s is rebuilt from its deltas", key)
        self.put(key, payload)
        return checked(payload)

    def settle(self, manifest: Manifest) -> None:
        """Close a decided round and this replica's error account for it."""
        self.has_reduced = (manifest.by, manifest.incarnation) == (self.rank, self.incarnation)
        # Two rounds have one base if nothing moved in the first: the round has to be the own one too.
        is_own = manifest.round_id == self._own_round
        if self.own is not None and is_own and manifest.base == self.own.base:
            owed = self._owed(manifest, self.own)
            self.feedback.settle(was_included=manifest.names(self.own), owed=owed)
            self.own = None
        self.waited_s = self.patience.end_round()

    def _owed(self, manifest: Manifest, own: Contribution) -> Vector | None:
        """Return what this replica answers for of what a round's merged delta has lost."""
        if own != manifest.accountable or not self.codec.is_lossy:
            return None
        contributions = manifest.contributions
        if self._lost is not None and self._lost[0] == contributions:
            lost = self._lost[1]
        else:
            found = until_whole(lambda: self._lost_again(manifest))
            if found is None:
                logger.warning("round %d: the error of its mean is unknown", manifest.round_id)
                return None
            lost = found
        return lost * np.float32(sum(c.weight for c in contributions) / own.weight)

    def _lost_again(self, manifest: Manifest) -> Vector | None:
        """Return what a merged delta has lost; None if the round's deltas have been cleaned away.

        Raises:
            OuterLoopError: One of them is damaged. Who has sent it sends it again when it joins.
        """
        n, round_id = self.feedback.residual.size, manifest.round_id
        mean, damaged = self._mean(round_id, manifest.contributions, n)
        merged = self.read_merged(manifest, n=n)
        if merged is None or not any(self.store.keys(delta_prefix(round_id))):
            return None
        if damaged:
            key = damaged[0].key(round_id)
            raise OuterLoopError(f"{self.store.place}{key} is damaged or gone")
        return mean - merged

    def report(
        self, manifest: Manifest, own: Contribution, base: str, *, n_missed: int = 0
    ) -> RoundReport:
        """Return the results of a round, and its transfers since `contribute`."""
        return RoundReport(
            round_id=manifest.round_id,
            n_contributions=len(manifest.contributions),
            was_included=manifest.names(own),
            n_missed=n_missed,
            wait_s=self.waited_s,
            up_bytes=self._up_bytes - self._counted_from[0],
            down_bytes=self._down_bytes - self._counted_from[1],
            base=base,
        )

    def get(self, key: str) -> bytes | None:
        """Read an object and count its bytes."""
        data = self.store.get(key)
        self._down_bytes += len(data or b"")
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write an object and count its bytes."""
        self._up_bytes += len(data)
        self.store.put(key, data)

    def _merge(
        self, round_id: int, contributions: Sequence[Contribution]
    ) -> Merged | tuple[Contribution, ...]:
        mean, damaged = self._mean(round_id, contributions, self.feedback.residual.size)
        if damaged:
            return damaged
        payload = encode_payload(self.codec, mean)
        if self.codec.is_lossy:
            self._lost = tuple(contributions), mean - decode_payload(self.codec, payload, mean.size)
        merged = Merged(sha256(payload), len(payload))
        key = merged_key(round_id, merged.sha)
        self.put(key, payload)
        self._last_merged = (key, payload)
        return merged

    def _mean(
        self, round_id: int, contributions: Sequence[Contribution], n: int
    ) -> tuple[Vector, tuple[Contribution, ...]]:
        """Average contributions; return also those that are missing or not what they are named.

        The order of the sum is that of the ranks, so equal sets give equal bits.
        """
        with ThreadPoolExecutor(max_workers=8) as pool:
            payloads = list(pool.map(lambda c: self._payload_of(round_id, c), contributions))
        given = list(zip(contributions, payloads, strict=True))
        self._down_bytes += sum(len(data or b"") for each, data in given if each != self.own)
        return mean_of(given, self.codec, n)

    def _payload_of(self, round_id: int, contribution: Contribution) -> bytes | None:
        is_own = contribution == self.own
        return self.payload if is_own else self.store.get(contribution.key(round_id))

    def _commit(self, manifest: Manifest) -> None:
        data, key = manifest.to_bytes(), manifest_key(manifest.round_id)
        if self._put_back(manifest.round_id) is not None:
            return
        self._up_bytes += len(data)
        try:
            if self.store.put_if_absent(key, data):
                # Whoever finds no manifest any more finds what was decided all the same.
                self.put(copy_key(manifest.round_id), data)
        except ObjectStoreError as error:
            # The answer may be lost although the write was not: read before trying again.
            logger.warning("round %d: unclear commit: %s", manifest.round_id, error)
            self.patience.poll(f"rank {self.rank}, committing round {manifest.round_id}")
