"""A replica's part in the log of rounds: its checked and counted transfers to and from the store.

`RoundLog` decides rounds with the others and follows what was decided. `ErrorFeedback` keeps the
errors of a codec. `Patience` measures the time of rounds, and counts the grace periods.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tenacity
from numpy.typing import NDArray

from trainer.diloco.codecs import (
    Codec,
    codec_named,
    decode_payload,
    encode_payload,
    seal_tensors,
    sha256,
    unseal_tensors,
)
from trainer.diloco.object_store import ObjectStore
from trainer.diloco.protocol import (
    DELTAS,
    Contribution,
    Manifest,
    adaptive_grace_s,
    chosen_of,
    copy_key,
    delta_prefix,
    join_key,
    manifest_key,
    merged_key,
    shares_of,
    turn_of,
)
from trainer.errors import (
    ObjectStoreError,
    OuterLoopError,
    OuterTimeoutError,
    TrainerConfigError,
)

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]
Result = TypeVar("Result")

RUN_KEY = "run.safetensors"
"""Key of the settings that all replicas of a run share. It is written once."""
CLAIMS = "claims/"
REUPLOAD_GRACES = 4
"""After this many grace periods without a decision, a contribution is uploaded again, then less and less often."""
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

        `owed` is the error of the merged delta, if this replica must correct it.
        """
        if was_included and self.candidate is not None:
            self.residual = self.candidate
        if owed is not None:
            self.residual = self.residual + owed
        self.candidate = None


@dataclass
class Patience:
    """The clock that measures rounds and decides how long to wait."""

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

    def end_round(self) -> None:
        """Note that a round is decided."""
        if self._wait_began is not None and self._round_began is not None:
            self._waits_s.append(self.waited_s)
            self._rounds_s.append(time.monotonic() - self._round_began)
        # Who replays the log may come to a round that is not decided: its wait begins now.
        self._wait_began = time.monotonic()

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

    Returns:
        The description, with what the first replica alone decides (`first`).

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
    """Return a run's description, as bytes and parsed, or None if there is none."""
    return read_whole(store, RUN_KEY, lambda data: (data, unseal_tensors(data)[0]))


def read_whole(store: ObjectStore, key: str, parse: Callable[[bytes], Result]) -> Result | None:
    """Return the contents of an object, or None if there is none.

    An incomplete read is repeated. After `DAMAGE_S`, the object counts as damaged.

    Raises:
        ObjectStoreError: The store fails.
        OuterLoopError: The object is damaged: `parse` says so.
    """

    def read() -> Result | None:
        data = store.get(key)
        return None if data is None else parse(data)

    def is_damage(error: BaseException) -> bool:
        return isinstance(error, OuterLoopError) and not isinstance(error, ObjectStoreError)

    try:
        return repeated(read, is_damage, DAMAGE_S, MAX_POLL_S)
    except ObjectStoreError:
        raise
    except OuterLoopError as error:
        raise OuterLoopError(f"{store.place}{key} is damaged: {error}") from error


def repeated(
    request: Callable[[], Result],
    may_pass: Callable[[BaseException], bool],
    timeout_s: float,
    longest_wait_s: float,
) -> Result:
    """Return the result of a request, repeated for up to `timeout_s` after errors that may pass."""
    began = time.monotonic()
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_pass),
        stop=lambda _: time.monotonic() - began >= timeout_s,
        wait=tenacity.wait_exponential(FIRST_BACKOFF_S, max=longest_wait_s),
        sleep=lambda seconds: time.sleep(seconds),
        before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
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


def claim(store: ObjectStore, rank: int) -> str:
    """Return a name for a new process of a rank, which sorts after all earlier ones."""
    folder = f"{CLAIMS}{rank:04d}/"
    while True:
        number = max((int(key.rpartition("/")[2]) for key in store.keys(folder)), default=0) + 1
        if store.put_if_absent(f"{folder}{number:06d}", b""):
            return f"{number:06d}-{uuid.uuid4().hex[:8]}"


