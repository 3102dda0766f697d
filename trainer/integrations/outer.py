"""The outer loop as a callback of the Hugging Face `Trainer`, TRL's trainers among them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from trainer.data.dataset import PreferenceData
from trainer.diloco.environment import ReplicaPlace, replica_place
from trainer.diloco.exchange import RoundReport
from trainer.diloco.inner import make_inner_optimizer
from trainer.diloco.object_store import ObjectStore, open_store
from trainer.diloco.outer_step import outer_preset
from trainer.diloco.parameters import ParameterVector, state_of_tensors, tensors_of_state
from trainer.diloco.replica import OuterReplica, OuterSettings
from trainer.diloco.torchft_loop import make_diloco_outer_loop, make_torchft_manager
from trainer.errors import TrainerConfigError

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

OUTER_KINDS = ("none", "torchft", "object_store")


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """The `outer_options` of a run's configuration."""

    uri: str = ""
    """Store that joins the replicas (`object_store`)."""
    sync_every: int = 50
    """Optimizer steps per round."""
    inner: str = ""
    """Inner optimizer: `muon` from scratch, or `adamw`; none: the trainer's own."""
    codec: str = "ternary"
    """Wire format: fp32, bf16, int8, int4 or ternary."""
    optimizer: str = "average"
    """Outer optimizer: `average` for fine-tuning, `nesterov` from scratch, or `diloco`."""
    quorum: int | None = None
    """Fewest replicas per round; none: half of them, rounded up."""
    timeout_s: float = 1800.0
    """A round without decision for this long ends the replica."""
    first_grace_s: float = 120.0
    """How long the first round waits for machines that are still booting."""
    state_uri: str | None = None
    """Where the inner optimizer's state is kept for a restart; none keeps none."""
    lighthouse: str = ""
    """Address of `torchft_lighthouse` (`torchft`)."""


def outer_callbacks(
    kind: str,
    options: OuterOptions,
    *,
    place: ReplicaPlace | None = None,
    store: ObjectStore | None = None,
) -> list[TrainerCallback]:
    """Return the callbacks that join this replica to the others; none for `none`.

    Args:
        kind: `none`, `torchft` or `object_store`.
        options: How.
        place: Which replica this is; None takes what the launcher told this process.
        store: Joins the replicas (`object_store`) instead of the one at `options.uri`.

    Raises:
        TrainerConfigError: A setting is missing or unknown.
    """
    if kind not in OUTER_KINDS:
        raise TrainerConfigError(f"outer={kind!r} is not one of {', '.join(OUTER_KINDS)}")
    if kind == "none":
        return []
    where = place or replica_place() or ReplicaPlace()
    if options.sync_every < 1:
        raise TrainerConfigError(f"outer_options.sync_every={options.sync_every}: at least 1")
    if kind == "object_store":
        if store is None and not options.uri:
            raise TrainerConfigError("outer=object_store needs outer_options.uri")
        return [ObjectStoreLoop(options, where, store)]
    if not options.lighthouse:
        raise TrainerConfigError("outer=torchft needs outer_options.lighthouse")
    return [TorchftLoop(options, where)]


def inner_optimizers(
    kind: str, options: OuterOptions, model: nn.Module, args: TrainingArguments
) -> tuple[torch.optim.Optimizer | None, None]:
    """Return the inner optimizer of a replica, in the form that a `Trainer` takes.

    Without an outer loop, or if the options name none, the trainer makes its own.

    Raises:
        TrainerConfigError: There is no such optimizer.
    """
    if kind == "none" or not options.inner:
        return None, None
    optimizer = make_inner_optimizer(
        model, options.inner, lr=args.learning_rate, weight_decay=args.weight_decay
    )
    return optimizer, None


def shard(rows: Sequence[Row], place: ReplicaPlace | None = None) -> Sequence[Row]:
    """Return this replica's share of the rows: every N-th, so shards differ by at most one.

    Raises:
        TrainerConfigError: There are fewer rows than replicas.
    """
    where = place or replica_place()
    if where is None or where.world_size == 1:
        return rows
    if len(rows) < where.world_size:
        raise TrainerConfigError(f"{len(rows)} rows are too few for {where.world_size} replicas")
    return rows[where.rank :: where.world_size]


def sharded(data: PreferenceData, place: ReplicaPlace | None = None) -> PreferenceData:
    """Return this replica's share of the training rows; held-out rows stay whole.

    Raises:
        TrainerConfigError: There are fewer pairs than replicas.
    """
    where = place or replica_place() or ReplicaPlace()

    def share(rows: list[Any]) -> list[Any]:
        return list(shard(rows, where)) if len(rows) >= where.world_size else rows

    return replace(
        data,
        pairs=list(shard(data.pairs, where)),
        prompts=share(data.prompts),
        positives=share(data.positives),
    )


