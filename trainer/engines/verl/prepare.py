"""Convert a settings file and a published dataset to VeRL's input: data, pairs, and configuration."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.dataset import PreferenceData, load_preference_data
from trainer.data.hints import hint_for_row
from trainer.data.rendering import Renderer
from trainer.engines.capabilities import VERL
from trainer.engines.handover import (
    check_startable,
    fitting_rows,
    make_renderer,
    n_states_of_step,
    require_hints,
    write_pairs,
)
from trainer.engines.verl.options import BACKEND, VARIABLE, PluginOptions, plugin_options
from trainer.errors import TrainerConfigError
from trainer.settings import RunConfig, overlaid

logger = logging.getLogger(__name__)

SCHEDULES = {
    "linear": "constant",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
}
RESERVED = frozenset({"pairs_per_pass"})
"""Our own keys in `engines.verl`. All others are VeRL's, with dots."""

PROMPT_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("reward", pa.string()),
                    ("hint", pa.string()),
                    ("prompt_ids", pa.list_(pa.int32())),
                    ("hinted_ids", pa.list_(pa.int32())),
                ]
            ),
        ),
    ]
)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """The files of a run, all in its output folder."""

    config: Path
    """Hydra configuration for `verl.trainer.main_ppo`."""
    options: PluginOptions
    n_prompts: int
    n_hints: int
    n_pairs: int


def prepare(settings: RunConfig) -> PreparedRun:
    """Render the dataset, and write everything that VeRL needs into `settings.output`."""
    check_startable(settings)
    folder = Path(settings.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    data = load_preference_data(settings.dataset, revision=settings.revision)
    renderer = make_renderer(settings)
    rows = prompt_rows(data, renderer, reward=settings.reward)
    n_hints = sum(row["extra_info"]["hinted_ids"] is not None for row in rows)
    require_hints(settings, n_hints)
    prompts = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA), prompts, compression="zstd")
    n_pairs = 0
    if settings.shared.beta_replay > 0:
        n_pairs = write_pairs(folder / "pairs.parquet", data.pairs, renderer)
    options = plugin_options(
        settings,
        pairs=str(folder / "pairs.parquet"),
        reference=str(folder / "reference_logps.json"),
    )
    config = folder / "verl.yaml"
    # JSON is YAML; Hydra reads its 1e-06 as a number, which plain YAML 1.1 would not.
    config.write_text(json.dumps(hydra_config(settings, options, rows, prompts), indent=2), "utf-8")
    return PreparedRun(
        config=config, options=options, n_prompts=len(rows), n_hints=n_hints, n_pairs=n_pairs
    )


def prompt_rows(data: PreferenceData, renderer: Renderer, *, reward: str) -> list[dict[str, Any]]:
    """Render the states for rollouts, with and without hint, in VeRL's columns."""
    states: list[Any] = list(data.prompts)
    states = states or [{**row, "consensus": row["chosen"][-1]} for row in data.pairs]
    rows = []
    for index, state in enumerate(fitting_rows(states, renderer)):
        hint = hint_for_row(state)
        about = {name: state.get(name) for name in ("consensus", "tools", "state_id", "outcome")}
        rows.append(
            {
                "data_source": "replay",
                "agent_name": "replayed_state",
                "prompt": [{"role": "user", "content": str(state.get("state_id") or index)}],
                "reward_model": {"style": "rule", "ground_truth": json.dumps(about)},
                "extra_info": {
                    "index": index,
                    "reward": reward,
                    "hint": hint,
                    "prompt_ids": renderer.row_prompt_ids(state),
                    "hinted_ids": renderer.row_prompt_ids(state, hint=hint) if hint else None,
                },
            }
        )
    return rows


