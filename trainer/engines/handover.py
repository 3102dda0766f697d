"""The common parts of engines that train in their own programs, from files that we write."""

from typing import Any

from transformers import AutoTokenizer

from trainer.data.rendering import Renderer
from trainer.engines.capabilities import check
from trainer.errors import DatasetError, TrainerConfigError
from trainer.settings import RunConfig, SharedSettings


def check_startable(settings: RunConfig) -> None:
    """Check that the engine supports the settings, and that all needed settings are there.

    Raises:
        TrainerConfigError: a setting isn't supported, or one is missing.
    """
    title = check(settings).title
    if settings.model is None:
        raise TrainerConfigError(f"{title} loads a model from disk or the Hub: set model")
    if settings.shared.max_steps < 1:
        raise TrainerConfigError(f"{title} counts in steps: set trl.max_steps")


def make_renderer(settings: RunConfig) -> Renderer:
    """Build the renderer for the model's own tokenizer, with the same cuts as under TRL."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    shared = settings.shared
    return Renderer(
        tokenizer=tokenizer,
        max_prompt_tokens=shared.max_prompt_tokens,
        max_response_tokens=shared.max_response_tokens,
        with_tools=shared.render_tools,
        window=shared.prompt_window,
    )


def require_hints(settings: RunConfig, n_hints: int) -> None:
    """Check that channel 2 has hints to learn from, if it has a weight.

    Raises:
        DatasetError: no row has a hint.
    """
    alpha = settings.shared.alpha_sdpo
    if alpha > 0 and n_hints == 0:
        raise DatasetError(
            f"{settings.dataset}: no row has a hint, and alpha_sdpo={alpha}: set it to 0, or "
            "publish the column `hint`"
        )


def n_states_of_step(shared: SharedSettings, *, n_ranks: int = 1) -> int:
    """Return the number of states in one step. Each gives a group of rollouts.

    Raises:
        TrainerConfigError: the rollouts of a step do not fill whole groups.
    """
    n_rollouts = shared.per_device_train_batch_size * shared.gradient_accumulation_steps * n_ranks
    if n_rollouts % shared.num_generations:
        raise TrainerConfigError(
            f"{n_rollouts} rollouts a step is not a multiple of trl.num_generations="
            f"{shared.num_generations}: change trl.per_device_train_batch_size"
        )
    return n_rollouts // shared.num_generations
