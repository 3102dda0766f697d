"""The round protocol of one replica, without I/O and without a clock.

A round is one object, `rounds/<r>/manifest.json`, that is created only once. It names the
contributors, the hash of the merged pseudo-gradient, the state that it applies to, and the replicas
to wait for next. The replica that creates it decides the round, and the others read it.

In each round one replica, the reducer, downloads all deltas, uploads their mean, and commits. The
role rotates over the last contributors, so the traffic of a round grows linearly with the number of
replicas. If the reducer doesn't act, the next replica takes over.

`decide_round` is one round, and `ReplicaLife` is a replica from its start to the last round. Both
are generators: they yield a `ProtocolAction`, and the caller performs it and sends back the result
that its class documents. If a request fails, the caller repeats the action. Every action may be
repeated.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import msgspec

from trainer.errors import OuterLoopError
from trainer.outer.tensor_file import sha256

MAX_RESYNCS = 10
"""After this many snapshots without progress, the log can't be repaired."""
REUPLOAD_GRACES = 4
"""After this many grace periods without a decision, a contribution is uploaded again, then less and less often."""


def round_prefix(round_id: int) -> str:
    """Return the folder of a round."""
    return f"rounds/{round_id:06d}/"


def manifest_key(round_id: int) -> str:
    """Return the key whose creation decides a round."""
    return f"{round_prefix(round_id)}manifest.json"


def copy_key(round_id: int) -> str:
    """Return the key of a decision's copy, which is written after it."""
    return f"decided/{round_id:06d}.json"


def delta_prefix(round_id: int) -> str:
    """Return the folder of a round's contributions and join requests."""
    return f"{round_prefix(round_id)}delta/"


def merged_key(round_id: int, sha: str) -> str:
    """Return the key of a merged pseudo-gradient."""
    return f"{round_prefix(round_id)}merged/{sha}.safetensors"


def snapshot_key(round_id: int, base: str) -> str:
    """Return the key of the global state at the start of a round."""
    return f"snapshots/{round_id:06d}.{base}.safetensors"


@dataclass(frozen=True, order=True)
class Contribution:
    """One replica's pseudo-gradient of one round, as its key describes it.

    `incarnation` begins with the number that the process has claimed, so that the later of two
    processes of one rank sorts last. `base` is the hash of the state it started from, `sha` the
    hash of its bytes, and `weight` its weight in the mean (usually tokens).
    """

    rank: int
    incarnation: str
    base: str
    weight: int
    sha: str

    def key(self, round_id: int) -> str:
        """Return the key of the bytes."""
        return (
            f"{delta_prefix(round_id)}{self.rank:04d}.{self.incarnation}.{self.base}."
            f"{self.weight}.{self.sha}.safetensors"
        )

    @classmethod
    def from_key(cls, key: str) -> "Contribution | None":
        """Parse a key, or return None if it is of another kind."""
        parts = key.rpartition("/")[2].split(".")
        if len(parts) != 6 or not (parts[0].isdecimal() and parts[3].isdecimal()):
            return None
        return cls(int(parts[0]), parts[1], parts[2], int(parts[3]), parts[4])


def join_key(round_id: int, rank: int, incarnation: str) -> str:
    """Return the key by which a replica asks the others to wait for it in the next round."""
    return f"{delta_prefix(round_id)}{rank:04d}.{incarnation}.join"


@dataclass(frozen=True)
class Merged:
    """The merged pseudo-gradient: the hash and number of its bytes."""

    sha: str
    size_bytes: int


