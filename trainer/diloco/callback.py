"""The outer loop as a callback of the Hugging Face `Trainer`, including TRL's trainers."""

import logging
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from trainer.data.dataset import PreferenceData
from trainer.diloco.all_reduce import ObjectStoreAllReduce
from trainer.diloco.codecs import codec_named
from trainer.diloco.environment import ReplicaPlace, replica_place
from trainer.diloco.exchange import RoundReport, Vector
from trainer.diloco.export import publish_template
from trainer.diloco.object_store import ObjectStore, open_store
from trainer.diloco.parameters import ParameterVector
from trainer.diloco.protocol import outer_preset
from trainer.diloco.replica import ROUNDS, OuterReplica, OuterSettings
from trainer.diloco.torchft_loop import ObjectStoreManager, make_diloco_outer_loop
from trainer.errors import TrainerConfigError

logger = logging.getLogger(__name__)

Row = TypeVar("Row")
Result = TypeVar("Result")

OWN_MARK = "outer-round"
"""File in a checkpoint that exists only for the outer loop."""
OUTER_KINDS = ("none", "torchft", "object_store")


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """The `outer_options` of a run's configuration."""

    uri: str = ""
    """Store that joins the replicas."""
    sync_every: int = 50
    """Optimizer steps per round."""
    rounds: str = "auto"
    """`synchronous` gives all replicas equal bits, at the pace of the quorum. In `asynchronous`, no
    replica waits. `auto` is asynchronous if there are several replicas and the outer optimizer has
    no momentum."""
    codec: str = "ternary"
    """Wire format: fp32 or ternary."""
    optimizer: str = "average"
    """Outer optimizer: `average` for fine-tuning, `nesterov` for training from scratch, or `diloco`."""
    quorum: int | None = None
    """Fewest replicas per round. By default, half of them, rounded up."""
    timeout_s: float = 1800.0
    """Seconds without a decision of the round after which the replica ends."""
    first_grace_s: float = 120.0
    """Seconds that the first round waits for machines that are still booting."""
    snapshot_every: int = 5
    """Rounds between snapshots. Deltas are kept at least as long, to repair damage."""


def outer_callbacks(
    kind: str,
    options: OuterOptions,
    *,
    place: ReplicaPlace | None = None,
    store: ObjectStore | None = None,
) -> list[TrainerCallback]:
    """Return the callbacks that join this replica to the others, or an empty list for `none`.

    Without a `place`, the launcher's variables say which replica this is. A `store` is used instead
    of the one at `options.uri`.

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
    if options.rounds not in {*ROUNDS, "auto"}:
        raise TrainerConfigError(
            f"outer_options.rounds={options.rounds!r} is not one of auto, {', '.join(ROUNDS)}"
        )
    codec_named(options.codec)
    outer_preset(options.optimizer)
    if store is None and not options.uri:
        raise TrainerConfigError(f"outer={kind} needs outer_options.uri")
    if kind == "torchft":
        return [TorchftLoop(options, where, store)]
    if options.rounds == "auto":
        # In synchronous rounds, all would go at the pace of the slowest. All replicas come to the
        # same conclusion: it follows from what they have in common.
        is_free = where.world_size > 1 and not outer_preset(options.optimizer).momentum
        options = replace(options, rounds="asynchronous" if is_free else "synchronous")
        if where.world_size > 1:
            logger.warning(
                "outer_options.rounds: %s, as the outer optimizer is %s",
                options.rounds,
                options.optimizer,
            )
    return [ObjectStoreLoop(options, where, store)]


def shard(rows: Sequence[Row], place: ReplicaPlace | None = None) -> Sequence[Row]:
    """Return this replica's share of the rows: every N-th row, so that shards differ by at most one.

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
    """Return the data with this replica's share of the training rows and all held-out rows."""
    where = place or replica_place() or ReplicaPlace()

    def share(rows: list[Any]) -> list[Any]:
        return list(shard(rows, where)) if len(rows) >= where.world_size else rows

    return replace(
        data,
        pairs=list(shard(data.pairs, where)),
        prompts=share(data.prompts),
        positives=share(data.positives),
        answers=share(data.answers),
    )


