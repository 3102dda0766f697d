"""Balance the pairs that the untouched model ranks right with those that it ranks wrong.

A pair is where teachers agree on an action that the agent did not take. If the model is like the
agent, it prefers the rejected side of nearly every pair. Then the rule "not what I would do" tells
the sides apart, at every state and without reading it, and a preference loss learns this rule
sooner than what the states have in common. It also follows the rule where the model was right.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.data.collator import ComposerDataCollator
from trainer.data.evaluation import preference_score
from trainer.data.sampler import preference_weight
from trainer.data.types import PairRow
from trainer.engines.trl.config import ComposerConfig
from trainer.model.scoring import PairForward


def refusal_of(n_ranked_right: int, n_ranked_wrong: int) -> str | None:
    """Return why pairs can't be balanced of which the untouched model ranks so many right, or None."""
    n = n_ranked_right + n_ranked_wrong
    if n == 0 or (n_ranked_right and n_ranked_wrong):
        return None
    which = "wrong" if n_ranked_wrong else "right"
    return (
        f"the untouched model ranks all {n} pairs {which}, so a rule that reads no prompt tells their "
        "sides apart (trl.balance_pairs=false uses them all the same)"
    )


def balanced(
    rows: Sequence[PairRow],
    model: Any,
    collator: ComposerDataCollator,
    forward: PairForward,
    args: ComposerConfig,
) -> tuple[list[PairRow], dict[str, int]]:
    """Score all pairs, and weigh down the larger of both kinds to the weight of the smaller one.

    So no rule that depends on the model's own preference alone is right for more than half of the
    weight. Ranks share the work, which is one forward pass of each pair. An exact tie counts as
    wrong.

    Returns:
        All rows with `balance`, the factor of their weight as pairs, and how many of them the
            untouched model ranks right and wrong, as a report has it.
    """
    real = [i for i, row in enumerate(rows) if preference_weight(row) > 0]
    mine = real[args.process_index :: args.world_size]
    margins = preference_score(
        model, collator, [rows[i] for i in mine], forward=forward, batch_size=forward.batch_size
    ).margins
    is_right = {i: margin > 0 for i, margin in zip(mine, margins, strict=True)}
    if args.world_size > 1:
        parts: list[dict[int, bool]] = [{}] * args.world_size
        torch.distributed.all_gather_object(parts, is_right)
        is_right = {i: each for part in parts for i, each in part.items()}
    totals = {
        side: sum(preference_weight(rows[i]) for i in real if is_right[i] is side)
        for side in (True, False)
    }
    least = min(totals.values())
    factors = {i: least / totals[is_right[i]] for i in real}
    n_right = sum(is_right.values())
    balanced_rows: list[PairRow] = [
        {**row, "balance": factors.get(i, 1.0)} for i, row in enumerate(rows)
    ]
    return balanced_rows, {"n_ranked_right": n_right, "n_ranked_wrong": len(real) - n_right}
