"""The round protocol of one replica, without I/O and without a clock.

A round is one object, `rounds/<r>/manifest.json`, that is created once and never again. It names
who contributed, the hash of the merged pseudo-gradient, the state it applies to and who is
waited for next. Whoever creates it decides the round; everybody else reads it.

One replica of each round, the reducer, merges: the others upload their delta, the reducer
downloads them, uploads the merged one and commits. The role rotates over those who contributed
last, so a replica uploads one delta's worth per round and the traffic of a round grows linearly
with the number of replicas. If the reducer stays away, the next in turn takes over.

`RoundMachine` decides one round, `ReplicaMachine` a replica's life: join, train, exchange, apply.
Both are asked for their `action`; the caller performs it and reports with `on`. A caller whose
request failed reports nothing and performs the action again: every action may be repeated.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from statistics import median

from trainer.errors import OuterLoopError

__all__ = [
    "Action",
    "Apply",
    "Commit",
    "Contribution",
    "Finish",
    "List",
    "LoadSnapshot",
    "Manifest",
    "Merge",
    "Merged",
    "PutDelta",
    "PutJoin",
    "ReadManifest",
    "ReplicaMachine",
    "RoundMachine",
    "Train",
    "adaptive_grace_s",
    "delta_prefix",
    "manifest_key",
    "merged_key",
    "snapshot_key",
]

REUPLOAD_GRACES = 4
"""After this many graces without a decision a contribution is uploaded again, then ever rarer."""


def round_prefix(round_id: int) -> str:
    """Return the folder of a round."""
    return f"rounds/{round_id:06d}/"


def manifest_key(round_id: int) -> str:
    """Return the key whose creation decides a round."""
    return f"{round_prefix(round_id)}manifest.json"


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
    """One replica's pseudo-gradient of one round, as its key tells it.

    `incarnation` starts with the number of the process's attempt, so that of two twins of one
    rank the later sorts last. `base` is the hash of the state it started from, `sha` that of its
    bytes, `weight` what it counts in the mean (usually tokens).
    """

    rank: int
    incarnation: str
    base: str
    weight: int
    sha: str

    def key(self, round_id: int) -> str:
        """Return the key under which the bytes are."""
        return (
            f"{delta_prefix(round_id)}{self.rank:04d}.{self.incarnation}.{self.base}."
            f"{self.weight}.{self.sha}.safetensors"
        )

    @classmethod
    def from_key(cls, key: str) -> "Contribution | None":
        """Read a key back; None if it is another kind of key."""
        parts = key.rpartition("/")[2].split(".")
        if len(parts) != 6 or not (parts[0].isdecimal() and parts[3].isdecimal()):
            return None
        return cls(int(parts[0]), parts[1], parts[2], int(parts[3]), parts[4])


def join_key(round_id: int, rank: int, incarnation: str) -> str:
    """Return the key by which a replica asks to be waited for in the next round."""
    return f"{delta_prefix(round_id)}{rank:04d}.{incarnation}.join"


@dataclass(frozen=True)
class Merged:
    """The merged pseudo-gradient: where its bytes are by hash, and how many."""

    sha: str
    size_bytes: int


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
        """Return the manifest as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read a manifest.

        Raises:
            OuterLoopError: The bytes are no manifest.
        """
        try:
            row = json.loads(data)
            row["contributions"] = tuple(Contribution(**c) for c in row["contributions"])
            row["merged"] = Merged(**row["merged"])
            row["expected"] = tuple(row["expected"])
            return cls(**row)
        except (ValueError, TypeError, KeyError) as error:
            raise OuterLoopError(f"not a manifest: {data[:80]!r}: {error}") from error

    def names(self, contribution: Contribution | None) -> bool:
        """Tell whether this contribution is part of the round."""
        return contribution in self.contributions


@dataclass(frozen=True)
class LoadSnapshot:
    """Find the newest readable snapshot; report `on_snapshot`."""


@dataclass(frozen=True)
class ReadManifest:
    """Read a round's manifest; report `on_manifest`, with how many graces have passed."""

    round_id: int
    is_poll: bool = False


