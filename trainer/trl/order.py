"""The order of rollouts, in which groups run with pairs of the same session, in every epoch."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from trainer.data.sampler import PairSampler, RolloutOrder
from trainer.trl.config import ComposerConfig

__all__ = ["AlignedSampler", "aligned", "at_epoch"]


class AlignedSampler(RepeatSampler):
    """A sampler that repeats rows as TRL's does, but in our own order."""

    epoch = 0

    def __init__(
        self,
        sampler: RepeatSampler,
        order: RolloutOrder,
        sessions: Callable[[int, int, int], Sequence[str]],
    ) -> None:
        """Take the place of `sampler`; `sessions` of the pairs by epoch, batch, and their number."""
        super().__init__(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            shuffle=False,
        )
        self.order, self.sessions = order, sessions

    def __iter__(self) -> Generator[int, None, None]:
        """Go through the rows of the epoch."""
        n_batches = self.order.n_batches
        rows = self.order.epoch(
            self.epoch, lambda batch: self.sessions(self.epoch, batch, n_batches)
        )
        yield from (rows[place] for place in super().__iter__())


def aligned(
    sampler: Any,
    sessions: Sequence[str | None],
    pairs: Sequence[Mapping[str, Any]],
    drawn: PairSampler,
    args: ComposerConfig,
) -> Any:
    """Replace TRL's shuffling sampler by one that follows the sessions of the pairs. Other samplers stay.

    Args:
        sampler: TRL's own sampler.
        sessions: session of every row of rollouts.
        pairs: the rows of channel 3.
        drawn: sampler of the pairs of a step.
        args: arguments of the run.
    """
    if not (isinstance(sampler, RepeatSampler) and sampler.shuffle and sessions):
        return sampler
    order = RolloutOrder(
        sessions, batch_size=sampler.batch_size, within=args.align_within, seed=args.seed
    )

    def sessions_of_pairs(epoch: int, batch: int, n_batches: int) -> list[str]:
        """Return the sessions of the pairs that are trained on while a batch of rollouts is."""
        n_micro = args.gradient_accumulation_steps
        n_of_batch = (args.steps_per_generation or 1) * args.num_iterations
        first = epoch * max(-(-n_batches * n_of_batch // n_micro), 1)
        begin, end = batch * n_of_batch // n_micro, -(-(batch + 1) * n_of_batch // n_micro)
        steps = range(first + begin, first + end)
        rows = [pairs[i] for step in steps for i in drawn.step(step)]
        return [str(row["session_id"]) for row in rows if row.get("session_id")]

    return AlignedSampler(sampler, order, sessions_of_pairs)


def at_epoch(sampler: Any, epoch: int, *, seed: int) -> None:
    """Set a sampler to the order of an epoch.

    TRL's sampler draws the orders of all epochs from one generator. A run that resumes in a later
    epoch must skip the earlier orders, or it would repeat the first one.
    """
    if isinstance(sampler, AlignedSampler):
        sampler.epoch = epoch
    elif isinstance(sampler, RepeatSampler) and sampler.shuffle:
        sampler.generator.manual_seed(seed)
        for _ in range(epoch):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
