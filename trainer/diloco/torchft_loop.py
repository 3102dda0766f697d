"""torchft's DiLoCo with safety checks, and managers for it.

Some settings of `torchft.local_sgd.DiLoCo` silently give wrong results. Here each of them raises an
error, and only trained parameters are exchanged.
"""

import importlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.diloco.all_reduce import ObjectStoreAllReduce
from trainer.diloco.codecs import seal_tensors, sha256, unseal_tensors
from trainer.diloco.exchange import agree_on_run
from trainer.diloco.parameters import (
    fill_from,
    state_of_tensors,
    tensors_of_state,
    trainable_part,
)
from trainer.diloco.protocol import SNAPSHOTS, OuterStep
from trainer.errors import ObjectStoreError, OuterLoopError, TrainerConfigError

logger = logging.getLogger(__name__)

LoadState = Callable[[Any], None]
SaveState = Callable[[], Any]


class PendingWork:
    """The result of `allreduce`. Waiting on one tensor settles all tensors of the round."""

    def __init__(self, flush: Callable[[], None], callbacks: list[Callable[[Any], Any]]) -> None:
        self._flush = flush
        self._callbacks = callbacks

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torchft's call
        """Wait until the values are the mean."""
        self._flush()
        return True

    def get_future(self) -> "PendingWork":
        """Return a future with `then`."""
        return self

    def then(self, callback: Callable[[Any], Any]) -> "PendingWork":
        """Call a function when the values are the mean."""
        self._callbacks.append(callback)
        return self