def hydra_config(
    settings: RunConfig,
    options: PluginOptions,
    rows: Sequence[Mapping[str, Any]],
    prompts: Path,
) -> dict[str, Any]:
    """Build VeRL's whole configuration. `engines.verl` in the settings file overrides it.

    Raises:
        TrainerConfigError: the batch doesn't contain whole groups, or the dataset is smaller than
            one batch.
    """
    shared, own = settings.shared, settings.own
    n_ranks = int(own.get("trainer.nnodes", 1)) * int(own.get("trainer.n_gpus_per_node", 1))
    n_states = n_states_of_step(shared, n_ranks=n_ranks)
    if n_states > len(rows):
        raise TrainerConfigError(
            f"a step needs {n_states} states, but the dataset has {len(rows)}: lower trl.per_device_train_batch_size"
        )
    config: dict[str, Any] = {
        "defaults": ["ppo_trainer", "_self_"],
        "hydra": {"run": {"dir": str(prompts.parent / "hydra")}, "output_subdir": None},
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": shared.objective != "dr_grpo",
        },
        "data": {
            "train_files": str(prompts),
            "val_files": str(prompts),
            "train_batch_size": n_states,
            "max_prompt_length": max(len(row["extra_info"]["prompt_ids"]) for row in rows),
            "max_response_length": shared.max_completion_length,
            # Prompts are rendered and cut already; the column that VeRL would measure is a label.
            "filter_overlong_prompts": False,
            "seed": shared.seed,
        },
        "actor_rollout_ref": {
            "model": {
                "path": settings.model,
                "use_fused_kernels": False,
                "enable_gradient_checkpointing": shared.activation_checkpointing is not False,
            },
            "actor": _actor_section(settings, n_states),
            "rollout": _rollout_section(settings, options, rows),
        },
        "reward": {
            "custom_reward_function": {
                "path": "pkg://trainer.engines.verl.reward",
                "name": "compute_score",
            }
        },
        "ray_kwargs": {
            "ray_init": {"runtime_env": {"env_vars": {VARIABLE: options.as_json()}}},
        },
        "trainer": {
            "project_name": "replay",
            "experiment_name": prompts.parent.name,
            "default_local_dir": str(prompts.parent / "checkpoints"),
            "logger": ["console", "file"],
            "nnodes": 1,
            "n_gpus_per_node": 1,
            "total_training_steps": shared.max_steps,
            "total_epochs": shared.max_steps,
            "val_before_train": False,
            "test_freq": -1,
        },
    }
    return overlaid(config, settings, reserved=RESERVED)


def _actor_section(settings: RunConfig, n_states: int) -> dict[str, Any]:
    shared = settings.shared
    schedule = SCHEDULES.get(shared.lr_scheduler_type)
    if schedule is None:
        raise TrainerConfigError(
            f"trl.lr_scheduler_type={shared.lr_scheduler_type}: VeRL knows constant and cosine"
        )
    if schedule != shared.lr_scheduler_type:
        logger.warning("verl: lr_scheduler_type=%s becomes %s", shared.lr_scheduler_type, schedule)
    n_warmup = shared.warmup_steps  # below one it is a share of all steps, as under TRL
    objective = dict(VERL.objectives[shared.objective or "dapo"])
    if shared.objective == "dr_grpo":
        objective = objective | {"loss_scale_factor": shared.max_completion_length}
    return {
        "strategy": BACKEND,
        "ppo_mini_batch_size": n_states,
        "ppo_micro_batch_size_per_gpu": shared.per_device_train_batch_size,
        "data_loader_seed": shared.seed,
        "grad_clip": shared.max_grad_norm,
        "optim": {
            "lr": shared.learning_rate,
            "lr_warmup_steps": int(n_warmup if n_warmup >= 1 else n_warmup * shared.max_steps),
            "lr_scheduler_type": schedule,
            "weight_decay": shared.weight_decay,
            "clip_grad": shared.max_grad_norm,
        },
    } | objective


def _rollout_section(
    settings: RunConfig, options: PluginOptions, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    shared = settings.shared
    longest = max(
        len(row["extra_info"][name] or ()) for row in rows for name in ("prompt_ids", "hinted_ids")
    )
    section: dict[str, Any] = {
        "name": "vllm",
        "n": shared.num_generations,
        "temperature": shared.temperature,
        "tensor_model_parallel_size": 1,
        "log_prob_micro_batch_size_per_gpu": shared.per_device_train_batch_size,
        "max_model_len": longest + shared.max_completion_length + 1,
        "agent": {
            "default_agent_loop": "replayed_state",
            "agent_loop_manager_class": ("trainer.engines.verl.agent_loop.HintedAgentLoopManager"),
        },
    }
    if options.alpha_sdpo > 0:
        # vLLM sends at most 20 log-probs a position unless it is told otherwise.
        section["engine_kwargs"] = {"vllm": {"max_logprobs": max(options.top_k, 20)}}
    return section
