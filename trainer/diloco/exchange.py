"""A round's traffic: what travels between one replica and the store, checked and counted.

`RoundStore` performs the verbs of the protocol, `ErrorFeedback` keeps what a codec lost,
`Patience` measures how long rounds take and says how many graces have passed.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.diloco.codecs import Codec, decode_payload, encode_payload
from trainer.diloco.object_store import ObjectStore
from trainer.diloco.protocol import (
    Contribution,
    Manifest,
    Merged,
    adaptive_grace_s,
    delta_prefix,
    join_key,
    manifest_key,
    merged_key,
)
from trainer.errors import (
    ObjectStoreError,
    OuterLoopError,
    OuterTimeoutError,
    TrainerConfigError,
)

__all__ = [
    "ErrorFeedback",
    "MergeOutcome",
    "Patience",
    "RoundReport",
    "RoundStore",
    "Traffic",
    "sha256",
]

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]

MAX_BACKOFF_S = 5.0
POLL_SHARE = 0.05
MIN_POLL_S, MAX_POLL_S = 0.02, 2.0


def sha256(*parts: bytes | NDArray[Any]) -> str:
    """Return the hexadecimal SHA-256 of some bytes or contiguous arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclass(frozen=True)
class MergeOutcome:
    """A merged payload with what it lost of the mean, or the contributions that spoilt it."""

    payload: bytes
    lost: Vector
    damaged: tuple[Contribution, ...] = ()


@dataclass
class Traffic:
    """What one replica has sent and received so far."""

    up_bytes: int = 0
    down_bytes: int = 0
    n_requests: int = 0
    n_failed: int = 0


@dataclass(frozen=True)
class RoundReport:
    """One finished round, as one replica saw it.

    `n_missed` counts the rounds before it that this replica applied without having taken part.
    `base` is the hash of the state after it.
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
    """What lossy codecs have kept back so far; it rides along with the next delta.

    The reducer also answers for what the merged delta lost: it adds that error, times the whole
    weight over its own, to its own account, so the mean of the next round makes up for it.
    """

    codec: Codec
    residual: Vector
    _candidate: Vector | None = None
    _merge_error: Vector | None = None

    def encode(self, delta: Vector) -> bytes:
        """Return the payload for this delta plus all that was kept back."""
        if not self.codec.is_lossy:
            return encode_payload(self.codec, delta)
        total = delta + self.residual
        payload = encode_payload(self.codec, total)
        total -= decode_payload(self.codec, payload, delta.size)
        self._candidate = total
        return payload

    def settle(self, *, was_included: bool, reduced: bool) -> None:
        """Close the round: a delta that was left out is dropped, with nothing kept of it."""
        if was_included and self._candidate is not None:
            self.residual = self._candidate
        if reduced and self._merge_error is not None:
            self.residual = self.residual + self._merge_error
        self._candidate = self._merge_error = None

    def answer_for(self, lost: Vector, *, times: float) -> None:
        """Take on what a merged delta lost, if it becomes the round's."""
        self._merge_error = lost * np.float32(times) if self.codec.is_lossy else None

    def tensors(self) -> dict[str, Vector]:
        """Return all vectors by name, for a state file."""
        named = {
            "residual": self.residual if self.codec.is_lossy else None,
            "candidate": self._candidate,
            "merge_error": self._merge_error,
        }
        return {name: vector for name, vector in named.items() if vector is not None}

    def restore(self, tensors: dict[str, Vector]) -> None:
        """Take the vectors of `tensors` back."""
        self.residual = tensors.get("residual", self.residual)
        self._candidate = tensors.get("candidate")
        self._merge_error = tensors.get("merge_error")


@dataclass
class Patience:
    """Measures rounds with a clock and decides how long is long.

    Args:
        timeout_s: A round without decision for this long is an error.
        first_grace_s: Grace of the first round.
        clock: Seconds, monotonic.
        sleep: Waits seconds.
    """

    timeout_s: float
    first_grace_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _waits_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _round_began: float | None = None
    _wait_began: float | None = None
    _failures: int = 0

    def begin_round(self) -> None:
        """The inner steps of a round begin."""
        self._round_began = self.clock()
        self._wait_began = None

    def begin_wait(self) -> None:
        """The own delta is ready."""
        self._wait_began = self.clock()
        self._failures = 0

    def end_round(self) -> float:
        """A round is decided; return how long we waited for that, in seconds."""
        waited = self.waited_s
        if self._wait_began is not None and self._round_began is not None:
            self._waits_s.append(waited)
            self._rounds_s.append(self.clock() - self._round_began)
        self._wait_began = None
        return waited

    @property
    def waited_s(self) -> float:
        """Seconds since the own delta was ready."""
        return 0.0 if self._wait_began is None else self.clock() - self._wait_began

    @property
    def graces(self) -> int:
        """Whole graces that have passed since the own delta was ready."""
        grace = adaptive_grace_s(self._waits_s, self._rounds_s, first_s=self.first_grace_s)
        return int(self.waited_s / max(grace, 1e-3))

    def poll(self, waiting_for: str) -> None:
        """Wait a share of the time waited so far before the next look.

        Raises:
            OuterTimeoutError: The whole timeout has passed.
        """
        waited = self.waited_s
        if waited > self.timeout_s:
            raise OuterTimeoutError(
                f"{waiting_for}: no decision after {waited:.0f} s; start the missing replicas, "
                "lower the quorum, or raise timeout_s"
            )
        self.sleep(min(MAX_POLL_S, max(MIN_POLL_S, waited * POLL_SHARE)))

    def retry(self, error: ObjectStoreError) -> None:
        """Back off after a failed request.

        Raises:
            ObjectStoreError: Requests have failed for the whole timeout.
        """
        if self._failures == 0:
            self._failing_since = self.clock()
        self._failures += 1
        if self.clock() - self._failing_since > self.timeout_s:
            raise error
        logger.warning("retrying after: %s", error)
        self.sleep(min(MAX_BACKOFF_S, 0.05 * 2 ** min(self._failures, 10)))

    def succeeded(self) -> None:
        """A request came through."""
        self._failures = 0

    _failing_since: float = 0.0