class _Sealed(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The decision about one round. Immutable once its key exists."""

    round_id: int
    base: str
    by: int
    incarnation: str
    contributions: tuple[Contribution, ...]
    merged: Merged
    expected: tuple[int, ...]
    rejected: int = 0

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with its hash, so that any change is noticed."""
        body = msgspec.json.encode(self)
        return msgspec.json.encode(_Sealed(msgspec.Raw(body), sha256(body)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read a manifest.

        Raises:
            OuterLoopError: The bytes aren't a manifest, or were changed.
        """
        try:
            sealed = msgspec.json.decode(data, type=_Sealed)
            if sha256(bytes(sealed.manifest)) != sealed.sha256:
                raise OuterLoopError(f"not a manifest: {data[:80]!r}: its hash does not match")
            return msgspec.json.decode(sealed.manifest, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OuterLoopError(f"not a manifest: {data[:80]!r}: {error}") from error

    @property
    def accountable(self) -> Contribution:
        """Return the contribution whose sender corrects the error of the merged delta."""
        return self.contributions[self.round_id % len(self.contributions)]

    def names(self, contribution: Contribution | None) -> bool:
        """Return whether this contribution is part of the round."""
        return contribution in self.contributions


@dataclass(frozen=True)
class ProtocolAction:
    """An action that the protocol requests, with its round."""

    round_id: int


class LoadSnapshot(ProtocolAction):
    """Load the newest readable snapshot, and send a `Snapshot`."""


@dataclass(frozen=True)
class ReadManifest(ProtocolAction):
    """Read a round's manifest (with `is_poll`, after a wait), and send a `Look`."""

    is_poll: bool = False


class PutJoin(ProtocolAction):
    """Ask the others to wait for this replica from the next round on, and send None."""


class Train(ProtocolAction):
    """Make the inner steps of a round, and send this replica's `Contribution`."""


class PutDelta(ProtocolAction):
    """Upload this replica's pseudo-gradient, and send None."""


class ListRound(ProtocolAction):
    """List a round's contributions and join requests, and send a `Listing`."""


@dataclass(frozen=True)
class Merge(ProtocolAction):
    """Average contributions and upload the mean. Send `Merged`, or the damaged contributions."""

    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Commit(ProtocolAction):
    """Create the manifest unless it exists, and send None for any answer."""

    manifest: Manifest


@dataclass(frozen=True)
class Apply(ProtocolAction):
    """Apply a decided round to the global state, and send its new hash, or None if the delta is lost."""

    manifest: Manifest


@dataclass(frozen=True)
class Snapshot:
    """The starting point of a replica: a round, the hash of its state, and the replicas that it waits for."""

    round_id: int
    base: str
    expected: frozenset[int]


@dataclass(frozen=True)
class Look:
    """The manifest of a round, and the number of grace periods passed so far."""

    manifest: Manifest | None
    graces: int = 0


@dataclass(frozen=True)
class Listing:
    """The objects in a round's folder, and the number of grace periods passed so far."""

    contributions: tuple[Contribution, ...]
    joining: frozenset[int] = frozenset()
    graces: int = 0


Result = TypeVar("Result")
Protocol = Generator[ProtocolAction, Any, Result]


def read_listing(keys: Iterable[str], graces: int) -> Listing:
    """Return the contributions and join requests from the keys of a round's folder."""
    named = [(key, Contribution.from_key(key)) for key in keys]
    joining = {int(key.rpartition("/")[2][:4]) for key, _ in named if key.endswith(".join")}
    return Listing(tuple(c for _, c in named if c is not None), frozenset(joining), graces)


def turn_of(rank: int, round_id: int, expected: Iterable[int]) -> int:
    """Return the number of grace periods before a rank may reduce, which is 0 for the first choice."""
    order = sorted(expected)
    if rank not in order:
        return len(order)
    return (order.index(rank) - round_id) % len(order)


def decide_round(
    round_id: int, own: Contribution, expected: frozenset[int], quorum: int
) -> Protocol[Manifest]:
    """Take part in one round until it is decided.

    Args:
        round_id: The round.
        own: This replica's contribution.
        expected: Ranks to wait for, according to the last manifest.
        quorum: Fewest contributions that a round may be decided with.

    Returns:
        The decision of any replica.
    """
    turn = turn_of(own.rank, round_id, expected)
    upload_at = 0
    look: Look = yield ReadManifest(round_id)
    while look.manifest is None:
        # The delta comes first, and from the reducer too: should the merged object be damaged
        # later, or its writer die, anybody can make it again from the deltas that it names.
        if look.graces >= upload_at:
            yield PutDelta(round_id)
            # Once more after long waits, ever rarer: the first one may have arrived torn.
            upload_at = max(REUPLOAD_GRACES, 2 * upload_at)
        if look.graces >= turn:
            proposed = yield from _merge_round(round_id, own, expected, quorum, turn)
            while proposed is not None:
                # The manifest comes last: what it names is in the store already. Whether this
                # write or another replica's won is known only by reading, for an answer can be
                # lost, and a write that was not seen to arrive may still arrive later.
                yield Commit(round_id, proposed)
                look = yield ReadManifest(round_id)
                if look.manifest is not None:
                    return look.manifest
        look = yield ReadManifest(round_id, is_poll=True)
    return look.manifest


def _merge_round(
    round_id: int, own: Contribution, expected: frozenset[int], quorum: int, turn: int
) -> Protocol[Manifest | None]:
    """Merge if everybody is there, or enough are and grace is over; None if it is too early."""
    damaged: set[Contribution] = set()
    while True:
        listing: Listing = yield ListRound(round_id)
        # Only what started from the state that we hold can be averaged with our own delta. Of
        # twins of one rank the newest counts; sorting puts it last.
        sound = {c for c in listing.contributions if c.base == own.base} - damaged
        chosen = {c.rank: c for c in sorted(sound)} | {own.rank: own}
        is_complete = expected <= chosen.keys()
        is_overdue = listing.graces > turn
        if len(chosen) < quorum or not (is_complete or is_overdue):
            # What was damaged a moment ago may be whole at the next look.
            return None
        contributions = tuple(chosen[rank] for rank in sorted(chosen))
        outcome: Merged | tuple[Contribution, ...] = yield Merge(round_id, contributions)
        if isinstance(outcome, Merged):
            return Manifest(
                round_id=round_id,
                base=own.base,
                by=own.rank,
                incarnation=own.incarnation,
                contributions=contributions,
                merged=outcome,
                expected=tuple(sorted(chosen.keys() | listing.joining)),
                rejected=len({c for c in listing.contributions if c.base != own.base}),
            )
        damaged.update(outcome)


@dataclass
class ReplicaLife:
    """A replica's life: from the newest snapshot through the log of manifests to the last round.

    Args:
        rank: The replica's rank. Ranks needn't be consecutive.
        n_rounds: The replica ends when this many rounds are applied. None means never.
        quorum: Fewest contributions that a round may be decided with.
        prepared: A contribution of an earlier process that died before it knew the round's outcome,
            with its round.
    """

    rank: int
    n_rounds: int | None
    quorum: int
    prepared: tuple[int, Contribution] | None = None
    round_id: int = 0
    base: str = ""
    expected: frozenset[int] = frozenset()
    n_resyncs: int = 0
    _stuck_at: int = -1
    decided: Manifest | None = None

    def live(self) -> Protocol[None]:
        """Load a snapshot, then train, exchange, and apply, round by round.

        Raises:
            OuterLoopError: the contribution was trained from another state.
        """
        yield from self._load()
        is_current = False
        while self.n_rounds is None or self.round_id < self.n_rounds:
            own = self._take_prepared()
            if own is None and not is_current:
                look: Look = yield ReadManifest(self.round_id)
                if look.manifest is not None:
                    yield from self._apply(look.manifest)
                    continue
                if self.rank not in self.expected:
                    yield PutJoin(self.round_id)
            if own is None:
                own = yield Train(self.round_id)
                if own.base != self.base:
                    raise OuterLoopError(
                        f"round {self.round_id}: the contribution was trained from another state"
                    )
            decision = decide_round(self.round_id, own, self.expected, self.quorum)
            manifest = self.decided = yield from decision
            is_current = (yield from self._apply(manifest)) and manifest.names(own)

    def _take_prepared(self) -> Contribution | None:
        """Return the prepared contribution if this is its round; it counts for no later one."""
        if self.prepared is None or self.prepared[0] > self.round_id:
            return None
        (round_id, own), self.prepared = self.prepared, None
        return own if (round_id, own.base) == (self.round_id, self.base) else None

    def _apply(self, manifest: Manifest) -> Protocol[bool]:
        """Apply a decision about the state we have; False after starting from a snapshot.

        Raises:
            OuterLoopError: no snapshot fits the decided round.
        """
        base = (yield Apply(self.round_id, manifest)) if manifest.base == self.base else None
        if base is None:
            # Either we hold a state that the run does not know, or the mean is gone, with its
            # deltas: both are mended by a newer snapshot.
            self.n_resyncs = 1 if self.round_id > self._stuck_at else self.n_resyncs + 1
            self._stuck_at = max(self._stuck_at, self.round_id)
            if self.n_resyncs > MAX_RESYNCS:
                raise OuterLoopError(
                    f"rank {self.rank}: {round_prefix(self.round_id)} does not continue the state of this replica, or its merged object is missing, and no snapshot fits"
                )
            yield from self._load()
            return False
        self.expected, self.base = frozenset(manifest.expected), base
        self.round_id += 1
        return True

    def _load(self) -> Protocol[None]:
        start: Snapshot = yield LoadSnapshot(self.round_id)
        self.round_id, self.base, self.expected = start.round_id, start.base, start.expected


def adaptive_grace_s(
    lateness_s: Sequence[float], round_s: Sequence[float], *, first_s: float
) -> float:
    """Return how long to wait for stragglers once enough replicas have answered, in seconds.

    It is half a typical round, or the typical lateness plus six median deviations if that is more.
    Without a history, it is `first_s`. So nobody must guess a constant for a slow network.

    Args:
        lateness_s: For recent rounds, the time from this replica's answer to the last one.
        round_s: For recent rounds, the time from start to decision.
        first_s: Grace period of the first round, when machines are still booting.
    """
    if not round_s:
        return first_s
    usual = median(lateness_s) if lateness_s else 0.0
    spread = median(abs(value - usual) for value in lateness_s) if lateness_s else 0.0
    return max(0.5 * median(round_s), usual + 6.0 * spread)