class ObjectStoreLoop(TrainerCallback):
    """The callback that exchanges the trainable parameters over an object store at regular steps.

    The run has ⌈max_steps / sync_every⌉ rounds. A process that joins later continues from a
    checkpoint at the run's step, with its weights and a new optimizer.

    The processes of a replica (DDP or FSDP2 under accelerate) hold the same parameters, or shards
    of them. All read them together, rank 0 exchanges over the store, and the result goes to all. So
    all call every method in the same order.
    """

    def __init__(
        self, options: OuterOptions, place: ReplicaPlace, store: ObjectStore | None = None
    ) -> None:
        self.options = options
        self.place = place
        self.store = store
        self.reports: list[RoundReport] = []
        self._replica: OuterReplica | None = None
        """The replica, on rank 0 alone."""
        self._view: ParameterVector | None = None
        self._theta: Vector = np.zeros(0, np.float32)
        self._n_trained = 0
        self.is_finished = False
        self._n_steps = 0

    def join(self, trainer: Trainer) -> Path | None:
        """Join the run and load its state, before the trainer begins.

        Returns:
            The checkpoint from which the trainer must continue, or None at step 0.

        Raises:
            TrainerConfigError: The run was started with other settings, or the processes of this
                replica can't do what the options ask for.
        """
        args, options = trainer.args, self.options
        if args.world_size > 1 and args.ddp_timeout <= options.timeout_s:
            raise TrainerConfigError(
                f"ddp_timeout={args.ddp_timeout} is not above outer_options.timeout_s="
                f"{options.timeout_s:g}: its process group would time out while rank 0 waits for a round"
            )
        n_steps = args.max_steps
        if n_steps <= 0:
            n_steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
        if not isinstance(trainer.model, nn.Module):
            raise TrainerConfigError("the trainer has no model to exchange")
        view = self._view = ParameterVector(trainer.model)
        start = view.read()

        def joined() -> None:
            self._replica = OuterReplica(
                self.store or open_store(options.uri),
                start,
                rank=self.place.rank,
                world_size=self.place.world_size,
                settings=OuterSettings(
                    rounds=options.rounds,
                    codec=options.codec,
                    outer=outer_preset(options.optimizer),
                    n_rounds=-(-n_steps // options.sync_every),
                    signature=view.signature,
                    quorum=options.quorum,
                    timeout_s=options.timeout_s,
                    first_grace_s=options.first_grace_s,
                    snapshot_every=options.snapshot_every,
                ),
            )
            self._replica.join()
            publish_template(self._replica.store, trainer)

        self._in_step(joined)
        view.write(self._theta)
        if self._n_trained == 0:
            return None
        if trainer.is_fsdp_enabled:
            raise TrainerConfigError(
                f"replica {self.place.rank} is sharded and missed rounds: sharded replicas cannot join later. Start the run again, or run without sharding"
            )
        step = min(self._n_trained * options.sync_every, n_steps)
        return from_first(lambda: self._checkpoint(trainer, step, n_steps))

    def _in_step(self, work: Callable[[], Result]) -> Result:
        """Let rank 0 work with the replica, and bring all ranks to where it is then."""

        def seen() -> tuple[Result, Vector, int, bool]:
            result, one = work(), self._replica
            assert one is not None
            return result, one.theta, one.n_trained, one.is_finished

        result, self._theta, self._n_trained, self.is_finished = from_first(seen)
        return result

    def _checkpoint(self, trainer: Trainer, step: int, n_steps: int) -> Path:
        """Write the checkpoint at which the run is now, and return its folder.

        The step is that of the run, also where rounds went by without this replica: everybody's
        schedule and data end together.
        """
        logger.warning("rank %d joins at step %d: its optimizer starts over", self.place.rank, step)
        self._discard_checkpoints(trainer.args)
        folder = Path(str(trainer.args.output_dir)) / f"checkpoint-{step}"
        trainer.save_model(str(folder), _internal_call=True)
        (folder / "training_args.bin").unlink(missing_ok=True)
        parts: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
        stateful: Any = [part for part in parts if isinstance(part, ExportableState)]
        state = TrainerState(
            train_batch_size=trainer.args.train_batch_size, stateful_callbacks=stateful
        )
        state.compute_steps(trainer.args, n_steps)
        state.global_step = step
        (folder / OWN_MARK).touch()
        state.save_to_json(str(folder / TRAINER_STATE_NAME))
        return folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Advance the schedule to the run's round, if rounds passed without this replica.

        Raises:
            TrainerConfigError: The replica has not joined the run.
        """
        if self._view is None:
            raise TrainerConfigError(
                "to train with an outer loop, call train_replica(trainer, ...)"
            )
        schedule = context.get("lr_scheduler")
        if schedule is not None and state.global_step > 0:
            inner = getattr(schedule, "scheduler", schedule)
            # The schedules of transformers are functions of the step: no need to walk there.
            inner.last_epoch = inner._step_count = state.global_step - 1
            with warnings.catch_warnings():
                # It takes a new optimizer, which has made no step yet, for a mistake in the order.
                warnings.filterwarnings("ignore", ".*lr_scheduler.step", UserWarning)
                inner.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Count a step, and exchange at the end of a round."""
        self._n_steps += 1
        self._take_up()
        if self._n_steps >= self.options.sync_every or state.global_step >= state.max_steps:
            self._exchange(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Remove checkpoints that the user didn't request."""
        self._discard_checkpoints(args)

    @staticmethod
    def _discard_checkpoints(args: TrainingArguments) -> None:
        """Delete the checkpoints that only this loop has asked for; a killed process left some."""
        if args.process_index > 0:
            return
        for mark in Path(str(args.output_dir)).glob(f"checkpoint-*/{OWN_MARK}"):
            shutil.rmtree(mark.parent, ignore_errors=True)

    def _take_up(self) -> None:
        """Move to what others have committed meanwhile, where nobody waits for the round's end."""
        if self._view is None or self.options.rounds == "synchronous":
            return
        moved = from_first(lambda: self._replica.take_up() if self._replica else None)
        if moved is not None:
            self._view.write(self._view.read() + moved)

    def _exchange(self, control: TrainerControl) -> None:
        view, weight = self._view, self._n_steps
        if view is None or self.is_finished:
            return
        local = view.read()

        def exchanged() -> RoundReport:
            assert self._replica is not None
            return self._replica.exchange(local, weight=weight)

        report = self._in_step(exchanged)
        self.reports.append(report)
        self._n_steps = 0
        logger.info("outer round %d: %s", report.round_id, report)
        view.write(self._theta)
        if self.is_finished:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Add the figures of the last round to the trainer's log."""
        logs = context.get("logs")
        if logs is not None and self.reports:
            last = self.reports[-1]
            logs["outer/round"] = last.round_id
            logs["outer/contributions"] = last.n_contributions
            logs["outer/wait_s"] = round(last.wait_s, 3)
            logs["outer/up_bytes"] = last.up_bytes
            logs["outer/down_bytes"] = last.down_bytes


def train_replica(
    trainer: Trainer, loops: Sequence[TrainerCallback], *, resume_from: str | None = None
) -> None:
    """Train as `Trainer.train` does. A replica on an object store first finds its place in the run.

    `loops` are among the trainer's callbacks. `resume_from` is a checkpoint to continue from, if the
    run has no stored state of this replica.
    """
    loop = next((loop for loop in loops if isinstance(loop, ObjectStoreLoop)), None)
    if loop is None:
        trainer.train(resume_from_checkpoint=resume_from)
        return
    folder = loop.join(trainer)
    if not loop.is_finished or folder is None:
        trainer.train(resume_from_checkpoint=str(folder) if folder else resume_from)
        return
    # All is done but for what comes after training: take up the last state, make no step.
    trainer.state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    trainer.state.max_steps = trainer.state.global_step
    handler = trainer.callback_handler
    handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    handler.on_train_end(trainer.args, trainer.state, trainer.control)


class TorchftLoop(TrainerCallback):
    """The callback that runs torchft's DiLoCo around the trainer's inner optimizer, over a store."""

    def __init__(
        self, options: OuterOptions, place: ReplicaPlace, store: ObjectStore | None = None
    ) -> None:
        self.options = options
        self.place = place
        self.store = store
        self._loop: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Join the others.

        Raises:
            TrainerConfigError: The replica has several processes.
        """
        if args.world_size > 1:
            raise TrainerConfigError(
                f"torchft over {args.world_size} processes per replica is not supported: start "
                "each replica as one process, or take outer=object_store"
            )
        options = self.options
        mean = ObjectStoreAllReduce(
            options.uri,
            self.place.rank,
            self.place.world_size,
            timeout_s=options.timeout_s,
            codec=options.codec,
            quorum=options.quorum or -(-self.place.world_size // 2),
            first_grace_s=options.first_grace_s,
            store=self.store,
        )
        self._loop = make_diloco_outer_loop(
            context["model"],
            context["optimizer"],
            manager=ObjectStoreManager(mean, snapshot_every=options.snapshot_every),
            sync_every=options.sync_every,
            outer=outer_preset(options.optimizer),
        )
        self._loop.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Stop once all rounds are committed."""
        n_rounds = state.max_steps // self.options.sync_every
        if self._loop is not None and self._loop._manager.current_step() >= n_rounds:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Remove the hooks."""
        if self._loop is not None:
            self._loop.__exit__(None, None, None)
            self._loop = None


def from_first(work: Callable[[], Result]) -> Result:
    """Let rank 0 work, and return its result or raise its error on all ranks of a replica."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
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
