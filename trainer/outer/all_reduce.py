"""An all-reduce among processes that share nothing but an object store."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import OuterLoopError, TrainerConfigError
from trainer.outer.exchange import (
    ErrorFeedback,
    Patience,
    RoundDriver,
    RoundReport,
    check_condition,
)
from trainer.outer.object_store import MemoryStore, ObjectStore
from trainer.outer.parameters import fill_from, flat_vector
from trainer.outer.protocol import Manifest, PutJoin, decide_round, manifest_key
from trainer.outer.stores import open_store

Vector = NDArray[np.float32]
Tensors = TypeVar("Tensors", Tensor, Sequence[Tensor], Mapping[str, Tensor])

OPEN_BASE = "open"
"""The base of contributions to a plain all-reduce, which has no common state."""


class ObjectStoreAllReduce(RoundDriver):
    """An in-place average of tensors over replicas, through an object store.

    Each call is one round. A replica that is late for a round still gets its mean, with the same
    bits as the others, but its own contribution is dropped.

    Args:
        uri: The store, which all replicas share. See `open_store`.
        rank: This replica, from 0.
        world_size: Number of replicas. With 1, nothing is stored and values don't change.
        round_id: The first round. None starts at 0. A restarted process passes its last round.
        timeout_s: Longest time that a round may stay undecided, in seconds.
        codec: Wire format. The error of a lossy one is added to the next call.
        quorum: Fewest contributions per round. None waits for all replicas.
        first_grace_s: Seconds that the first round waits for stragglers after it has a quorum.
        options: Options of the fsspec file system.
        store: An open store, instead of the one at `uri`.

    Raises:
        TrainerConfigError: The rank is out of range, or the store can't decide a race.
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        codec: str = "fp32",
        quorum: int | None = None,
        first_grace_s: float = 120.0,
        options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise TrainerConfigError(f"rank {rank} is not in 0..{world_size - 1}")
        if store is None:
            store = open_store(uri, options=options) if world_size > 1 else MemoryStore()
        super().__init__(store, codec, Patience(timeout_s, first_grace_s), rank=rank, n=0)
        self.world_size = world_size
        self.round_id = round_id or 0
        self.last: RoundReport | None = None
        self.expected = frozenset(range(world_size))
        self._quorum = world_size if quorum is None else quorum
        self._feedback: dict[int, ErrorFeedback] = {}
        self.patience.begin_round()

    def __call__(self, tensors: Tensors) -> Tensors:
        """Average a tensor, a sequence or a mapping of tensors in place, and return it."""
        items = _listed(tensors)
        if self.world_size > 1:
            fill_from(self.reduce_vector(flat_vector(items)), items)
        return tensors

    def reduce_vector(self, vector: Vector, *, weight: int = 1, channel: int = 0) -> Vector:
        """Average one flat vector. When this returns, the round is over.

        Args:
            vector: This replica's values.
            weight: Their weight in the mean.
            channel: Index among several vectors that take turns. Each has its own error feedback.

        Raises:
            OuterTimeoutError: Too few replicas contributed in time.
            OuterLoopError: A value is not finite.
            TrainerConfigError: The store ignores the condition of a conditional write.
        """
        self.feedback = self._feedback_of(channel, vector.size)
        own = self.contribute(vector, round_id=self.round_id, base=OPEN_BASE, weight=weight)
        manifest = self.drive(decide_round(self.round_id, own, self.expected, self._quorum))
        if not isinstance(manifest, Manifest):
            raise OuterLoopError(f"round {self.round_id} ended with {manifest}")
        if self.last is None:
            key, data = manifest_key(manifest.round_id), manifest.to_bytes()
            self.retried(lambda: check_condition(self.store, key, data))
        self.retried(lambda: self.settle(manifest))
        mean = self._mean_of(manifest, vector.size)
        self.last = self.report(manifest, own, manifest.merged.sha)
        self._finish(manifest)
        return mean

    def decided(self, n: int) -> Vector | None:
        """Return the mean of the present round if it is already decided, and advance.

        In this way a joining replica replays the rounds that it missed, without contributing.

        Args:
            n: Number of values of the round.
        """
        manifest = self.retried(lambda: self.read_manifest(self.round_id))
        if manifest is None:
            return None
        mean = self._mean_of(manifest, n)
        self._finish(manifest)
        return mean

    def resume(self, round_id: int, expected: Iterable[int]) -> None:
        """Continue from the round of a snapshot."""
        self.round_id = round_id
        self.expected = frozenset(expected)

    def ask_to_join(self) -> None:
        """Ask the others to wait for this replica from the next round on."""
        self.retried(lambda: self.perform(PutJoin(self.round_id)))

    def _feedback_of(self, channel: int, n: int) -> ErrorFeedback:
        known = self._feedback.get(channel)
        if known is None or known.residual.size != n:
            known = self._feedback[channel] = ErrorFeedback(self.codec, np.zeros(n, np.float32))
        return known

    def _finish(self, manifest: Manifest) -> None:
        self.expected = frozenset(manifest.expected)
        self.round_id += 1
        self.patience.begin_round()

    def _mean_of(self, manifest: Manifest, n: int) -> Vector:
        mean = self.retried(lambda: self.read_merged(manifest, n=n))
        if mean is None:
            raise OuterLoopError(
                f"the mean of round {manifest.round_id} was already deleted: join from a snapshot"
            )
        return mean


def _listed(tensors: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Mapping):
        return [tensors[name] for name in sorted(tensors)]
    return list(tensors)
