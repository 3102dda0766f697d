"""Choose the pairs of a step by a pure function of its number, so that resuming needs no state."""

import json
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from trainer.errors import DatasetError


def weight_of(row: Mapping[str, Any]) -> float:
    """Return the weight of a pair, by default 1."""
    weight = row.get("weight")
    return 1.0 if weight is None else float(weight)


def preference_weight(row: Mapping[str, Any]) -> float:
    """Return the weight of a row as a pair: 0 if both sides are the same action, which is only imitated."""
    return weight_of(row) if row["chosen"] != row["rejected"] else 0.0


def imitation_weight(row: Mapping[str, Any]) -> float:
    """Return the weight of a chosen side that is imitated: how surely it is right, where a row says so."""
    right = row.get("p_chosen_right")
    return weight_of(row) if right is None or not weight_of(row) else float(right)


def balance_of(row: Mapping[str, Any]) -> float:
    """Return the factor of a pair's preference weight that balances a dataset, by default 1."""
    return float(row.get("balance", 1.0))


def groups_of(rows: Sequence[Mapping[str, Any]], by: str = "session") -> list[str]:
    """Return the group of every pair: its session, or with `actions` the pairs with the same two actions.

    If one state prefers an action to another, and a second state prefers the reverse, then in one
    step the looks of the actions cancel out and only the prompts matter. In separate steps, each
    step would first learn to like one of the two actions. Rows that are only imitated, whose sides
    are one action, stay with their sessions: a step of one action alone teaches to do it always.
    """
    sessions = [f"session:{row.get('session_id') or i}" for i, row in enumerate(rows)]
    if by == "session":
        return sessions
    sides = [tuple(_action_key(row.get(side)) for side in ("chosen", "rejected")) for row in rows]
    there = set(sides)
    return [
        f"sides:{min(both)}{max(both)}" if both[0] != both[1] and both[::-1] in there else session
        for session, both in zip(sessions, sides, strict=True)
    ]


def _action_key(side: Any) -> str:
    """Write an action without the ids of its calls, which differ from state to state."""
    messages = [
        {
            "content": message.get("content"),
            "calls": [call.get("function") for call in message.get("tool_calls") or ()],
        }
        for message in side or ()
    ]
    return json.dumps(messages, sort_keys=True, default=str)


class PairSampler:
    """The sampler of pairs in epochs of random order, `batch_size` per step.

    Pairs of one group (see `groups_of`) stay together in a step, up to its size, because their
    prompts share a prefix. No session fills many steps. Every process of a run builds the same
    sampler, and takes its own part of each step.
    """

    def __init__(
        self,
        n_pairs: int,
        *,
        batch_size: int,
        seed: int = 0,
        groups: Sequence[Hashable] | None = None,
    ) -> None:
        """Set up.

        Raises:
            DatasetError: no pairs.
        """
        if n_pairs < 1:
            raise DatasetError("there is no pair to sample: turn channel 3 off (beta_replay=0)")
        self.n_pairs, self.batch_size, self.seed = n_pairs, batch_size, seed
        members_of: dict[Hashable, list[int]] = {}
        for index in range(n_pairs):
            key = index if groups is None else groups[index]
            members_of.setdefault(key, []).append(index)
        self._blocks = [
            members[start : start + batch_size]
            for members in members_of.values()
            for start in range(0, len(members), batch_size)
        ]
        self._orders: dict[int, list[int]] = {}

    def step(self, index: int) -> list[int]:
        """Return the indexes of the pairs in optimizer step `index`, counted from 0."""
        start = index * self.batch_size
        return [
            self._order(position // self.n_pairs)[position % self.n_pairs]
            for position in range(start, start + self.batch_size)
        ]

    def part(self, index: int, *, part: int, n_parts: int) -> list[int]:
        """Return the part of one process and micro-batch in step `index`. It may be empty."""
        drawn = self.step(index)
        return drawn[len(drawn) * part // n_parts : len(drawn) * (part + 1) // n_parts]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            rng = random.Random(f"{self.seed}:{epoch}")
            blocks = self._blocks.copy()
            rng.shuffle(blocks)
            order = [index for block in blocks for index in block]
            self._orders = {epoch: order} | {
                e: o for e, o in self._orders.items() if e == epoch - 1
            }
        return self._orders[epoch]
