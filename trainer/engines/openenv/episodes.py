"""Recorded states as episodes: the calls of one decision, scored against the consensus."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.dataset import PreferenceData
from trainer.data.rewards import RowReward
from trainer.errors import DatasetError
from trainer.types import Message, Tool

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ReplayTasks:
    """The recorded states by split, and all tools of any of them."""

    splits: dict[str, list[Row]]
    tools: list[Tool]
    n_without_call: int
    """Number of states that are left out because their consensus is a text. An environment sees only calls."""

    def row(self, split: str, index: int) -> Row:
        """Return the row at an index of a split.

        Raises:
            DatasetError: the split or index doesn't exist.
        """
        rows = self.splits.get(split)
        if rows is None or not 0 <= index < len(rows):
            raise DatasetError(f"there is no state {index} in the split {split!r}")
        return rows[index]

    def find(self, state_id: str) -> Row:
        """Return the row of a state.

        Raises:
            DatasetError: no split has the state.
        """
        for rows in self.splits.values():
            for row in rows:
                if row.get("state_id") == state_id:
                    return row
        raise DatasetError(f"there is no state {state_id!r} with a tool call as its consensus")


def replay_tasks(data: PreferenceData) -> ReplayTasks:
    """Collect the states of a published dataset at which the teachers agreed on tool calls.

    Raises:
        DatasetError: there is none, or none has recorded tools.
    """
    splits: dict[str, list[Row]] = {}
    n_without_call = 0
    for split, rows in (("train", data.prompts), ("test", data.test_prompts)):
        kept = [row for row in rows if row["consensus"].get("tool_calls")]
        n_without_call += len(rows) - len(kept)
        splits[split] = list(kept)
    tools = union_of_tools([row for rows in splits.values() for row in rows])
    if not any(splits.values()):
        raise DatasetError("the dataset has no 'prompts' whose consensus is a tool call")
    if not tools:
        raise DatasetError("no row of 'prompts' records its tools: an agent could not call any")
    if n_without_call:
        logger.info("%d states are left out: their consensus is a text", n_without_call)
    return ReplayTasks(splits, tools, n_without_call)


def union_of_tools(rows: Sequence[Row]) -> list[Tool]:
    """Collect each tool once by name. If rows disagree, take the schema with most parameters."""
    best: dict[str, Tool] = {}
    for row in rows:
        for tool in row.get("tools") or ():
            name = tool["function"]["name"]
            if name not in best or _n_parameters(tool) > _n_parameters(best[name]):
                best[name] = tool
    return [best[name] for name in sorted(best)]


def _n_parameters(tool: Tool) -> int:
    return len((tool["function"].get("parameters") or {}).get("properties") or {})


@dataclass
class Episode:
    """One decision at a recorded state. It ends after as many calls as the consensus has."""

    row: Row
    reward_of: RowReward
    calls: list[dict[str, Any]] = field(default_factory=list)
    score: float = 0.0
    """Reward of the calls so far."""

    @property
    def is_done(self) -> bool:
        """Return whether the decision is complete."""
        return len(self.calls) >= len(self.row["consensus"]["tool_calls"])

    def call(self, name: str, arguments: Mapping[str, Any]) -> float:
        """Add a call to the decision, and return the change of the reward. The rewards of an episode add up.

        Raises:
            DatasetError: the decision is already complete.
        """
        if self.is_done:
            raise DatasetError("the episode is over: reset to the next state")
        number = len(self.calls)
        function = {"name": name, "arguments": json.dumps(dict(arguments), sort_keys=True)}
        self.calls.append({"id": f"call_{number}", "type": "function", "function": function})
        action: Message = {"role": "assistant", "content": "", "tool_calls": list(self.calls)}
        before, self.score = self.score, float(self.reward_of(action, self.row))
        return self.score - before
