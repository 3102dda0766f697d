"""One training run: from a configuration and a dataset to a model, metrics, a plot, and a report."""

import contextlib
import json
import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset, Features, Json, List, Value
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl.chat_template_utils import add_response_schema

from trainer.data.acting import compared, end_tokens
from trainer.data.as_seen import as_seen, parts_of
from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import PreferenceData, load_preference_data
from trainer.data.evaluation import evaluate
from trainer.data.folders import sole_writer
from trainer.data.hints import hint_for_row, without_hint
from trainer.data.rendering import RENDERING_FILE, Renderer
from trainer.data.report import model_card, plot_metrics
from trainer.data.rewards import agreement, as_trl_reward, load_function, load_reward
from trainer.data.rollouts import RecordedRollouts, student_rollouts
from trainer.data.tiny import pretrain
from trainer.data.tokens import requests_of
from trainer.data.types import StopRequest
from trainer.diloco.callback import (
    OuterOptions,
    outer_callbacks,
    sharded,
    train_replica,
)
from trainer.diloco.environment import ReplicaPlace, replica_place
from trainer.diloco.object_store import ObjectStore
from trainer.engines.trl.balance import balanced, refusal_of
from trainer.engines.trl.checkpoints import (
    LAST,
    StopAtStep,
    checkpoint_to_resume,
    is_finished,
    mark_finished,
    stamp_of,
)
from trainer.engines.trl.config import ComposerConfig
from trainer.engines.trl.trainer import ComposerReplicationTrainer
from trainer.errors import DatasetError, TrainerConfigError, TrainerError
from trainer.model.loading import (
    fresh_tokenizer,
    load_model,
    load_tokenizer,
    merged,
    usable_data,
)
from trainer.model.scoring import (
    PairForward,
    choose_pair_forward,
    chunked_pair_logps,
    chunked_response_logps,
)
from trainer.settings import RunConfig, SharedSettings, section_of

logger = logging.getLogger(__name__)

RESTART_PATIENCE_S = 20.0
"""Seconds that a restarted replica waits for the end of the dead one."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that its host may replace."""

    place: ReplicaPlace | None = None
    """Which replica this is. With None, the launcher's variables decide."""
    store: ObjectStore | None = None
    """Store that joins the replicas (`outer=object_store`), instead of the one at `outer_options.uri`."""
    environment: Any = None
    """TRL's `environment_factory`, for `rollouts=generate`. Its reward replaces `reward`."""