@dataclass(frozen=True)
class PutJoin:
    """Ask to be waited for; report `on_join_put`."""

    round_id: int


@dataclass(frozen=True)
class Train:
    """Make the inner steps of a round; report `on_trained`."""

    round_id: int


@dataclass(frozen=True)
class PutDelta:
    """Upload the own pseudo-gradient; report `on_delta_put`."""

    round_id: int


@dataclass(frozen=True)
class List:
    """List a round's contributions and join requests; report `on_listed`."""

    round_id: int


@dataclass(frozen=True)
class Merge:
    """Download, check, average and upload; report `on_merged` or `on_damaged`."""

    round_id: int
    contributions: tuple[Contribution, ...]


@dataclass(frozen=True)
class Commit:
    """Create the manifest unless it exists; report `on_committed` whatever the answer was."""

    manifest: Manifest


@dataclass(frozen=True)
class Apply:
    """Apply a decided round to the global state; report `on_applied` with the new hash."""

    manifest: Manifest


@dataclass(frozen=True)
class Finish:
    """Nothing is left to do."""


Action = (
    LoadSnapshot
    | ReadManifest
    | PutJoin
    | Train
    | PutDelta
    | List
    | Merge
    | Commit
    | Apply
    | Finish
)


def rotation(round_id: int, expected: Iterable[int]) -> list[int]:
    """Return who may reduce a round, first choice first."""
    ranks = sorted(expected)
    if not ranks:
        return []
    turn = round_id % len(ranks)
    return ranks[turn:] + ranks[:turn]


@dataclass
class RoundMachine:
    """One replica's part in one round; over once `decided` is set.

    Args:
        round_id: The round.
        own: The replica's own contribution.
        expected: Ranks that are waited for, as the last manifest has it.
        quorum: Fewest contributions that a round may be decided with.
        always_upload: Upload also as first choice for reducing: costs one upload more, saves the
            own work if this process dies before it commits.
    """

    round_id: int
    own: Contribution
    expected: frozenset[int]
    quorum: int
    always_upload: bool = False
    decided: Manifest | None = None
    action: Action = field(init=False)
    _damaged: set[Contribution] = field(default_factory=set)
    _joining: frozenset[int] = frozenset()
    _rejected: int = 0
    _uploaded: bool = False
    _reupload_at: int = REUPLOAD_GRACES
    _proposed: Manifest | None = None

    def __post_init__(self) -> None:
        self.action = ReadManifest(self.round_id)

    @property
    def turn(self) -> int:
        """How many graces must pass before this replica may reduce; 0 is the first choice."""
        order = rotation(self.round_id, self.expected)
        return order.index(self.own.rank) if self.own.rank in order else len(order)

    def on_manifest(self, manifest: Manifest | None, *, graces: int = 0) -> None:
        """Take what was read: a decision ends the round, none means wait or reduce."""
        if manifest is not None:
            self.decided = manifest
        elif self._proposed is not None:
            self.action = Commit(self._proposed)
        elif self._must_upload(graces):
            self.action = PutDelta(self.round_id)
        elif graces >= self.turn:
            self.action = List(self.round_id)
        else:
            self.action = ReadManifest(self.round_id, is_poll=True)

    def on_delta_put(self) -> None:
        """The own delta is in the store."""
        self._uploaded = True
        self._next_look()

    def on_listed(
        self, found: Iterable[Contribution], *, joining: Iterable[int] = (), graces: int = 0
    ) -> None:
        """Take a listing: reduce if everybody is there, or enough are and grace is over."""
        chosen = self._one_per_rank(found)
        self._joining = frozenset(joining)
        is_complete = self.expected <= chosen.keys()
        is_overdue = graces > self.turn
        if len(chosen) >= self.quorum and (is_complete or is_overdue):
            self.action = Merge(self.round_id, tuple(chosen[rank] for rank in sorted(chosen)))
        else:
            # What was damaged a moment ago may be whole at the next look.
            self._damaged.clear()
            self.action = ReadManifest(self.round_id, is_poll=True)

    def on_damaged(self, contributions: Iterable[Contribution]) -> None:
        """Some contributions are not what their names say; leave them out of this round."""
        self._damaged.update(contributions)
        self.action = List(self.round_id)

    def on_merged(self, merged: Merged) -> None:
        """The merged delta is in the store: commit to it."""
        merge = self.action
        if not isinstance(merge, Merge):
            raise OuterLoopError(f"round {self.round_id}: merged while at {merge}")
        ranks = {contribution.rank for contribution in merge.contributions}
        self._proposed = Manifest(
            round_id=self.round_id,
            base=self.own.base,
            by=self.own.rank,
            incarnation=self.own.incarnation,
            contributions=merge.contributions,
            merged=merged,
            expected=tuple(sorted(ranks | self._joining)),
            rejected=self._rejected,
        )
        self.action = Commit(self._proposed)

    def on_committed(self) -> None:
        """The commit was sent; only reading the manifest tells who won."""
        self.action = ReadManifest(self.round_id)

    def _must_upload(self, graces: int) -> bool:
        """Upload once, and again after long waits: the first one may have arrived torn."""
        if self.turn == 0 and not self.always_upload:
            return False
        if not self._uploaded:
            return True
        if graces < self._reupload_at:
            return False
        self._reupload_at *= 2
        return True

    def _next_look(self) -> None:
        if self.turn == 0:
            self.action = List(self.round_id)
        else:
            self.action = ReadManifest(self.round_id, is_poll=True)

    def _one_per_rank(self, found: Iterable[Contribution]) -> dict[int, Contribution]:
        """Choose the newest twin of each rank that started from the same state as we did."""
        sound = {c for c in found if c.base == self.own.base} - self._damaged
        self._rejected = len({c for c in found if c.base != self.own.base})
        chosen = {c.rank: c for c in sorted(sound)}
        chosen[self.own.rank] = self.own
        return chosen


