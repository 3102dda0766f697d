"""Recorded actions as rollouts: policy optimization without generating anything.

A group is the actions on record at one state: the student's own and the teachers' consensus. The
provider never told us the probability of a recorded action, so the behaviour policy is the model
as it was when the run began: its log-probs are taken once, and the importance ratio
`p / p_old` is against them for the whole run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.data.rendering import Renderer
from trainer.losses.compose import model_logits
from trainer.losses.logps import token_logps
from trainer.types import PairRow


def recorded_rollouts(rows: Sequence[PairRow], renderer: Renderer) -> list[dict[str, Any]]:
    """One row per state: prompt, hint, consensus, and the recorded actions with their token ids."""
    rollouts = []
    for row in rows:
        actions = [row["rejected"][-1], row["chosen"][-1]]
        rollouts.append(
            {
                "prompt": row["prompt"],
                "tools": row.get("tools"),
                "hint": row.get("hint"),
                "state_id": row.get("state_id"),
                "consensus": row["chosen"][-1],
                "prompt_ids": renderer.prompt_ids(row["prompt"], row.get("tools")),
                "actions": actions,
                "action_ids": [renderer.response_ids(action) for action in actions],
            }
        )
    return rollouts


@torch.no_grad()
def add_behaviour_logps(
    model: nn.Module, rollouts: list[dict[str, Any]], *, temperature: float = 1.0
) -> None:
    """Fill `action_logps`: per-token log-probs of every recorded action under `model` as it is."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    for row in rollouts:
        row["action_logps"] = []
        for action_ids in row["action_ids"]:
            ids = torch.tensor([row["prompt_ids"] + action_ids], device=device)
            logps = token_logps(model_logits(model, ids, None), ids, temperature)
            row["action_logps"].append(logps[0, -len(action_ids) :].tolist())
    model.train(was_training)


def replay_rollouts(_prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """TRL's `rollout_func`: the k-th copy of a prompt gets the k-th recorded action."""
    rows = trainer.rollout_rows
    first = trainer.accelerator.process_index * len(rows)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "action", "old_logps")
    }
    for i, row in enumerate(rows):
        k = (first + i) % trainer.num_generations % len(row["action_ids"])
        columns["prompt_ids"].append(row["prompt_ids"])
        columns["completion_ids"].append(row["action_ids"][k])
        columns["logprobs"].append(row["action_logps"][k])
        columns["old_logps"].append(row["action_logps"][k])
        columns["action"].append(row["actions"][k])
    return columns
