"""Estimate the cost of a run and its evaluations, before they begin."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.budget import sides_of
from trainer.data.dataset import PreferenceData
from trainer.data.evaluation import EvaluationCost
from trainer.data.rendering import Renderer
from trainer.settings import SharedSettings

__all__ = ["evaluation_cost"]


def evaluation_cost(
    data: PreferenceData, renderer: Renderer, shared: SharedSettings, *, n_looked_at: int = 32
) -> EvaluationCost:
    """Estimate the cost of a run and its evaluations, from the first rows and the settings.

    The cost is in tokens and not in seconds, so that a run gets the same evaluation on any machine.
    """

    def mean(values: Sequence[int]) -> float:
        return sum(values) / max(len(values), 1)

    def prompt(rows: Sequence[Mapping[str, Any]]) -> float:
        return mean(
            [
                len(renderer.prompt_ids(row["prompt"], row.get("tools"), sides=sides_of(row)))
                for row in rows[:n_looked_at]
            ]
        )

    def sides(rows: Sequence[Mapping[str, Any]]) -> float:
        ids_of = renderer.response_ids
        return mean(
            [len(ids_of(row["chosen"]) + ids_of(row["rejected"])) for row in rows[:n_looked_at]]
        )

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
    return EvaluationCost(
        # The true prompt once for three of the four lists; the blank one is short.
        pair_tokens=held_out + 4 * sides(data.test_pairs),
        prompt_tokens=prompt(data.test_prompts),
        run_tokens=3 * n_steps * step,
    )
