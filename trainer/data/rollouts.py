"""Use recorded actions as rollouts, for policy optimization without generation.

A rollout is one recorded decision with its reward, the agreement with the consensus. A group of
several decisions turns rewards into advantages. A group has the student's own decisions, from one
session if possible, so the baseline is how well that session went. The policy channel then sees no
teacher's action.

The provider never reported the probability of a recorded action. So the behavior policy is the
model at the start of the run. Its log-probs are computed once, and the importance ratio `p / p_old`
uses them for the whole run.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.budget import sides_of
from trainer.data.dataset import PreferenceData
from trainer.data.rendering import Renderer
from trainer.data.types import Message
from trainer.errors import DatasetError

Decision = dict[str, Any]
"""A state with a recorded action. Its keys are `prompt`, `tools`, `hint`, `state_id`, `session_id`,
`consensus`, `action`, all `sides` of its row, the ids `prompt_ids` and `action_ids`, and
`old_logps` (per token)."""


@dataclass(frozen=True)
class RecordedRollouts:
    """Groups of decisions that a trainer replays instead of generating."""

    groups: list[list[Decision]]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per group, for a dataset."""
        return [
            {
                "group": index,
                "prompt": [{"role": "user", "content": str(group[0]["state_id"])}],
                "session_id": group[0]["session_id"],
            }
            for index, group in enumerate(self.groups)
        ]

    def expand(self, rows: Sequence[Mapping[str, Any]], *, first: int, n: int) -> list[Decision]:
        """Return the decision of each row, if every row is repeated n times.

        `first` is the index of `rows[0]` in the batch of all processes.
        """
        expanded = []
        for i, row in enumerate(rows):
            group = self.groups[row["group"]]
            expanded.append(dict(group[(first + i) % n % len(group)]))
        return expanded

    @torch.no_grad()
    def add_behaviour_logps(
        self, model: nn.Module, *, logps_of: Callable[..., Tensor], temperature: float = 1.0
    ) -> None:
        """Compute `old_logps` of every decision with the current `model`.

        `logps_of` is `trainer.model.scoring.chunked_response_logps`, which stands above this room.
        """
        was_training = model.training
        model.eval()
        device = next(model.parameters()).device
        for group in self.groups:
            for decision in group:
                prompt, action = decision["prompt_ids"], decision["action_ids"]
                ids = torch.tensor([prompt + action], device=device)
                mask = torch.tensor([[0] * len(prompt) + [1] * len(action)], device=device)
                logps = logps_of(model, ids, None, mask, temperature=temperature)
                decision["old_logps"] = logps.tolist()
        model.train(was_training)


def student_rollouts(
    data: PreferenceData, renderer: Renderer, *, group_size: int, seed: int = 0
) -> RecordedRollouts:
    """Group the student's own decisions at states with a consensus, `group_size` per group.

    Raises:
        DatasetError: there are no such decisions.
    """
    consensus = {row.get("state_id"): row["consensus"] for row in data.prompts}
    decisions: dict[Any, Decision] = {}
    for i, pair in enumerate(data.pairs):
        key = pair.get("state_id") or i
        decisions.setdefault(
            key, decision_of(pair, pair["rejected"][-1], pair["chosen"][-1], renderer)
        )
    for i, positive in enumerate(data.positives):
        key = positive.get("state_id") or -1 - i
        action = positive["completion"][-1]
        agreed = consensus.get(positive.get("state_id"), action)
        decisions.setdefault(key, decision_of(positive, action, agreed, renderer))
    if not decisions:
        raise DatasetError("the dataset has no decisions: use rollouts=generate")
    ordered = _by_session(list(decisions.values()), seed)
    n_groups = -(-len(ordered) // group_size)
    return RecordedRollouts(
        [
            [ordered[(g * group_size + k) % len(ordered)] for k in range(group_size)]
            for g in range(n_groups)
        ]
    )


def decision_of(
    row: Mapping[str, Any], action: Message, consensus: Message, renderer: Renderer
) -> Decision:
    """Return the decision for an action at a row's state."""
    about = ("prompt", "tools", "hint", "outcome", "state_id", "session_id")
    return {name: row.get(name) for name in about} | {
        "consensus": consensus,
        "action": action,
        "sides": sides_of(row),
        "prompt_ids": renderer.row_prompt_ids(row),
        "action_ids": renderer.response_ids(action, after=row["prompt"]),
    }


def _by_session(decisions: list[Decision], seed: int) -> list[Decision]:
    """Order sessions one after the other, the decisions of each at random."""
    sessions: dict[Any, list[Decision]] = {}
    for decision in decisions:
        sessions.setdefault(decision["session_id"], []).append(decision)
    rng = random.Random(seed)
    for members in sessions.values():
        rng.shuffle(members)
    return [decision for members in sessions.values() for decision in members]


def replay_rollouts(_prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Return the recorded rollouts of a batch, in the form of TRL's `rollout_func`."""
    rows = trainer.rollout_rows
    return {
        "prompt_ids": [row["prompt_ids"] for row in rows],
        "completion_ids": [row["action_ids"] for row in rows],
        # Where no channel weighs them, none were taken.
        "logprobs": [row.get("old_logps") or [0.0] * len(row["action_ids"]) for row in rows],
    }