class ObjectStoreLoop(TrainerCallback):
    """Exchanges the trainable parameters over an object store every so many optimizer steps.

    The run has ⌈max_steps / sync_every⌉ rounds. A replica that comes late or anew takes part in
    those that are left.
    """

    def __init__(
        self, options: OuterOptions, place: ReplicaPlace, store: ObjectStore | None = None
    ) -> None:
        self.options = options
        self.place = place
        self.store = store
        self.reports: list[RoundReport] = []
        self.replica: OuterReplica | None = None
        self._view: ParameterVector | None = None
        self._n_steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Join the run and take up its state."""
        _check_one_process(args)
        options = self.options
        self._view = ParameterVector(context["model"])
        self.replica = OuterReplica(
            self.store or open_store(options.uri),
            self._view.read(),
            rank=self.place.rank,
            world_size=self.place.world_size,
            attempt=self.place.attempt,
            settings=OuterSettings(
                codec=options.codec,
                outer=outer_preset(options.optimizer),
                n_rounds=-(-state.max_steps // options.sync_every),
                signature=self._view.signature,
                quorum=options.quorum,
                timeout_s=options.timeout_s,
                first_grace_s=options.first_grace_s,
            ),
            state=open_store(options.state_uri) if options.state_uri else None,
        )
        self.replica.join()
        self._view.write(self.replica.theta)
        if self.replica.inner_state:
            kept = state_of_tensors(self.replica.inner_state)
            _inner(context["optimizer"]).load_state_dict(kept)
        # A replica that comes back when all is done makes one step for the trainer's sake.
        control.should_training_stop = self.replica.is_finished

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Count a step; at the end of a round, exchange."""
        replica, view = self.replica, self._view
        if replica is None or view is None:
            return
        self._n_steps += 1
        is_due = self._n_steps >= self.options.sync_every
        is_last = state.global_step >= state.max_steps
        if not replica.is_finished and (is_due or is_last):
            kept = {}
            if self.options.state_uri:
                kept = tensors_of_state(_inner(context["optimizer"]).state_dict())
            report = replica.exchange(view.read(), weight=self._n_steps, inner_state=kept)
            self.reports.append(report)
            self._n_steps = 0
            logger.info("outer round %d: %s", report.round_id, report)
        if replica.is_finished:
            control.should_training_stop = True
        if self._n_steps == 0 or replica.is_finished:
            view.write(replica.theta)

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Add the last round to what the trainer logs."""
        logs = context.get("logs")
        if logs is not None and self.reports:
            last = self.reports[-1]
            logs["outer/round"] = last.round_id
            logs["outer/contributions"] = last.n_contributions
            logs["outer/wait_s"] = round(last.wait_s, 3)
            logs["outer/up_bytes"] = last.up_bytes
            logs["outer/down_bytes"] = last.down_bytes


class TorchftLoop(TrainerCallback):
    """Runs torchft's DiLoCo around the trainer's inner optimizer, under a lighthouse."""

    def __init__(self, options: OuterOptions, place: ReplicaPlace) -> None:
        self.options = options
        self.place = place
        self.manager: Any = None
        self._loop: Any = None
        self._n_rounds = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Meet the others at the lighthouse."""
        _check_one_process(args)
        model, optimizer = context["model"], _inner(context["optimizer"])

        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}

        def load_state(kept: dict[str, Any]) -> None:
            for name, part in parts.items():
                part.load_state_dict(kept[name])

        self._n_rounds = state.max_steps // self.options.sync_every
        self.manager = make_torchft_manager(
            lighthouse=self.options.lighthouse,
            rank=self.place.rank,
            state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
            load_state_dict=load_state,
            min_replicas=self.options.quorum or -(-self.place.world_size // 2),
            round_s=self.options.timeout_s,
        )
        self._loop = make_diloco_outer_loop(
            model,
            optimizer,
            manager=self.manager,
            sync_every=self.options.sync_every,
            outer=outer_preset(self.options.optimizer),
        )
        self._loop.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Stop once all rounds are committed."""
        if self.manager is not None and self.manager.current_step() >= self._n_rounds:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Take the hooks off and leave."""
        if self._loop is not None:
            self._loop.__exit__(None, None, None)
            self.manager.shutdown(wait=False)
            self._loop = self.manager = None


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate wraps: hooks and state are on that one."""
    return getattr(optimizer, "optimizer", optimizer)


def _check_one_process(args: TrainingArguments) -> None:
    if args.world_size > 1:
        raise TrainerConfigError(
            f"an outer loop over {args.world_size} processes per replica is not supported: start "
            "each replica as one process"
        )