class ObjectStoreManager:
    """A torchft manager over an object store, which needs no lighthouse, no ports, and no live donor.

    A round always commits. A late replica gets the mean of the others. A joining replica loads the
    newest snapshot of the registered state and replays the rounds since.
    """

    _use_async_quorum = False

    def __init__(self, all_reduce: ObjectStoreAllReduce, *, snapshot_every: int = 5) -> None:
        self.all_reduce = all_reduce
        self._snapshot_every = snapshot_every
        self._snapshot_due = False
        self._states: dict[str, tuple[LoadState, SaveState]] = {}
        self._queue: list[Tensor] = []
        self._callbacks: list[Callable[[Any], Any]] = []
        self._step = 0

    def register_state_dict_fn(
        self, key: str, load_state_dict: LoadState, state_dict: SaveState
    ) -> None:
        """Remember how to save and load a part of the global state."""
        self._states[key] = (load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Nothing reads the state from another thread."""

    def disallow_state_dict_read(self) -> None:
        """Nothing reads the state from another thread."""

    def join(self, replay: Callable[[Tensor], None], n: int) -> None:
        """Load the newest snapshot and replay the log of rounds, whose means have `n` values."""
        if not self._load_snapshot():
            self._check_start()
        while (mean := self.all_reduce.decided(n)) is not None:
            replay(torch.from_numpy(mean))
            self._step += 1

    def start_quorum(self, *_args: Any, **_options: Any) -> None:
        """Begin a round. The state is the global one now, so a due snapshot is written."""
        self._queue, self._callbacks = [], []
        if self._snapshot_due:
            self._save_snapshot()
        if self.all_reduce.rank not in self.all_reduce.expected:
            self.all_reduce.ask_to_join()

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,  # noqa: ARG002, FBT001, FBT002 - torchft's call
        **_options: Any,
    ) -> PendingWork:
        """Queue a tensor. The first `wait` of the round reduces all queued tensors."""
        self._queue.append(tensor)
        return PendingWork(self._flush, self._callbacks)

    def should_commit(self, *_args: Any, **_options: Any) -> bool:
        """Close the round."""
        self._flush()
        self._step += 1
        is_due = self._step % self._snapshot_every == 0
        self._snapshot_due = is_due and self.all_reduce.has_reduced
        return True

    def current_step(self) -> int:
        """Return the number of committed rounds."""
        return self._step

    def num_participants(self) -> int:
        """Return the number of replicas in the last round."""
        return self.all_reduce.n_contributions

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's call
        """Do nothing, because there is no thread and no connection."""

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        if not queue:
            return
        self.all_reduce(queue)
        for callback in self._callbacks:
            callback(None)

    def _saved_states(self) -> dict[str, NDArray]:
        return tensors_of_state({key: save() for key, (_, save) in self._states.items()})

    def _save_snapshot(self) -> None:
        header = {"step": self._step, "expected": sorted(self.all_reduce.expected)}
        try:
            key = f"{SNAPSHOTS}{self._step:06d}.safetensors"
            self.all_reduce.store.put(key, seal_tensors(header, self._saved_states()))
            self._snapshot_due = False
        except ObjectStoreError as error:
            logger.warning("no snapshot of step %d: %s", self._step, error)

    def _check_start(self) -> None:
        """Check that all replicas start from equal weights: a mean of deltas cannot mend that.

        Raises:
            TrainerConfigError: the weights differ.
        """
        tensors = self._saved_states()
        start = {"start": sha256(*(tensors[name] for name in sorted(tensors)))}
        if agree_on_run(self.all_reduce.store, {}, start) != start:
            raise TrainerConfigError(
                "this replica starts from other weights than the first one of the run: load the "
                "same checkpoint, or set the same seed, everywhere"
            )

    def _load_snapshot(self) -> bool:
        keys = self.all_reduce.store.keys(SNAPSHOTS)
        data = self.all_reduce.store.get(keys[-1]) if keys else None
        if data is None:
            return False
        header, tensors = unseal_tensors(data)
        states = state_of_tensors(tensors)
        if states.keys() != self._states.keys():
            raise OuterLoopError(f"{keys[-1]} comes from another loop")
        for key, state in states.items():
            self._states[key][0](state)
        self._step = self.all_reduce.round_id = header["step"]
        self.all_reduce.expected = frozenset(header["expected"])
        return True


class MockManager(ObjectStoreManager):
    """A manager of one replica alone, without a network. The mean is its own value."""

    def __init__(self) -> None:
        super().__init__(ObjectStoreAllReduce("", 0, 1))


def make_diloco_outer_loop(
    model: nn.Module,
    inner_optimizer: Any,
    *,
    manager: Any,
    sync_every: int,
    outer: OuterStep | None = None,
) -> Any:
    """Return a `torchft.local_sgd.DiLoCo` to use as a context around the training loop.

    After every `sync_every` steps of the inner optimizer, the pseudo-gradient θ_initial − θ_local
    is averaged and the outer optimizer makes one step.

    Args:
        model: The model to train. Frozen parameters aren't sent.
        inner_optimizer: Optimizer of the local steps. One that accelerate wrapped is unwrapped.
        manager: `ObjectStoreManager`, `MockManager`, or a `torchft.Manager` of your own.
        sync_every: Inner steps per round.
        outer: The outer optimizer.

    Raises:
        TrainerConfigError: With a setting, torchft would give wrong results or stop.
    """
    try:
        local_sgd: Any = importlib.import_module("torchft.local_sgd")
    except ImportError as error:
        raise TrainerConfigError(
            f"torchft cannot be imported ({error}): pip install 'replay-pipeline[outer]'"
        ) from error
    trained = trainable_part(model)
    parameters = list(trained.parameters())
    if not parameters or sync_every < 1:
        raise TrainerConfigError(
            f"{len(parameters)} trainable parameters, sync_every={sync_every}: nothing to exchange"
        )
    if low := {p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)}:
        raise TrainerConfigError(
            f"the model has {low} parameters: outer steps would be rounded away; train in float32 "
            "(with autocast), or use the object_store outer loop"
        )
    if manager._use_async_quorum:
        raise TrainerConfigError("DiLoCo needs a manager with use_async_quorum=False")
    if getattr(manager, "_init_sync", False):
        logger.warning(
            "init_sync=True throws away the first round of all replicas but one; "
            "start all from the same weights and make the manager with init_sync=False"
        )
    step = outer or OuterStep()
    loop = local_sgd.DiLoCo(
        manager,
        [trained],
        getattr(inner_optimizer, "optimizer", inner_optimizer),
        torch.optim.SGD(
            parameters,
            lr=step.lr,
            momentum=step.momentum,
            nesterov=step.nesterov and step.momentum > 0,
        ),
        sync_every,
        use_bucketization=False,
    )
    (fragment,) = loop._fragments
    if fragment.use_bucketization:
        # torchft leaves out the tensors at the end of each bucket, without a word.
        raise TrainerConfigError("TORCHFT_USE_BUCKETIZATION is set: unset it")
    if isinstance(manager, ObjectStoreManager):
        manager.join(lambda mean: _replay(fragment, mean), sum(p.numel() for p in parameters))
        fragment.restore_parameters()
    return loop


@torch.no_grad()
def _replay(fragment: Any, mean: Tensor) -> None:
    """Apply a round that was missed: the same outer step that the others made."""
    fragment.restore_parameters()
    parameters = list(fragment._model_fragment.parameters())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    fill_from(mean.numpy(), [parameter.grad for parameter in parameters])
    fragment._outer_optimizer.step()
    fragment._outer_optimizer.zero_grad()
    fragment.save_parameters()
