"""The words and the rules of a run's log, without a store and without a clock.

A round is one object, `rounds/<r>/manifest.json`, that is created only once. It names the
contributions, the hash of their merged pseudo-gradient, and the state that it applies to. The
replica that creates it decides the round, and the others read it.

There is one protocol for two kinds of rounds. A contribution counts for the round in which it was
made and for `max_age` rounds after it, and a round is decided when a quorum is there and either all
expected replicas are, or the grace period is over. In synchronous rounds, `max_age` is 0 and the
manifest names the replicas that the next round waits for. In asynchronous rounds, one contribution
is enough, nobody is waited for, and older contributions count less.

In each synchronous round one replica, the reducer, downloads all deltas, uploads their mean, and
commits. The role rotates over the last contributors, so the traffic of a round grows linearly with
the number of replicas. If the reducer doesn't act, the next replica takes over.

Source: Xie et al. 2019, arXiv:1903.03934 (weights that fall as a power of the age, from a hinge on).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainer.diloco.codecs import sha256
from trainer.errors import OuterLoopError, TrainerConfigError

DELTAS, MERGED, SNAPSHOTS = "deltas/", "merged/", "snapshots/"
AGE_POWER = 0.5
MAX_AGE = 4
"""Asynchronous deltas that are older than this many rounds of all replicas are dropped."""


def manifest_key(round_id: int) -> str:
    """Return the key whose creation decides a round."""
    return f"rounds/{round_id:06d}/manifest.json"


def copy_key(round_id: int) -> str:
    """Return the key of a decision's copy, which is written after it."""
    return f"decided/{round_id:06d}.json"


def delta_prefix(round_id: int) -> str:
    """Return the folder of the contributions and join requests that were made in a round."""
    return f"{DELTAS}{round_id:06d}/"


def merged_key(round_id: int, sha: str) -> str:
    """Return the key of a merged pseudo-gradient."""
    return f"{MERGED}{round_id:06d}/{sha}.safetensors"


def snapshot_key(round_id: int, base: str) -> str:
    """Return the key of the global state at the start of a round."""
    return f"{SNAPSHOTS}{round_id:06d}.{base}.safetensors"


def join_key(round_id: int, rank: int, incarnation: str) -> str:
    """Return the key by which a replica asks the others to wait for it in the next round."""
    return f"{delta_prefix(round_id)}{rank:04d}.{incarnation}.join"


@dataclass(frozen=True, order=True)
class Contribution:
    """One replica's pseudo-gradient, as its key describes it.

    `incarnation` begins with the number that the process has claimed, so that the later of two
    processes of one rank sorts last. `round_id` is the round in which it was made, `base` the hash
    of the state it started from, `sha` the hash of its bytes, and `weight` its weight in the mean
    (usually tokens).
    """

    rank: int
    incarnation: str
    round_id: int
    base: str
    weight: int
    sha: str

    @property
    def key(self) -> str:
        """Return the key of the bytes."""
        return (
            f"{delta_prefix(self.round_id)}{self.rank:04d}.{self.incarnation}.{self.base}."
            f"{self.weight}.{self.sha}.safetensors"
        )

    @classmethod
    def from_key(cls, key: str) -> "Contribution | None":
        """Parse a key, or return None if it is of another kind."""
        folder, _, name = key.rpartition("/")
        parts = name.split(".")
        if len(parts) != 6 or not (parts[0].isdecimal() and parts[3].isdecimal()):
            return None
        rank, incarnation, base, weight, sha, _ = parts
        made_in = int(folder.rpartition("/")[2])
        return cls(int(rank), incarnation, made_in, base, int(weight), sha)


