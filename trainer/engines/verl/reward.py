"""The consensus reward in VeRL's calling convention."""

import json
from functools import lru_cache
from typing import Any

from trainer.data.rewards import RowReward, load_reward, parse_action


def compute_score(
    data_source: str,  # noqa: ARG001 - VeRL's signature
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> float:
    """Return how well the generated action agrees with the consensus, which is JSON in `ground_truth`."""
    row = json.loads(ground_truth)
    row.setdefault("chosen_action", row["consensus"])
    return float(
        _reward(str((extra_info or {}).get("reward", "consensus")))(parse_action(solution_str), row)
    )


@lru_cache(maxsize=4)
def _reward(path: str) -> RowReward:
    return load_reward(path)