class RoundLog:
    """One replica's view of the log of rounds, and its part in deciding the next one.

    A subclass says what a decided round does to its state, in `_apply`.
    """

    def __init__(
        self,
        store: ObjectStore,
        codec: str,
        patience: Patience,
        *,
        rank: int,
        n: int,
        quorum: int,
        max_age: int = 0,
        n_full: int | None = None,
    ) -> None:
        self.store = store
        self.codec = codec_named(codec)
        self.patience = patience
        self.rank = rank
        self.incarnation = f"{0:06d}-{uuid.uuid4().hex[:8]}"
        self.quorum, self.max_age, self._n_full = quorum, max_age, n_full
        self.round_id, self.base = 0, ""
        self.expected: frozenset[int] = frozenset()
        self.feedback = ErrorFeedback(self.codec, np.zeros(n, np.float32))
        self.own: Contribution | None = None
        self.outcome: Manifest | None = None
        self.payload = b""
        self.waited_s = 0.0
        self.has_reduced = False
        self._upload_at = 0
        self._up_bytes = self._down_bytes = self._n_applied = 0
        self._reported = (0, 0, 0)
        self._counted: set[Contribution] = set()
        self._last_merged: tuple[str, bytes] | None = None
        self._lost: tuple[int, tuple[Contribution, ...], Vector] | None = None

    def contribute(self, vector: Vector, *, weight: int) -> Contribution:
        """Make this replica's contribution to the present round. Nothing is uploaded yet."""
        self.payload = self.feedback.encode(vector)
        self._upload_at, self.outcome = 0, None
        self.patience.begin_wait()
        self.own = Contribution(
            self.rank, self.incarnation, self.round_id, self.base, weight, sha256(self.payload)
        )
        return self.own

    @property
    def is_open(self) -> bool:
        """Return whether this replica's contribution may still become part of a round."""
        own = self.own
        if own is None:
            return False
        age = self.round_id - own.round_id
        return 0 <= age <= self.max_age and (age > 0 or own.base == self.base)

    def decide(self) -> Manifest | None:
        """Take part in rounds until one includes this replica's contribution, or it is too old.

        Returns:
            The round that includes it, or None. Rounds that were decided until then are applied.
        """
        began = time.monotonic()
        while self.is_open:
            if self.advance() is None and self.is_open:
                self._take_part()
        if self.own is not None:
            logger.warning("rank %d: a delta came too late to count", self.rank)
            self.feedback.settle(was_included=False)
            self.own = None
        self.waited_s = time.monotonic() - began
        return self.outcome

    def _take_part(self) -> None:
        """Send the contribution, and decide the present round or wait."""
        own = self.own
        assert own is not None
        if self.patience.graces >= self._upload_at:
            # The delta comes first, and from the reducer too: should the merged object be damaged
            # later, or its writer die, anybody can make it again from the deltas that it names.
            self.retried(lambda: self.put(own.key, self.payload))
            # Once more after long waits, ever rarer: the first one may have arrived torn.
            self._upload_at = max(REUPLOAD_GRACES, 2 * self._upload_at)
        if not self.retried(lambda: self._propose(own)):
            self.patience.poll(f"rank {self.rank}, round {self.round_id}")

    def advance(self, *, is_thorough: bool = False) -> Manifest | None:
        """Apply the present round and go to the next one, if it is decided."""
        while True:
            found = self.retried(lambda: self.read_manifest(self.round_id, is_thorough=is_thorough))
            if found is None:
                return None
            base = self.retried(lambda found=found: self._apply(found))
            if base is not None:
                break
        self._n_applied += 1
        self.base, self.expected = base, frozenset(found.expected)
        self.round_id += 1
        self.patience.end_round()
        return found

    def _apply(self, manifest: Manifest) -> str | None:
        """Apply a decided round; return the hash of the new state, or None after starting elsewhere."""
        raise NotImplementedError

    def _propose(self, own: Contribution) -> bool:
        """Try to decide the present round; return whether to look at once for what came of it."""
        turn = turn_of(self.rank, self.round_id, self.expected)
        damaged: set[Contribution] = set()
        while (graces := self.patience.graces) >= turn:
            found, joining = self._waiting()
            contributions = chosen_of(
                found - damaged,
                own,
                expected=self.expected,
                quorum=self.quorum,
                is_overdue=graces > turn,
            )
            if not contributions:
                # What was damaged a moment ago may be whole at the next look.
                return False
            merged = self._merge(contributions)
            if isinstance(merged, str):
                ranks = {c.rank for c in contributions} | joining
                # The manifest comes last: what it names is in the store already. Whether this
                # write or another replica's won is known only by reading, for an answer can be
                # lost, and a write that was not seen to arrive may still arrive later.
                self._commit(
                    Manifest(
                        round_id=self.round_id,
                        base=self.base,
                        by=self.rank,
                        incarnation=self.incarnation,
                        contributions=contributions,
                        merged=merged,
                        expected=() if self.max_age else tuple(sorted(ranks)),
                        n_full=self._n_full or len(contributions),
                    )
                )
                return True
            damaged |= set(merged)
        return False

    def _waiting(self) -> tuple[set[Contribution], set[int]]:
        """Return the contributions that may be part of the present round, and who wants to join."""
        keys = self.store.keys(DELTAS if self.max_age else delta_prefix(self.round_id))
        joining = {int(key.rpartition("/")[2][:4]) for key in keys if key.endswith(".join")}
        oldest = self.round_id - self.max_age
        found = {c for key in keys if (c := Contribution.from_key(key)) is not None}
        # Only what started from a state that we know can be averaged with our own delta.
        sound = {
            c
            for c in found - self._counted
            if oldest <= c.round_id < self.round_id
            or (c.round_id == self.round_id and c.base == self.base)
        }
        return sound, joining

    def ask_to_join(self) -> None:
        """Ask the others to wait for this replica from the next round on."""
        key = join_key(self.round_id, self.rank, self.incarnation)
        self.retried(lambda: self.put(key, b""))

    def retried(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request, repeated while the store fails, up to the timeout."""
        return repeated(
            request,
            lambda error: isinstance(error, ObjectStoreError),
            self.patience.timeout_s,
            MAX_BACKOFF_S,
        )

    def read_whole(self, key: str, parse: Callable[[bytes], Result]) -> Result | None:
        """Return the result of `read_whole`, and count its bytes."""

        def counted(data: bytes) -> Result:
            self._down_bytes += len(data)
            return parse(data)

        return read_whole(self.store, key, counted)

    def read_manifest(self, round_id: int, *, is_thorough: bool = False) -> Manifest | None:
        """Return a round's decision, if there is one. A damaged one is restored.

        With `is_thorough`, one that was lost is restored too.

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
        key = merged_key(manifest.round_id, manifest.merged)

        def checked(payload: bytes) -> Vector:
            if sha256(payload) != manifest.merged:
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
        mean, damaged = self._mean(manifest.contributions, manifest.shares, n)
        payload = b"" if damaged else encode_payload(self.codec, mean)
        if sha256(payload) != manifest.merged:
            return None
        logger.warning("%s is rebuilt from its deltas", key)
        self.put(key, payload)
        return checked(payload)

    def settle(self, manifest: Manifest) -> None:
        """Note what a decided round includes, and close this replica's error account for it."""
        self.has_reduced = (manifest.by, manifest.incarnation) == (self.rank, self.incarnation)
        oldest = manifest.round_id - self.max_age
        included = self._counted | set(manifest.contributions)
        self._counted = {c for c in included if c.round_id >= oldest}
        if self.own is not None and self.own in manifest.contributions:
            self.feedback.settle(was_included=True, owed=self._owed(manifest, self.own))
            self.own, self.outcome = None, manifest

    def _owed(self, manifest: Manifest, own: Contribution) -> Vector | None:
        """Return what this replica answers for of what a round's merged delta has lost."""
        if own != manifest.contributions[manifest.accountable] or not self.codec.is_lossy:
            return None
        lost = self._lost
        if lost is None or lost[:2] != (manifest.round_id, manifest.contributions):
            mean, damaged = self._mean(
                manifest.contributions, manifest.shares, self.feedback.residual.size
            )
            merged = None if damaged else self.read_merged(manifest, n=mean.size)
            if merged is None:
                # A torn upload, or a round of long ago. Only this replica's next delta would tell.
                logger.warning("round %d: the error of its mean is unknown", manifest.round_id)
                return None
            lost = manifest.round_id, manifest.contributions, mean - merged
        return lost[2] * np.float32(manifest.whole_weight / own.weight)

    def report(self, round_id: int) -> RoundReport:
        """Return the results of an exchange, and its transfers since the last one."""
        before, self._reported = self._reported, self._progress()
        up_bytes, down_bytes, n_applied = (
            now - then for now, then in zip(self._reported, before, strict=True)
        )
        return RoundReport(
            round_id=round_id,
            n_contributions=len(self.outcome.contributions) if self.outcome else 0,
            was_included=self.outcome is not None,
            n_missed=n_applied - (self.outcome is not None),
            wait_s=self.waited_s,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            base=self.base,
        )

    def _progress(self) -> tuple[int, int, int]:
        """Return what reports count, from the beginning on."""
        return self._up_bytes, self._down_bytes, self._n_applied

    def get(self, key: str) -> bytes | None:
        """Read an object and count its bytes."""
        data = self.store.get(key)
        self._down_bytes += len(data or b"")
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write an object and count its bytes."""
        self._up_bytes += len(data)
        self.store.put(key, data)

    def _merge(self, contributions: Sequence[Contribution]) -> str | list[Contribution]:
        """Upload the mean of contributions; return its hash, or those that are damaged."""
        shares = shares_of(contributions, self.round_id, self._n_full or len(contributions))
        mean, damaged = self._mean(contributions, shares, self.feedback.residual.size)
        if damaged:
            return damaged
        payload = encode_payload(self.codec, mean)
        if self.codec.is_lossy:
            lost = mean - decode_payload(self.codec, payload, mean.size)
            self._lost = self.round_id, tuple(contributions), lost
        sha = sha256(payload)
        key = merged_key(self.round_id, sha)
        self.put(key, payload)
        self._last_merged = (key, payload)
        return sha

    def _mean(
        self, contributions: Sequence[Contribution], shares: Sequence[float], n: int
    ) -> tuple[Vector, list[Contribution]]:
        """Sum contributions by their shares; return also those that are missing or damaged.

        The order of the sum is that of the contributions, so equal sets give equal bits.
        """
        others = [c for c in contributions if c != self.own]
        payloads = dict(zip(others, self.store.get_many([c.key for c in others]), strict=True))
        self._down_bytes += sum(len(data or b"") for data in payloads.values())
        mean = np.zeros(n, np.float32)
        damaged = []
        for contribution, share in zip(contributions, shares, strict=True):
            payload = self.payload if contribution == self.own else payloads[contribution]
            is_whole = payload is not None and sha256(payload) == contribution.sha
            try:
                values = decode_payload(self.codec, payload if is_whole and payload else b"", n)
            except OuterLoopError as error:
                logger.warning("%s: %s", contribution.key, error)
                damaged.append(contribution)
            else:
                mean += values * np.float32(share)
        return mean, damaged

    def _commit(self, manifest: Manifest) -> None:
        data, key = manifest.to_bytes(), manifest_key(manifest.round_id)
        if self.read_manifest(manifest.round_id, is_thorough=True) is not None:
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
