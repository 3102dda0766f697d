"""Measure what a model learned, on sessions that it never saw.

Preference accuracy is the share of held-out pairs whose chosen side has the higher log-probability
per token. With a blank prompt, a model can only use the looks of the two actions. Its gain from
there to the true prompt is what it learned to read, and the figure to judge it by.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from trainer.data.acting import Agreement, consensus_rate, general_loss
from trainer.data.collator import ComposerDataCollator
from trainer.data.rewards import agreement, canonical_calls
from trainer.data.types import PairRow, PromptRow
from trainer.losses.compose import PairForward, pair_logps

Row = TypeVar("Row", bound=Mapping[str, Any])


@dataclass(frozen=True, kw_only=True)
class PreferenceScore:
    """How often, and by how much, a model prefers the chosen side."""

    n_pairs: int
    accuracy: float
    """From 0 to 1. An exact tie counts half."""
    margin: float
    """Mean difference of log-probability per token, in nats."""
    margins: list[float]
    """The margin of each pair."""


@torch.no_grad()
def preference_score(
    model: nn.Module,
    collator: ComposerDataCollator,
    rows: Sequence[PairRow],
    *,
    batch_size: int = 4,
    forward: PairForward = pair_logps,
) -> PreferenceScore:
    """Score pairs. The result is NaN without pairs."""
    asked = {"preference": rows}
    scores = preference_scores(model, collator, asked, batch_size=batch_size, forward=forward)
    return scores["preference"]


@torch.no_grad()
def preference_scores(
    model: nn.Module,
    collator: ComposerDataCollator,
    asked: Mapping[str, Sequence[PairRow]],
    *,
    batch_size: int = 4,
    forward: PairForward = pair_logps,
    on_scored: Callable[[int], object] = lambda _n: None,
) -> dict[str, PreferenceScore]:
    """Score several lists of pairs. Pairs with the same prompt run together, so that they can share tokens."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(
        ((name, i) for name, rows in asked.items() for i in range(len(rows))),
        key=lambda key: collator.renderer.row_prompt_ids(asked[key[0]][key[1]]),
    )
    margins: dict[str, dict[int, float]] = {name: {} for name in asked}
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        batch = collator.pairs([asked[name][i] for name, i in keys])
        batch = {key: value.to(device) for key, value in batch.items()}
        (chosen, n_chosen), (rejected, n_rejected) = forward(model, batch)
        found = (chosen / n_chosen - rejected / n_rejected).tolist()
        for (name, i), margin in zip(keys, found, strict=True):
            margins[name][i] = margin
        on_scored(len(keys))
    model.train(was_training)
    return {name: _score([found[i] for i in sorted(found)]) for name, found in margins.items()}


def _score(margins: Sequence[float]) -> PreferenceScore:
    hits = sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins)
    n_pairs = max(len(margins), 1)
    nothing = float("nan")
    return PreferenceScore(
        n_pairs=len(margins),
        accuracy=hits / n_pairs if margins else nothing,
        margin=sum(margins) / n_pairs if margins else nothing,
        margins=list(margins),
    )


def with_blank_prompts(rows: Sequence[PairRow]) -> list[PairRow]:
    """Replace every prompt by an empty message, to measure what a model prefers without it."""
    return [{**row, "prompt": [{"role": "user", "content": ""}], "sides": []} for row in rows]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How much of the held-out sessions to score."""

    max_pairs: int | None = None
    """Number of pairs to score. By default, as many as `max_share` allows, at most 200."""
    max_prompts: int | None = None
    """Number of states at which the model acts. By default, as many as `max_share` allows, at most 200."""
    max_new_tokens: int = 64
    max_share: float = 0.1
    """Share of the run's work, in tokens, that both evaluations together may take."""
    seed: int = 0
    """Seed of the sample, if not everything is scored."""

    def within(
        self, *, pair_tokens: float, prompt_tokens: float, run_tokens: float
    ) -> "EvaluationOptions":
        """Fill in the missing limits, with half of the share for pairs and half for acting.

        At least eight of each are scored at any cost, which is in tokens of a forward pass.

        Args:
            pair_tokens: mean tokens of a held-out pair with and without its prompt.
            prompt_tokens: mean tokens of a held-out state.
            run_tokens: tokens of all steps. A step counts three times its tokens, because of the
                backward pass.
        """
        paid = self.max_share * run_tokens / 4
        acting = prompt_tokens + DECODED * self.max_new_tokens
        n_pairs = max(8, min(200, int(paid / max(pair_tokens, 1))))
        n_prompts = max(8, min(200, int(paid / max(acting, 1))))
        return replace(
            self,
            max_pairs=n_pairs if self.max_pairs is None else self.max_pairs,
            max_prompts=n_prompts if self.max_prompts is None else self.max_prompts,
        )


DECODED = 4
"""Number of prompt tokens that take as long as one generated token, since generation is sequential.
Measured for a model of 135M parameters on one CPU core: 2.5 in batches of 16 and 3.2 in batches of
eight, but 16 for a prompt alone."""


def stratified(rows: Sequence[Row], n: int | None, *, seed: int, side: str) -> list[Row]:
    """Draw `n` rows, or all, in which every kind of action and every session has its share, give or take one.

    This is systematic sampling: rows are sorted by kind and session, in random order within each,
    and every k-th row is taken from a random start. They are returned in their original order.
    """
    if n is None or n >= len(rows):
        return list(rows)
    if n <= 0:
        return []
    rng = random.Random(f"evaluation:{seed}")
    tickets = [rng.random() for _ in rows]
    order = sorted(range(len(rows)), key=lambda i: (*_stratum(rows[i], side), tickets[i]))
    start, step = rng.random(), len(rows) / n
    drawn = sorted(order[int((start + k) * step)] for k in range(n))
    return [rows[i] for i in drawn]


def _stratum(row: Mapping[str, Any], side: str) -> tuple[str, str]:
    action = row.get(side) or {}
    message = action[-1] if isinstance(action, list) else action
    calls = canonical_calls(message) if message.get("tool_calls") else []
    return (calls[0][0] if calls else "", str(row.get("session_id") or ""))


def evaluate(
    model: Any,
    collator: ComposerDataCollator,
    pairs: Sequence[PairRow],
    prompts: Sequence[PromptRow],
    *,
    options: EvaluationOptions,
    level: Agreement = agreement,
    forward: PairForward = pair_logps,
    batch_size: int = 4,
) -> dict[str, Any]:
    """Measure a model's preference score with and without prompts, its greedy actions, and its general loss.

    `prompt_gain` is the accuracy with the true prompt minus that with a blank one. In a terminal,
    this shows the progress and the remaining time.
    """
    pairs = stratified(pairs, options.max_pairs, seed=options.seed, side="chosen")
    prompts = stratified(prompts, options.max_prompts, seed=options.seed, side="consensus")
    asked = {"preference": pairs, "blank_prompt": with_blank_prompts(pairs)}
    total = sum(map(len, asked.values())) + len(prompts)
    with tqdm(total=total, desc="evaluation", unit="row", disable=None, leave=False) as bar:
        scores = preference_scores(
            model, collator, asked, batch_size=batch_size, forward=forward, on_scored=bar.update
        )
        consensus = consensus_rate(
            model,
            collator.renderer,
            prompts,
            level=level,
            max_new_tokens=options.max_new_tokens,
            on_acted=bar.update,
        )
    return {
        "prompt_gain": scores["preference"].accuracy - scores["blank_prompt"].accuracy,
        **{name: asdict(score) for name, score in scores.items()},
        "consensus": consensus,
        "general_loss": general_loss(model, collator.renderer.tokenizer),
    }
