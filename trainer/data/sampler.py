"""Which pairs an optimizer step sees: a pure function of the step, so resuming needs no state."""

import random
from collections.abc import Hashable, Sequence

from trainer.errors import DatasetError


class PairSampler:
    """Walks through all pairs in epochs of random order, `batch_size` a step.

    Pairs of one group (a session) stay together, up to as many as a step has: their prompts share a
    prefix, and no session is all that a run sees for many steps. Every process of a run builds the
    same sampler and takes its own part of each step.
    """

    def __init__(
        self,
        n_pairs: int,
        *,
        batch_size: int,
        seed: int = 0,
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        """Set up.

        Raises:
            DatasetError: no pairs, or not one group per pair.
        """
        if n_pairs < 1:
            raise DatasetError("there is no pair to sample: turn channel 3 off (beta_replay=0)")
        if groups is not None and len(groups) != n_pairs:
            raise DatasetError(f"{len(groups)} groups for {n_pairs} pairs")
        self.n_pairs, self.batch_size, self.seed = n_pairs, batch_size, seed
        members_of: dict[Hashable, list[int]] = {}
        for index in range(n_pairs):
            key = index if groups is None else groups[index]
            members_of.setdefault(key, []).append(index)
        self._blocks = [
            members[start : start + batch_size]
            for members in members_of.values()
            for start in range(0, len(members), batch_size)
        ]
        self._orders: dict[int, list[int]] = {}

    def step(self, index: int) -> list[int]:
        """Return indices of the pairs of optimizer step `index`, counted from 0."""
        start = index * self.batch_size
        return [
            self._order(position // self.n_pairs)[position % self.n_pairs]
            for position in range(start, start + self.batch_size)
        ]

    def part(self, index: int, *, part: int, n_parts: int) -> list[int]:
        """Return the share of one process and micro-batch of step `index`; may be empty."""
        drawn = self.step(index)
        return drawn[len(drawn) * part // n_parts : len(drawn) * (part + 1) // n_parts]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            rng = random.Random(f"{self.seed}:{epoch}")
            blocks = self._blocks.copy()
            rng.shuffle(blocks)
            order = [index for block in blocks for index in block]
            self._orders = {epoch: order} | {
                e: o for e, o in self._orders.items() if e == epoch - 1
            }
        return self._orders[epoch]