class Phase(Enum):
    """Where a replica is in its life."""

    JOINING = "joining"
    CATCHING_UP = "catching up"
    ASKING = "asking"
    TRAINING = "training"
    EXCHANGING = "exchanging"
    APPLYING = "applying"
    FINISHED = "finished"


@dataclass
class ReplicaMachine:
    """A replica's life: from the newest snapshot through the log of manifests to the last round.

    Args:
        rank: The replica's rank; ranks need not be dense.
        incarnation: Unique to this process; see `Contribution`.
        world_size: Replicas expected in round 0.
        n_rounds: The replica finishes when this many rounds are applied; None means never.
        quorum: Fewest contributions that a round may be decided with.
        base: Hash of the initial global state.
        prepared: A contribution made by an earlier incarnation that died before it knew the
            round's outcome, with its round.
    """

    rank: int
    incarnation: str
    world_size: int
    n_rounds: int | None
    quorum: int
    base: str
    prepared: tuple[int, Contribution] | None = None
    always_upload: bool = False
    round_id: int = 0
    phase: Phase = Phase.JOINING
    action: Action = field(default_factory=LoadSnapshot)
    expected: frozenset[int] = frozenset()
    exchange: RoundMachine | None = None
    n_resyncs: int = 0
    was_included: bool = True

    def on_snapshot(self, round_id: int, base: str, expected: Iterable[int] | None = None) -> None:
        """Start from a snapshot, or from round 0 and the initial state."""
        self.round_id, self.base = round_id, base
        self.expected = frozenset(range(self.world_size) if expected is None else expected)
        self._catch_up()

    def on_manifest(self, manifest: Manifest | None, *, graces: int = 0) -> None:
        """Take what was read of the present round's manifest."""
        if self.exchange is not None:
            self.exchange.on_manifest(manifest, graces=graces)
            self._follow()
        elif manifest is not None:
            self._decide(manifest)
        elif self.rank in self.expected:
            self._train()
        else:
            self.phase, self.action = Phase.ASKING, PutJoin(self.round_id)

    def on_join_put(self) -> None:
        """The others will wait for us from the next round on."""
        self._train()

    def on_trained(self, contribution: Contribution) -> None:
        """The inner steps of the round are made."""
        if contribution.base != self.base:
            raise OuterLoopError(f"round {self.round_id}: trained from another state")
        self._exchange(contribution)

    def on_delta_put(self) -> None:
        """The own delta is in the store."""
        self._current().on_delta_put()
        self._follow()

    def on_listed(
        self, found: Iterable[Contribution], *, joining: Iterable[int] = (), graces: int = 0
    ) -> None:
        """Take a listing of the round."""
        self._current().on_listed(found, joining=joining, graces=graces)
        self._follow()

    def on_merged(self, merged: Merged) -> None:
        """The merged delta is in the store."""
        self._current().on_merged(merged)
        self._follow()

    def on_damaged(self, contributions: Iterable[Contribution]) -> None:
        """Some contributions are not what their names say."""
        self._current().on_damaged(contributions)
        self._follow()

    def on_committed(self) -> None:
        """The commit was sent."""
        self._current().on_committed()
        self._follow()

    def on_lost(self) -> None:
        """The merged delta of a decided round is gone: a newer snapshot must hold it."""
        self._rejoin()

    def on_applied(self, base: str) -> None:
        """The round is applied; `base` is the hash of the new state."""
        manifest = self.action.manifest if isinstance(self.action, Apply) else None
        if manifest is None:
            raise OuterLoopError(f"round {self.round_id}: applied while at {self.action}")
        self.expected = frozenset(manifest.expected)
        self.base = base
        self.round_id += 1
        if self.phase is Phase.APPLYING and self.was_included:
            self._next_round()
        else:
            self._catch_up()

    def _next_round(self) -> None:
        if self.n_rounds is not None and self.round_id >= self.n_rounds:
            self.phase, self.action = Phase.FINISHED, Finish()
        else:
            self._train()

    def _catch_up(self) -> None:
        if self.n_rounds is not None and self.round_id >= self.n_rounds:
            self.phase, self.action = Phase.FINISHED, Finish()
            return
        if self.prepared is not None and self.prepared[0] <= self.round_id:
            round_id, contribution = self.prepared
            self.prepared = None
            if round_id == self.round_id and contribution.base == self.base:
                self._exchange(contribution)
                return
        self.phase, self.action = Phase.CATCHING_UP, ReadManifest(self.round_id)

    def _train(self) -> None:
        self.phase, self.action = Phase.TRAINING, Train(self.round_id)

    def _exchange(self, contribution: Contribution) -> None:
        self.phase = Phase.EXCHANGING
        self.exchange = RoundMachine(
            self.round_id, contribution, self.expected, self.quorum, self.always_upload
        )
        self._follow()

    def _current(self) -> RoundMachine:
        if self.exchange is None:
            raise OuterLoopError(f"round {self.round_id}: no exchange while {self.phase.value}")
        return self.exchange

    def _follow(self) -> None:
        """Do what the round's machine says, until it has a decision."""
        exchange = self._current()
        if exchange.decided is None:
            self.action = exchange.action
            return
        self.was_included = exchange.decided.names(exchange.own)
        self.exchange = None
        self.phase = Phase.APPLYING
        self._decide(exchange.decided)

    def _decide(self, manifest: Manifest) -> None:
        """Apply a decision about the state we have; rejoin if it is about another one."""
        if manifest.base == self.base:
            self.action = Apply(manifest)
            return
        self._rejoin()

    def _rejoin(self) -> None:
        self.n_resyncs += 1
        self.phase, self.action = Phase.JOINING, LoadSnapshot()


def adaptive_grace_s(
    lateness_s: Sequence[float], round_s: Sequence[float], *, first_s: float
) -> float:
    """Return how long to wait for stragglers once enough replicas have answered, in seconds.

    Half a typical round, or the typical lateness plus six median deviations, whichever is more;
    `first_s` as long as there is no history. No constant has to be guessed for a slow network.

    Args:
        lateness_s: Of recent rounds: how long after the own answer the last one came.
        round_s: Of recent rounds: from start to decision.
        first_s: Grace of the first round, when machines are still booting.
    """
    if not round_s:
        return first_s
    usual = median(lateness_s) if lateness_s else 0.0
    spread = median(abs(value - usual) for value in lateness_s) if lateness_s else 0.0
    return max(0.5 * median(round_s), usual + 6.0 * spread)