class _Sealed(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The decision about one round. Immutable once its key exists.

    `by` and `incarnation` tell who decided it, `merged` is the hash of the merged pseudo-gradient,
    `expected` are the ranks that the next round waits for, and `n_full` is the number of
    contributions of age 0 that make up a whole mean.
    """

    round_id: int
    base: str
    by: int
    incarnation: str
    contributions: tuple[Contribution, ...]
    merged: str
    expected: tuple[int, ...]
    n_full: int

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
    def shares(self) -> list[float]:
        """Return the share of each contribution in the mean."""
        return shares_of(self.contributions, self.round_id, self.n_full)

    @property
    def whole_weight(self) -> float:
        """Return the weight that a contribution of the whole mean would have."""
        return whole_weight_of(self.contributions, self.n_full)

    @property
    def accountable(self) -> int:
        """Return the index of the contribution whose sender corrects the merged delta's error."""
        return self.round_id % len(self.contributions)


def whole_weight_of(contributions: Sequence[Contribution], n_full: int) -> float:
    """Return the weight of `n_full` contributions that are like these."""
    return n_full * sum(c.weight for c in contributions) / len(contributions)


def shares_of(contributions: Sequence[Contribution], round_id: int, n_full: int) -> list[float]:
    """Return the share of each contribution in a round's mean.

    With N = `n_full` replicas, a contribution of age a counts
    tokens · (1 + max(0, a − N + 1) / N)^−½. So it counts in full up to the age that replicas of
    equal speed have: while one trains, each of the others commits once. N contributions of age 0
    together give the weighted mean, and one alone moves the state by 1/N of itself.
    """
    total = whole_weight_of(contributions, n_full)
    late = [max(0, round_id - c.round_id - n_full + 1) / n_full for c in contributions]
    return [
        c.weight * (1 + delay) ** -AGE_POWER / total
        for c, delay in zip(contributions, late, strict=True)
    ]


def turn_of(rank: int, round_id: int, expected: Iterable[int]) -> int:
    """Return the number of grace periods before a rank may reduce, which is 0 for the first choice."""
    order = sorted(expected)
    if rank not in order:
        return len(order)
    return (order.index(rank) - round_id) % len(order)


def chosen_of(
    found: Iterable[Contribution],
    own: Contribution,
    *,
    expected: frozenset[int],
    quorum: int,
    is_overdue: bool,
) -> tuple[Contribution, ...]:
    """Return the contributions to decide a round with, by rank; none if it is too early.

    Of twins of one rank the newest counts.
    """
    chosen = {c.rank: c for c in sorted(found)} | {own.rank: own}
    if len(chosen) < quorum or not (expected <= chosen.keys() or is_overdue):
        return ()
    return tuple(chosen[rank] for rank in sorted(chosen))


def adaptive_grace_s(
    lateness_s: Sequence[float], round_s: Sequence[float], *, first_s: float
) -> float:
    """Return how long to wait for stragglers once enough replicas have answered, in seconds.

    It is half a typical round, or the typical lateness plus six median deviations if that is more.
    Without a history, it is `first_s`. So nobody must guess a constant for a slow network.
    `lateness_s` are the times from this replica's answer to the last one, `round_s` those from a
    round's start to its decision.
    """
    if not round_s:
        return first_s
    usual = median(lateness_s) if lateness_s else 0.0
    spread = median(abs(value - usual) for value in lateness_s) if lateness_s else 0.0
    return max(0.5 * median(round_s), usual + 6.0 * spread)


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer: one step per round on the mean pseudo-gradient θ_initial − θ_local.

    It is gradient descent with (Nesterov) momentum, as in `torch.optim.SGD`, of separate float32
    multiplications and additions in a fixed order, so that every replica gets the same bits on any
    processor.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1, line 14. The default momentum
    is lower than the paper's 0.9, which needs hundreds of rounds to pay off.
    """

    lr: float = 0.8
    momentum: float = 0.5
    nesterov: bool = True

    def apply(
        self,
        theta: NDArray[np.float32],
        velocity: NDArray[np.float32],
        pseudo_gradient: NDArray[np.float32],
    ) -> None:
        """Update the parameters and their velocity in place."""
        step = pseudo_gradient
        if self.momentum:
            velocity *= np.float32(self.momentum)
            velocity += pseudo_gradient
            step = velocity
            if self.nesterov:
                step = velocity * np.float32(self.momentum)
                step += pseudo_gradient
        theta -= step * np.float32(self.lr)


OUTER_PRESETS = {
    "nesterov": OuterStep(0.8, 0.5),
    "average": OuterStep(1.0, 0.0),
    "diloco": OuterStep(0.7, 0.9),
}
"""The presets: `nesterov` for training from scratch, `average` for fine-tuning, `diloco` as in the
paper (many rounds)."""


def outer_preset(name: str) -> OuterStep:
    """Return the outer optimizer of a preset.

    Raises:
        TrainerConfigError: The preset is unknown.
    """
    if name not in OUTER_PRESETS:
        raise TrainerConfigError(f"outer preset {name!r}: choose one of {', '.join(OUTER_PRESETS)}")
    return OUTER_PRESETS[name]
