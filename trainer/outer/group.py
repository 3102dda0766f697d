"""A replica of several processes, in which the first one exchanges for all.

The ranks of a replica (DDP or FSDP2 under accelerate) hold the same parameters, or shards of them.
All ranks read them together, rank 0 exchanges over the store, and the result goes to all.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.outer.exchange import RoundReport
from trainer.outer.fragments import FragmentedReplica
from trainer.outer.replica import OuterReplica

AnyReplica = OuterReplica | FragmentedReplica
Result = TypeVar("Result")


class ReplicaGroup:
    """The replica of rank 0, accessible from every rank of its group.

    All ranks must call every method in the same order.
    """

    theta: NDArray[np.float32]
    """The state of the run."""
    n_trained: int
    """Number of rounds that this replica needn't train any more."""
    is_finished: bool

    def __init__(self, make: Callable[[], AnyReplica]) -> None:
        """Make the replica on rank 0, and join the run.

        Raises:
            TrainerError: rank 0 failed. All ranks raise its error.
        """
        self._replica: AnyReplica | None = None

        def join() -> None:
            self._replica = make()
            self._replica.join()

        self._do(join)

    def exchange(
        self,
        local: NDArray[np.float32],
        *,
        weight: int,
        inner_state: Callable[[], dict[str, NDArray]],
    ) -> RoundReport:
        """Contribute to a round, and apply its result.

        Args:
            local: the present parameters.
            weight: weight in the mean.
            inner_state: reads the replica's private state. Rank 0 calls it when all ranks are here.

        Raises:
            TrainerError: rank 0 failed. All ranks raise its error.
        """

        def exchange() -> RoundReport:
            assert self._replica is not None
            return self._replica.exchange(local, weight=weight, inner_state=inner_state())

        if is_group():
            dist.barrier()
        return self._do(exchange)

    def on_first(self, work: Callable[[AnyReplica], Result]) -> Result:
        """Let rank 0 use the replica, and return its result on all ranks."""

        def of_first() -> Result:
            assert self._replica is not None
            return work(self._replica)

        return from_first(of_first)

    def _do(self, work: Callable[[], Result]) -> Result:
        """Let rank 0 work, and bring everybody to where its replica is then."""

        def seen() -> tuple[Result, dict[str, Any]]:
            result = work()
            assert self._replica is not None
            names = ("theta", "n_trained", "is_finished")
            return result, {name: getattr(self._replica, name) for name in names}

        result, state = from_first(seen)
        vars(self).update(state)
        return result


def is_group() -> bool:
    """Return whether this process is one of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def from_first(work: Callable[[], Result]) -> Result:
    """Let rank 0 work, and return its result or raise its error on all ranks."""
    if not is_group():
        return work()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = work()
        except Exception as error:
            told[1] = error
            dist.broadcast_object_list(told, src=0)
            raise
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    return told[0]
