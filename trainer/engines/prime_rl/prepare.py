"""`replay-train prime_rl`: write a settings file and a dataset in the form that PRIME-RL's launchers read.

PRIME-RL starts three programs with its own Python, so this trains nothing. It writes files and
names the commands.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data.dataset import load_preference_data
from trainer.data.folders import sole_writer
from trainer.data.hints import hint_for_row
from trainer.engines.handover import (
    check_startable,
    make_renderer,
    n_states_of_step,
    require_hints,
    write_pairs,
)
from trainer.engines.settings_file import read_settings
from trainer.errors import DatasetError, TrainerConfigError
from trainer.losses.channels import PREFERENCE_NUMBERS
from trainer.settings import RunConfig, overlaid

logger = logging.getLogger(__name__)

PROGRAMS = "recipes/prime_rl/README.md"
"""The key that says which programs to start."""


def prepare_prime_rl(values: Mapping[str, Any]) -> dict[str, Any]:
    """Write `rl.toml` and the tokenized pairs into the output folder, and report the command to run.

    Raises:
        DatasetError: the dataset has no states to act at.
    """
    settings = read_settings(values, "prime_rl")
    check_startable(settings)
    folder = Path(settings.output).absolute()
    with sole_writer(folder):
        data = load_preference_data(settings.dataset, revision=settings.revision)
        if not data.prompts:
            raise DatasetError(f"{settings.dataset} has no `prompts` to roll out from")
        n_hints = sum(hint_for_row(row) is not None for row in data.prompts)
        require_hints(settings, n_hints)
        n_pairs = 0
        if settings.shared.beta_replay > 0:
            n_pairs = write_pairs(folder / "pairs.parquet", data.pairs, make_renderer(settings))
        config = rl_config(settings, folder)
        (folder / "rl.toml").write_text(as_toml(config), "utf-8")
    return {
        "config": str(folder / "rl.toml"),
        "states": len(data.prompts),
        "hints": n_hints,
        "pairs": n_pairs,
        "next": PROGRAMS,
    }


def rl_config(settings: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the whole `rl.toml`. `engines.prime_rl` in the settings file overrides it.

    Raises:
        TrainerConfigError: a step doesn't contain whole groups.
    """
    shared = settings.shared
    n_states = n_states_of_step(shared)
    # Its batches are counted in traces, and replayed ones count.
    n_replayed = 2 * shared.pairs_per_step if shared.beta_replay > 0 else 0
    if n_replayed % shared.num_generations:
        raise TrainerConfigError(
            f"trl.pairs_per_step={shared.pairs_per_step}: PRIME-RL's batch must hold whole groups of "
            f"trl.num_generations={shared.num_generations} traces, and a pair is two of them: "
            "make twice pairs_per_step a multiple of num_generations"
        )
    config: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": shared.max_steps,
        "seq_len": shared.max_prompt_tokens + shared.max_completion_length,
        "model": {"name": settings.model},
        "trainer": {
            "optim": {
                "lr": shared.learning_rate,
                "weight_decay": shared.weight_decay,
                "max_norm": shared.max_grad_norm,
            },
        },
        "orchestrator": {
            "batch_size": n_states * shared.num_generations + n_replayed,
            "group_size": shared.num_generations,
            "algo": {
                "type": "three_channels",
                "alpha_sdpo": shared.alpha_sdpo,
                "beta_replay": shared.beta_replay,
                "policy_weight": shared.policy_weight,
                "dpo_variant": shared.dpo_variant,
                **{name: getattr(shared, name) for name in PREFERENCE_NUMBERS},
                "pairs": str(folder / "pairs.parquet"),
                "pairs_per_step": shared.pairs_per_step,
                "groups_per_step": n_states,
                "reference": str(folder / "reference_logps.json"),
                "seed": shared.seed,
            },
            "train": {
                "sampling": {
                    "temperature": shared.temperature,
                    "max_completion_tokens": shared.max_completion_length,
                },
                "source": [
                    {
                        "name": "replay",
                        "env": {
                            "taskset": {
                                "id": "replay_states",
                                "dataset": settings.dataset,
                                "task": {"reward": settings.reward},
                            },
                            "agent": {
                                "harness": {"id": "replay_states"},
                                "runtime": {"type": "subprocess"},
                            },
                        },
                    }
                ],
            },
        },
    }
    return overlaid(config, settings)


def as_toml(config: Mapping[str, Any], prefix: str = "") -> str:
    """Return a nested mapping as TOML. Lists of mappings become arrays of tables."""
    lines: list[str] = []
    tables = {k: v for k, v in config.items() if isinstance(v, Mapping)}
    arrays = {
        k: v
        for k, v in config.items()
        if isinstance(v, list) and v and all(isinstance(row, Mapping) for row in v)
    }
    for key, value in config.items():
        if key not in tables and key not in arrays:
            lines.append(f"{key} = {json.dumps(value)}")
    for key, table in tables.items():
        lines += ["", f"[{prefix}{key}]", as_toml(table, f"{prefix}{key}.")]
    for key, rows in arrays.items():
        for row in rows:
            lines += ["", f"[[{prefix}{key}]]", as_toml(row, f"{prefix}{key}.")]
    return "\n".join(lines) + ("\n" if not prefix else "")
