"""An all-reduce among processes that share nothing but an object store."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.diloco.codecs import codec_named
from trainer.diloco.exchange import ErrorFeedback, Patience, RoundReport, RoundStore, sha256
from trainer.diloco.object_store import MemoryStore, ObjectStore, open_store
from trainer.diloco.protocol import (
    Commit,
    Contribution,
    List,
    Manifest,
    Merge,
    PutDelta,
    ReadManifest,
    RoundMachine,
    manifest_key,
)
from trainer.diloco.replica import new_incarnation
from trainer.errors import ObjectStoreError, OuterLoopError, TrainerConfigError

__all__ = ["ObjectStoreAllReduce"]

logger = logging.getLogger(__name__)

Vector = NDArray[np.float32]
Result = TypeVar("Result")
Tensors = TypeVar("Tensors", Tensor, Sequence[Tensor], Mapping[str, Tensor])

OPEN_BASE = "open"
"""What contributions to a plain all-reduce start from: there is no state to agree on."""


class ObjectStoreAllReduce:
    """Averages tensors over replicas, in place, by way of an object store.

    Each call is one round. Whoever is late for a round still gets its mean, the same bits as
    everybody, and its own contribution is dropped.

    Args:
        uri: The store; all replicas name the same one. See `open_store`.
        rank: This replica, from 0.
        world_size: Number of replicas. With 1 nothing is stored and values stay as they are.
        round_id: The first round; None starts at 0. A restarted process passes where it was.
        timeout_s: How long a round may stay undecided, in seconds.
        codec: Wire format; what a lossy one keeps back rides along in the next call.
        quorum: Fewest contributions; None waits for all replicas.
        first_grace_s: How long the first round waits for stragglers once a quorum is there.
        options: Options of the fsspec file system.
        store: An open store, instead of what `uri` names.

    Raises:
        TrainerConfigError: The rank is not in the world, or the store cannot decide a race.
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
        patience: Patience | None = None,
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise TrainerConfigError(f"rank {rank} is not in 0..{world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.round_id = round_id or 0
        self.incarnation = new_incarnation()
        self.last: RoundReport | None = None
        self._codec = codec_named(codec)
        self._quorum = world_size if quorum is None else quorum
        self.expected = frozenset(range(world_size))
        self.has_reduced = False
        self._patience = patience or Patience(timeout_s, first_grace_s)
        self._feedback: dict[int, ErrorFeedback] = {}
        self._patience.begin_round()
        if store is None:
            store = open_store(uri, options=options) if world_size > 1 else MemoryStore()
        self.store = store
        self._rounds = RoundStore(store, self._codec)

    def __call__(self, tensors: Tensors) -> Tensors:
        """Average a tensor, a sequence or a mapping of tensors in place, and return it."""
        items = _listed(tensors)
        if self.world_size > 1:
            flat = [item.detach().to("cpu", torch.float32).reshape(-1) for item in items]
            mean = self.reduce_vector(torch.cat(flat).numpy())
            _spread(mean, items)
        return tensors

    def reduce_vector(self, vector: Vector, *, weight: int = 1, channel: int = 0) -> Vector:
        """Average one flat vector; the round is over when this returns.

        Args:
            vector: The own values.
            weight: What they count in the mean.
            channel: Which of several vectors that take turns; each has its own error feedback.

        Raises:
            OuterTimeoutError: Too few replicas contributed in time.
            OuterLoopError: A value is not finite.
            TrainerConfigError: The store ignores the condition of a conditional write.
        """
        traffic = self._rounds.traffic
        up, down = traffic.up_bytes, traffic.down_bytes
        feedback = self._feedback_of(channel, vector.size)
        payload = feedback.encode(vector)
        own = Contribution(self.rank, self.incarnation, OPEN_BASE, weight, sha256(payload))
        self._patience.begin_wait()
        machine = RoundMachine(self.round_id, own, self.expected, self._quorum)
        while machine.decided is None:
            self._attempt(lambda: self._perform(machine, payload, feedback))
        manifest = machine.decided
        if self.last is None:
            key, data = manifest_key(manifest.round_id), manifest.to_bytes()
            self._attempt(lambda: self._rounds.check_condition(key, data))
        reduced = manifest.by == self.rank and manifest.incarnation == self.incarnation
        feedback.settle(was_included=manifest.names(own), reduced=reduced)
        mean = self._read_merged(manifest, vector.size)
        self.last = RoundReport(
            round_id=self.round_id,
            n_contributions=len(manifest.contributions),
            was_included=manifest.names(own),
            n_missed=0,
            wait_s=self._patience.end_round(),
            up_bytes=traffic.up_bytes - up,
            down_bytes=traffic.down_bytes - down,
            base=manifest.merged.sha,
        )
        self.has_reduced = reduced
        self._finish(manifest)
        return mean

    def decided(self, n: int) -> Vector | None:
        """Return the mean of the present round if it is decided already, and move on.

        A joining replica replays what it missed this way, without contributing.

        Args:
            n: Number of values of the round.
        """
        manifest = self._attempt(lambda: self._rounds.read_manifest(self.round_id))
        if manifest is None:
            return None
        mean = self._read_merged(manifest, n)
        self._finish(manifest)
        return mean

    def resume(self, round_id: int, expected: Iterable[int]) -> None:
        """Go on from a round that a snapshot tells of."""
        self.round_id = round_id
        self.expected = frozenset(expected)

    def ask_to_join(self) -> None:
        """Ask the others to wait for this replica from the next round on."""
        self._attempt(lambda: self._rounds.put_join(self.round_id, self.rank, self.incarnation))

    def _feedback_of(self, channel: int, n: int) -> ErrorFeedback:
        known = self._feedback.get(channel)
        if known is None or known.residual.size != n:
            known = self._feedback[channel] = ErrorFeedback(self._codec, np.zeros(n, np.float32))
        return known

    def _finish(self, manifest: Manifest) -> None:
        self.expected = frozenset(manifest.expected)
        self.round_id += 1
        self._patience.begin_round()

    def _attempt(self, request: Callable[[], Result]) -> Result:
        while True:
            try:
                result = request()
            except ObjectStoreError as error:
                self._patience.retry(error)
            else:
                self._patience.succeeded()
                return result

    def _perform(self, machine: RoundMachine, payload: bytes, feedback: ErrorFeedback) -> None:
        action = machine.action
        match action:
            case ReadManifest():
                if action.is_poll:
                    self._patience.poll(f"rank {self.rank}, round {action.round_id}")
                manifest = self._rounds.read_manifest(action.round_id)
                machine.on_manifest(manifest, graces=self._patience.graces)
            case PutDelta():
                self._rounds.put_delta(action.round_id, machine.own, payload)
                machine.on_delta_put()
            case List():
                found, joining = self._rounds.list_round(action.round_id)
                machine.on_listed(found, joining=joining, graces=self._patience.graces)
            case Merge():
                self._merge(machine, action, payload, feedback)
            case Commit():
                try:
                    self._rounds.commit(action.manifest)
                except ObjectStoreError as error:
                    # The write may have come through: read before trying again.
                    self._patience.retry(error)
                machine.on_committed()
            case _:
                raise OuterLoopError(f"an all-reduce cannot perform {action}")

    def _merge(
        self, machine: RoundMachine, merge: Merge, payload: bytes, feedback: ErrorFeedback
    ) -> None:
        outcome = self._rounds.merge(
            merge.round_id,
            merge.contributions,
            (machine.own, payload),
            n=feedback.residual.size,
        )
        if outcome.damaged:
            machine.on_damaged(outcome.damaged)
            return
        total = sum(contribution.weight for contribution in merge.contributions)
        feedback.answer_for(outcome.lost, times=total / machine.own.weight)
        machine.on_merged(self._rounds.put_merged(merge.round_id, outcome.payload))

    def _read_merged(self, manifest: Manifest, n: int) -> Vector:
        mean = self._attempt(lambda: self._rounds.read_merged(manifest, n=n))
        if mean is None:
            raise OuterLoopError(
                f"the mean of round {manifest.round_id} has been cleaned away: join from a snapshot"
            )
        return mean


def _listed(tensors: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Mapping):
        return [tensors[name] for name in sorted(tensors)]
    return list(tensors)


@torch.no_grad()
def _spread(vector: Vector, tensors: Iterable[Tensor]) -> None:
    at = 0
    for tensor in tensors:
        part = torch.from_numpy(vector[at : at + tensor.numel()]).reshape(tensor.shape)
        tensor.copy_(part)
        at += tensor.numel()
