"""An all-reduce among processes that share nothing but an object store."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from trainer.diloco.exchange import ErrorFeedback, Patience, RoundLog, Vector, check_condition
from trainer.diloco.object_store import MemoryStore, ObjectStore, open_store
from trainer.diloco.parameters import fill_from, flat_vector
from trainer.diloco.protocol import Manifest, manifest_key
from trainer.errors import OuterLoopError, TrainerConfigError

Tensors = TypeVar("Tensors", Tensor, Sequence[Tensor], Mapping[str, Tensor])

OPEN_BASE = "open"
"""The base of contributions to a plain all-reduce, which has no common state."""


class ObjectStoreAllReduce(RoundLog):
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
        store: ObjectStore | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise TrainerConfigError(f"rank {rank} is not in 0..{world_size - 1}")
        if store is None:
            store = open_store(uri) if world_size > 1 else MemoryStore()
        super().__init__(
            store,
            codec,
            Patience(timeout_s, first_grace_s),
            rank=rank,
            n=0,
            quorum=quorum or world_size,
        )
        self.world_size = world_size
        self.round_id, self.base = round_id or 0, OPEN_BASE
        self.expected = frozenset(range(world_size))
        self.n_contributions = int(world_size == 1)
        self._mean_now = np.zeros(0, np.float32)
        self._is_checked = False
        self.patience.begin_round()

    def __call__(self, tensors: Tensors) -> Tensors:
        """Average a tensor, a sequence or a mapping of tensors in place, and return it."""
        items = _listed(tensors)
        if self.world_size > 1:
            fill_from(self.reduce_vector(flat_vector(items)), items)
        return tensors

    def reduce_vector(self, vector: Vector, *, weight: int = 1) -> Vector:
        """Average one flat vector. When this returns, the round is over.

        Raises:
            OuterTimeoutError: Too few replicas contributed in time.
            OuterLoopError: A value is not finite.
            TrainerConfigError: The store ignores the condition of a conditional write.
        """
        self._expect(vector.size)
        self.contribute(vector, weight=weight)
        self.decide()
        self.patience.begin_round()
        return self._mean_now

    def decided(self, n: int) -> Vector | None:
        """Return the mean of the present round if it is already decided, and advance.

        In this way a joining replica replays the rounds that it missed, without contributing.
        """
        self._expect(n)
        return None if self.advance(is_thorough=True) is None else self._mean_now

    def _expect(self, n: int) -> None:
        if self.feedback.residual.size != n:
            self.feedback = ErrorFeedback(self.codec, np.zeros(n, np.float32))

    def _apply(self, manifest: Manifest) -> str:
        """Take the mean of a decided round.

        Raises:
            OuterLoopError: The mean was already deleted.
        """
        if not self._is_checked:
            check_condition(self.store, manifest_key(manifest.round_id), manifest.to_bytes())
            self._is_checked = True
        mean = self.read_merged(manifest, n=self.feedback.residual.size)
        if mean is None:
            raise OuterLoopError(
                f"the mean of round {manifest.round_id} was already deleted: join from a snapshot"
            )
        self.settle(manifest)
        self._mean_now = mean
        self.n_contributions = len(manifest.contributions)
        return OPEN_BASE


def _listed(tensors: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Mapping):
        return [tensors[name] for name in sorted(tensors)]
    return list(tensors)