class RoundStore:
    """The protocol's verbs on an object store, with every payload checked against its hash."""

    def __init__(self, store: ObjectStore, codec: Codec) -> None:
        self.store = store
        self.codec = codec
        self.traffic = Traffic()
        self._merged: tuple[str, bytes] | None = None

    def read_manifest(self, round_id: int) -> Manifest | None:
        """Return a round's decision, if there is one."""
        data = self.get(manifest_key(round_id))
        if data is None:
            return None
        manifest = Manifest.from_bytes(data)
        if manifest.round_id != round_id:
            raise OuterLoopError(f"{manifest_key(round_id)} decides round {manifest.round_id}")
        return manifest

    def commit(self, manifest: Manifest) -> None:
        """Try to decide a round. Who won is known only by reading: an answer can be lost."""
        data = manifest.to_bytes()
        self._count(up=len(data))
        self.store.put_if_absent(manifest_key(manifest.round_id), data)

    def check_condition(self, key: str, data: bytes) -> None:
        """Check on an object that exists, with the bytes it has, that the store keeps its word.

        Raises:
            TrainerConfigError: It creates what exists: two replicas could commit two truths.
        """
        self._count(up=len(data))
        if self.store.put_if_absent(key, data):
            raise TrainerConfigError(
                f"the store overwrites {key} although asked to create it only if it is absent: "
                "use a store that honours conditional writes"
            )

    def put_delta(self, round_id: int, contribution: Contribution, payload: bytes) -> None:
        """Upload the own delta."""
        self.put(contribution.key(round_id), payload)

    def put_join(self, round_id: int, rank: int, incarnation: str) -> None:
        """Ask to be waited for."""
        self.put(join_key(round_id, rank, incarnation), b"")

    def list_round(self, round_id: int) -> tuple[list[Contribution], list[int]]:
        """Return a round's contributions, and the ranks that ask to be waited for."""
        self._count()
        keys = self.store.keys(delta_prefix(round_id))
        found = [c for c in map(Contribution.from_key, keys) if c is not None]
        joining = [int(key.rpartition("/")[2][:4]) for key in keys if key.endswith(".join")]
        return found, joining

    def merge(
        self,
        round_id: int,
        contributions: Sequence[Contribution],
        own: tuple[Contribution, bytes],
        *,
        n: int,
    ) -> MergeOutcome:
        """Average some contributions, unless some are missing or not what their names say.

        The order of the sum is that of the ranks, so equal sets give equal bits.
        """
        payloads = self._download(round_id, contributions, own)
        weights = [contribution.weight for contribution in contributions]
        mean = np.zeros(n, np.float32)
        damaged = []
        for contribution, payload, weight in zip(contributions, payloads, weights, strict=True):
            try:
                if payload is None or sha256(payload) != contribution.sha:
                    raise OuterLoopError("missing or torn")
                values = decode_payload(self.codec, payload, n)
            except OuterLoopError as error:
                logger.warning("round %d: rank %d: %s", round_id, contribution.rank, error)
                damaged.append(contribution)
                continue
            mean += values * np.float32(weight / sum(weights))
        if damaged:
            return MergeOutcome(b"", mean, tuple(damaged))
        merged = encode_payload(self.codec, mean)
        if self.codec.is_lossy:
            mean -= decode_payload(self.codec, merged, n)
        else:
            mean[:] = 0
        return MergeOutcome(merged, mean)

    def put_merged(self, round_id: int, payload: bytes) -> Merged:
        """Upload a merged delta under its hash."""
        merged = Merged(sha256(payload), len(payload))
        self.put(merged_key(round_id, merged.sha), payload)
        self._merged = (merged.sha, payload)
        return merged

    def read_merged(self, manifest: Manifest, *, n: int) -> Vector | None:
        """Return a decided round's merged delta; None if it has been cleaned away.

        Raises:
            ObjectStoreError: The bytes are not those that were committed to; try again.
        """
        key = merged_key(manifest.round_id, manifest.merged.sha)
        if self._merged is not None and self._merged[0] == manifest.merged.sha:
            payload = self._merged[1]
        else:
            payload = self.get(key)
        if payload is None:
            return None
        if sha256(payload) != manifest.merged.sha:
            raise ObjectStoreError(f"{key}: {len(payload)} bytes that do not match the hash")
        return decode_payload(self.codec, payload, n)

    def get(self, key: str) -> bytes | None:
        """Read an object, counted."""
        data = self.store.get(key)
        self._count(down=len(data or b""))
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write an object, counted."""
        self._count(up=len(data))
        self.store.put(key, data)

    def _download(
        self,
        round_id: int,
        contributions: Sequence[Contribution],
        own: tuple[Contribution, bytes],
    ) -> Iterable[bytes | None]:
        others = [c for c in contributions if c != own[0]]
        with ThreadPoolExecutor(max_workers=max(1, min(8, len(others)))) as pool:
            fetched = pool.map(lambda c: self.store.get(c.key(round_id)), others)
            payloads = dict(zip(others, fetched, strict=True))
        for payload in payloads.values():
            self._count(down=len(payload or b""))
        return [own[1] if c == own[0] else payloads[c] for c in contributions]

    def _count(self, *, up: int = 0, down: int = 0) -> None:
        self.traffic.n_requests += 1
        self.traffic.up_bytes += up
        self.traffic.down_bytes += down