class MetricsFile(TrainerCallback):
    """The file with one JSON line per log of the trainer, with `group/name` keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Keep the lines of the steps up to the checkpoint from which the run continues."""
        if state.is_world_process_zero:
            self.rows = _steps_of(self.path, until=state.global_step) if state.global_step else []
            self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), "utf-8")

    def on_log(self, args: Any, state: Any, control: Any, **context: Any) -> None:  # noqa: ARG002
        """Write one line."""
        logs = context.get("logs")
        if not state.is_world_process_zero or not logs:
            return
        row: dict[str, Any] = {"step": state.global_step, "train/max_steps": state.max_steps}
        row |= {key if "/" in key else f"train/{key}": value for key, value in logs.items()}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def losses(self) -> tuple[float, float]:
        """Return the mean losses of the first and of the last tenth of the steps."""
        found = [row["train/loss"] for row in self.rows if "train/loss" in row]
        found = found or [row["train/train_loss"] for row in self.rows[-1:]] or [math.nan]
        n = max(len(found) // 10, 1)
        return fmean(found[:n]), fmean(found[-n:])


def _steps_of(path: Path, *, until: int) -> list[dict[str, Any]]:
    """Read the lines of single steps; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if row["step"] <= until and "train/train_runtime" not in row]


def run(
    config: RunConfig,
    *,
    parts: RunParts | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train, evaluate before and after, and write everything into `config.output`.

    `stop` is asked at each step. A run that is interrupted saves the last whole step and ends.

    Raises:
        TrainerConfigError: a setting is wrong.
        FolderInUseError: another run writes into the output folder.
        DatasetError: the dataset lacks what a channel needs.
        TrainingStoppedError: it was stopped. `resume_from="last"` continues the run.
    """
    args = trl_config(config, Path(config.output))
    parts = parts or RunParts()
    with only_run_in(Path(config.output), args, place=parts.place):
        return _run(config, args, parts, stop or StopRequest())


@contextlib.contextmanager
def only_run_in(
    folder: Path, args: ComposerConfig, *, place: ReplicaPlace | None = None
) -> Iterator[None]:
    """Keep other runs out of the output folder. The first rank takes the lock for all ranks.

    Raises:
        FolderInUseError: another run writes there. Nothing was changed.
        TrainerConfigError: the folder can't be created or written to.
    """
    where = place or replica_place()
    patience_s = RESTART_PATIENCE_S if where is not None and where.attempt else 0.0
    with contextlib.ExitStack() as stack:
        refusal: list[TrainerError | None] = [None]
        if args.process_index == 0:
            try:
                stack.enter_context(sole_writer(folder, patience_s=patience_s))
            except TrainerError as error:
                refusal = [error]
        if args.world_size > 1:
            torch.distributed.broadcast_object_list(refusal, src=0, device=args.device)
        if refusal[0] is not None:
            raise refusal[0]
        yield


def _run(
    config: RunConfig, args: ComposerConfig, parts: RunParts, stop: StopRequest
) -> dict[str, Any]:
    started = time.perf_counter()
    transformers_logging.disable_progress_bar()
    output = Path(config.output)
    stamp = stamp_of(config, n_processes=args.world_size)
    # Before anything is loaded or written: this is where a run with other settings is refused.
    steps = Path(args.output_dir or output)
    if config.resume_from == LAST and is_finished(steps, stamp, again=config.again):
        logger.warning("%s: this run is finished; --again starts it anew", output)
        return json.loads((output / "report.json").read_text("utf-8"))
    resumed = checkpoint_to_resume(config.resume_from, steps, stamp)
    made = _Prepared(config, args, parts)
    before = made.measured()
    metrics = MetricsFile(output / "metrics.jsonl")
    stopping = StopAtStep(stamp, stop, is_alone=args.world_size == 1 and not made.outer)
    trainer = build_trainer(made, parts, [*made.outer, metrics, stopping])
    try:
        with without_upstream_warnings():
            if resumed is None or not trainer.take_up_end(resumed):
                train_replica(trainer, made.outer, resume_from=str(resumed) if resumed else None)
        stopping.raise_if_stopped(trainer.state.global_step, trainer.state.max_steps)
        # First what took hours, then what only looks at it.
        with stop.held():
            save_checkpoint(made, trainer, output)
        after = made.measured()
    except KeyboardInterrupt:
        if not stop.is_held:
            with stop.held():
                stopping.leave(trainer)
        raise
    stop.is_held = True  # what is left takes no time
    live = [name for name, steps in trainer.n_live_steps.items() if steps > 0]
    idle = {
        name: f"no step gave it anything to learn from ({why})"
        for name, why in NOTHING_TO_LEARN.items()
        if name not in [*live, *made.off]
    }
    loss_first, loss_last = metrics.losses()
    report: dict[str, Any] = {
        "loss_first": loss_first,
        "loss_last": loss_last,
        "channels_live": live,
        "channels_off": {**made.off, **idle},
        "steps": trainer.state.global_step,
        "seconds": round(time.perf_counter() - started, 2),
        "pairs": made.n_pairs,
        "cut_prompts": made.found.n_cut_prompts,
        "preflight": made.found.as_report(),
        **({"balance": made.balance} if made.balance else {}),
        "pairs_forward": trainer.pair_forward,
        **compared(before, after),
    }
    if trainer.is_world_process_zero():
        plot_metrics(metrics.rows, output / "loss.png")
        evaluation = {"before": before, "after": after}
        _write_json(output / "evaluation.json", evaluation)
        _write_json(output / "report.json", report)
        card = model_card(
            base=config.model or "random weights",
            dataset=config.dataset,
            settings=asdict(config),
            report=report,
            evaluation=evaluation,
        )
        (output / "README.md").write_text(card, "utf-8")
        _write_json(output / "inspected.json", made.inspected())
        mark_finished(steps, stamp)
        if config.push_to_hub is not None:
            if report["acts_worse"]:
                raise TrainerError(
                    f"{'; '.join(report['findings'])}. The model was not pushed to the Hub; it is "
                    f"complete in {output}"
                )
            push_to_hub(config.push_to_hub, output)
    return report


_N_INSPECTED = 3


class _Prepared:
    """Everything of a run that is there before its trainer."""

    def __init__(self, config: RunConfig, args: ComposerConfig, parts: RunParts) -> None:
        self.config, self.args = config, args
        data = load_preference_data(config.dataset, revision=config.revision)
        self.tokenizer = load_tokenizer(config, data)
        if getattr(self.tokenizer, "response_template", None) is None:
            with contextlib.suppress(ValueError):  # a template that TRL doesn't know
                add_response_schema(self.tokenizer)
        hint = hint_for_row if args.alpha_sdpo > 0 else without_hint
        self.collator = ComposerDataCollator(self.tokenizer, hint=hint, **args.rendering)
        renderer = self.collator.renderer
        with args.main_process_first(desc="tokenizing"):
            requests = requests_of(data, hint, with_tools=args.render_tools)
            renderer.store.fill(requests, renderer, Path(config.output) / "tokens")
        data, self.found = usable_data(config, renderer, data)
        joined = section_of(OuterOptions, config.outer_options, "outer_options.")
        self.outer = outer_callbacks(config.outer, joined, place=parts.place, store=parts.store)
        # All replicas must start from the same weights, although their data shards differ.
        self.model = self._trainee(data)
        self.own_configs = deepcopy((self.model.config, self.model.generation_config))
        """As the maker made them: the trainer puts its own end tokens and no cache into the model's."""
        data = sharded(data, parts.place) if self.outer else data
        self.off = off_channels(args, data)
        """Channels that cannot teach anything, with the reason."""
        self.recorded: RecordedRollouts | None = None
        if config.rollouts == "student":
            n = args.num_generations or 1
            self.recorded = student_rollouts(data, renderer, group_size=n, seed=args.seed)
        self.n_pairs = len(data.pairs)
        self.data = replace(data, pairs=data.sft_pairs(args.drawn))
        """Of `pairs`, all that a step may draw: with `sft_on` positives, too."""
        args.max_steps = args.steps_for(len(self.data.pairs))
        self.pair_forward = self._pair_forward()
        """How pairs of an evaluation run: as those of a step do."""
        self.balance: dict[str, int] | None = None
        if args.balance_pairs and args.has_preference:
            self._balance()
        if self.recorded is not None and (args.has_policy or args.alpha_sdpo > 0):
            with _autocast(args):
                self.recorded.add_behaviour_logps(
                    self.model, logps_of=chunked_response_logps, temperature=args.temperature
                )
        self.evaluation = config.evaluation.within(**evaluation_cost(self.data, renderer, args))

    def _trainee(self, data: PreferenceData) -> Any:
        """Load the model, or make and pretrain a tiny one, on its device."""
        config, args = self.config, self.args
        model = load_model(config, self.tokenizer, seed=args.seed).to(args.device)
        if config.model is None and (n_steps := config.tiny.pretraining_steps):
            rows = data.pairs or data.sft_pairs("answers")
            options = {"n_steps": n_steps, "seed": args.seed, "forward": chunked_pair_logps}
            pretrain(model, self.collator, rows, **options)
        return model

    def _pair_forward(self) -> PairForward:
        args = self.args
        rows = (self.data.pairs or self.data.test_pairs)[:2]
        if not rows:
            return PairForward(choice="padded: no pairs", max_tokens=args.max_packed_tokens)
        batch = {name: value.to(args.device) for name, value in self.collator.pairs(rows).items()}
        return choose_pair_forward(
            self.model,
            batch,
            setting=args.pair_forward,
            max_tokens=args.max_packed_tokens,
            autocast=partial(_autocast, args),
        )

    def _balance(self) -> None:
        args, pairs = self.args, self.data.pairs
        pairs, self.balance = balanced(pairs, self.model, self.collator, self.pair_forward, args)
        self.data = replace(self.data, pairs=pairs)
        if refusal := refusal_of(**self.balance):
            args.beta_replay = 0.0
            self.off["replay"] = refusal
            logger.warning("channel replay is off: %s", refusal)
            refuse_all_off(self.off)

    def measured(self) -> dict[str, Any]:
        """Evaluate the model as it is now."""
        level = load_function(self.config.agreement) if self.config.agreement else agreement
        with self.pair_forward.autocast():
            return evaluate(
                self.model,
                self.collator,
                self.data.test_pairs,
                self.data.test_prompts,
                options=self.evaluation,
                level=level,
                forward=self.pair_forward,
                batch_size=self.pair_forward.batch_size,
            )

    def inspected(self) -> list[dict[str, Any]]:
        """Return the first pairs as training sees them, for who wants to check that."""
        seen = [as_seen(row, self.collator.renderer) for row in self.data.pairs[:_N_INSPECTED]]
        return [{**row, "parts": parts_of(row)} for row in seen]


_N_LOOKED_AT = 32


def evaluation_cost(
    data: PreferenceData, renderer: Renderer, shared: SharedSettings
) -> dict[str, float]:
    """Estimate the arguments of `EvaluationOptions.within`, from the first rows and the settings.

    The cost is in tokens and not in seconds, so that a run gets the same evaluation on any machine.
    """

    def mean(values: Sequence[int]) -> float:
        return sum(values) / max(len(values), 1)

    def prompt(rows: Sequence[Mapping[str, Any]]) -> float:
        return mean([len(renderer.row_prompt_ids(row)) for row in rows[:_N_LOOKED_AT]])

    def sides(rows: Sequence[Mapping[str, Any]]) -> float:
        both, some = ("chosen", "rejected"), rows[:_N_LOOKED_AT]
        return 2 * mean([len(renderer.side_ids(row, side)) for row in some for side in both])

    pairs, held_out = prompt(data.pairs), prompt(data.test_pairs)
    a_pair = pairs + sides(data.pairs)
    n_rollouts = shared.per_device_train_batch_size * shared.gradient_accumulation_steps
    a_rollout = pairs + min(shared.max_completion_length, sides(data.pairs) / 2)
    step = (shared.has_preference or shared.is_sft) * shared.pairs_per_step * a_pair
    step += shared.needs_rollouts * n_rollouts * a_rollout
    step += (shared.alpha_sdpo > 0) * n_rollouts * a_rollout / 3
    n_steps = shared.max_steps
    if n_steps < 0:  # epochs
        n_steps = 3 * len(data.pairs) // max(shared.pairs_per_step, 1)
    return {
        # The blank prompt is short.
        "pair_tokens": held_out + 2 * sides(data.test_pairs),
        "prompt_tokens": prompt(data.test_prompts),
        "run_tokens": 3 * n_steps * step,
    }


def _autocast(args: ComposerConfig) -> torch.autocast:
    """Return the precision in which the policy will run, before there is an accelerator."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    return torch.autocast(args.device.type, dtype, enabled=bool(args.bf16 or args.fp16))


NOTHING_TO_LEARN = {
    "policy": "all rewards of each group were equal",
    "sdpo": "no state that was trained on has a hint",
    "replay": "no pair was drawn",
}
"""Possible reasons why a channel with a weight and data had no effect."""


def off_channels(args: ComposerConfig, data: PreferenceData) -> dict[str, str]:
    """Return the channels that can't teach anything, with reasons, before the first step."""
    off = {}
    weights = {"policy": "policy_weight", "sdpo": "alpha_sdpo", "replay": "beta_replay"}
    for channel, weight in weights.items():
        if getattr(args, weight) == 0:
            off[channel] = f"{weight} is 0"
    if "sdpo" not in off and not any(map(hint_for_row, data.training_rows)):
        off["sdpo"] = "no row of the dataset has a hint"
    refuse_all_off(off)
    for name, reason in off.items():
        level = logging.INFO if reason.endswith("is 0") else logging.WARNING
        logger.log(level, "channel %s is off: %s", name, reason)
    return off


def refuse_all_off(off: Mapping[str, str]) -> None:
    """Check that a channel is left.

    Raises:
        TrainerConfigError: all three are off.
    """
    if len(off) == len(NOTHING_TO_LEARN):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in off.items())
        raise TrainerConfigError(
            f"all channels are off, so the model would learn nothing ({reasons})"
        )


def push_to_hub(repository: str, output: Path) -> None:
    """Push the trained model, with its card, to a private Hub repository in one commit.

    Raises:
        TrainerError: the Hub refused. Everything is in the output folder.
    """
    hub = HfApi()
    trained = [name for name in ("checkpoint", "adapter") if (output / name).is_dir()]
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        files = {"README.md": output / "README.md", "report.json": output / "report.json"}
        for folder in trained:
            # The first is what loads by the repository's name.
            prefix = "" if folder == trained[0] else f"{folder}/"
            files |= {prefix + path.name: path for path in (output / folder).iterdir()}
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        hub.create_commit(repository, operations, commit_message="Add a trained model")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TrainerError(
            f"push_to_hub={repository}: {error}; the model is complete in {output}"
        ) from error


def trl_config(config: RunConfig, output: Path) -> ComposerConfig:
    """Build TRL's arguments from the run's settings, with float32 on a CPU.

    Raises:
        TrainerConfigError: TRL refuses the arguments.
    """
    has_gpu = torch.cuda.is_available()
    others = {"MPS": torch.backends.mps.is_available(), "XPU": torch.xpu.is_available()}
    for kind in (kind for kind, is_there in others.items() if is_there and not has_gpu):
        logger.warning("this machine has an %s device, but the run uses the CPU", kind)
    defaults: dict[str, Any] = {
        "output_dir": str(output / "steps"),
        "report_to": [],
        "use_cpu": not has_gpu,
        "bf16": has_gpu,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if config.outer == "object_store":
        # The ranks of a replica wait for the one that waits for a round.
        defaults["ddp_timeout"] = 24 * 3600
    try:
        return ComposerConfig(**(defaults | config.trl))
    except TrainerConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise TrainerConfigError(f"trl: {error}") from error


def build_trainer(
    made: _Prepared, parts: RunParts, callbacks: list[TrainerCallback]
) -> ComposerReplicationTrainer:
    """Build the trainer of this run, on recorded or generated rollouts.

    Raises:
        TrainerConfigError: rollouts are recorded, but the host of the run wants to sample some.
    """
    config, args, data, renderer = made.config, made.args, made.data, made.collator.renderer
    options: dict[str, Any] = {}
    has_environment = parts.environment is not None
    if made.recorded is None:
        options["train_dataset"] = prompts_dataset(data, renderer if has_environment else None)
        options["environment_factory"] = parts.environment
    elif has_environment:
        raise TrainerConfigError(
            f"rollouts={config.rollouts} come from the dataset, so nothing would be sampled: "
            "set rollouts=generate"
        )
    with without_upstream_warnings():
        trainer = ComposerReplicationTrainer(
            made.model,
            # An environment brings its own reward.
            None if has_environment else as_trl_reward(load_reward(config.reward)),
            args,
            pairs=data.pairs,
            recorded=made.recorded,
            kept=data.positives,
            tokens=renderer.store,
            **options,
            processing_class=made.tokenizer,
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def save_checkpoint(made: _Prepared, trainer: ComposerReplicationTrainer, output: Path) -> None:
    """Save weights (as safetensors) and tokenizer into `checkpoint`, and an adapter into `adapter`.

    Settings, template and tokens are the maker's own. Only what ends a turn is added, and how a
    server reads calls, where the maker left that out. Under PEFT, `checkpoint` is the merged model,
    which loads like any other, unless `peft.merge` is off.
    """
    config, tokenizer = made.config, made.tokenizer
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    folder = output / "checkpoint"
    own_tokenizer = fresh_tokenizer(config) if config.model else tokenizer
    if getattr(own_tokenizer, "response_template", None) is None:
        own_tokenizer.response_template = getattr(tokenizer, "response_template", None)
    if config.peft is not None:
        # peft picks the adapter's weights out of the model itself.
        model.save_pretrained(str(output / "adapter"))
        own_tokenizer.save_pretrained(str(output / "adapter"))
        if not config.peft.merge:
            return
        model = merged(config, output / "adapter") if config.model else model.merge_and_unload()
        weights = None
    # What ends a turn here ends it for everybody who loads the checkpoint.
    model.config, model.generation_config = deepcopy(made.own_configs)
    ends = end_tokens(model, tokenizer)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(str(folder), state_dict=weights)
    own_tokenizer.save_pretrained(str(folder))
    # Who serves the model must show it prompts as training did.
    shared = config.shared
    rendering: dict[str, Any] = {"window": shared.prompt_window, "with_tools": shared.render_tools}
    rendering |= {"max_prompt_tokens": shared.max_prompt_tokens}
    rendering |= {"chat_template_kwargs": dict(trainer.collator.renderer.features.options)}
    _write_json(folder / RENDERING_FILE, rendering)


@contextlib.contextmanager
def without_upstream_warnings() -> Iterator[None]:
    """Hide only the warnings of TRL 1.16 about its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", ".*rollout_func", UserWarning)
        warnings.filterwarnings("ignore", ".*environment_factory", UserWarning)
        yield


def prompts_dataset(data: PreferenceData, acting: Renderer | None = None) -> Dataset:
    """Collect the prompts for generation, with their tools and the columns for rewards and hints.

    The trainer renders and cuts them like those of pairs. For an environment, TRL renders them with
    the environment's own tools. They are cut before, and states whose consensus is a text are left
    out, because environments don't see texts.

    Raises:
        DatasetError: no row is left.
    """
    rows: list[Any] = list(data.prompts)
    rows = rows or [{**row, "consensus": row["chosen"][-1]} for row in data.pairs]
    if acting is not None:
        rows = [row for row in rows if row["consensus"].get("tool_calls")]
    if not rows:
        raise DatasetError(
            "no state has a tool call as its consensus, so there is nothing to train on"
        )
    kinds: dict[str, Any] = {
        "prompt": List(Json()),
        "tools": List(Json()),
        "consensus": Json(),
        "hint": Value("string"),
        "outcome": Value("string"),
        "session_id": Value("string"),
        "state_id": Value("string"),
    }
    table = [{name: row.get(name) for name in kinds} for row in rows]
    if acting is not None:
        kinds.pop("tools")
        table = [
            {name: row[name] for name in kinds} | {"prompt": acting.within_budget(row["prompt"])}
            for row in table
        ]
    return Dataset.from_list(table, features=Features(kinds))


def _write_json(path: Path, values: Mapping[str, Any] | Sequence[Any]) -> None:
    path.write_text(json.dumps(_without_nan(values), indent=2, allow_nan=False) + "\n", "utf-8")


def _without_nan(value: Any) -> Any:
    """Return a value with None for every NaN and infinity, which JSON has no words for."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
