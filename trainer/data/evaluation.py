"""What a model learned, on sessions it never saw.

Preference accuracy is the share of held-out pairs whose chosen side has the higher log-probability
per token. Three controls ask the same about the same pairs. With a blank prompt, and with the prompt
of another pair, a model can only go by how the two actions look; what it gains with the true prompt
over the blank one is what it learned to read, and the figure to judge it by. With all content of the
actions replaced by filler it can only go by form (length, text or call).
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from trainer.data.acting import Agreement, consensus_rate, general_loss
from trainer.data.budget import sides_of
from trainer.data.collator import ComposerDataCollator
from trainer.data.rewards import agreement, canonical_calls
from trainer.losses.compose import PairForward, pair_logps
from trainer.types import Message, PairRow, PromptRow


@dataclass(frozen=True, kw_only=True)
class PreferenceScore:
    """How often, and by how much, a model prefers the chosen side."""

    n_pairs: int
    accuracy: float
    """In [0, 1]; an exact tie counts half."""
    margin: float
    """Mean difference of log-probability per token, in nats."""


@torch.no_grad()
def preference_score(
    model: nn.Module,
    collator: ComposerDataCollator,
    rows: Sequence[PairRow],
    *,
    batch_size: int = 4,
    forward: PairForward = pair_logps,
) -> PreferenceScore:
    """Score pairs; NaN without any."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    margins: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = collator(rows[start : start + batch_size])
        batch = {key: value.to(device) for key, value in batch.items()}
        (chosen, n_chosen), (rejected, n_rejected) = forward(model, batch)
        margins.extend((chosen / n_chosen - rejected / n_rejected).tolist())
    model.train(was_training)
    hits = sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins)
    n_pairs = max(len(margins), 1)
    nothing = float("nan")
    return PreferenceScore(
        n_pairs=len(margins),
        accuracy=hits / n_pairs if margins else nothing,
        margin=sum(margins) / n_pairs if margins else nothing,
    )


def format_only(rows: Sequence[PairRow]) -> list[PairRow]:
    """Replace every word of both actions by filler of the same length.

    Form stays: text or calls, how many calls and arguments, how long each is. Prompts stay too.
    A pair whose two sides become equal says nothing and is left out.
    """
    masked: list[PairRow] = []
    for row in rows:
        chosen, rejected = (
            [_filler(message) for message in row[side]] for side in ("chosen", "rejected")
        )
        if chosen != rejected:
            masked.append({**row, "chosen": chosen, "rejected": rejected})
    return masked


def with_blank_prompts(rows: Sequence[PairRow]) -> list[PairRow]:
    """Replace every prompt by an empty message: what is preferred now, is whatever was asked."""
    return [{**row, "prompt": [{"role": "user", "content": ""}], "sides": []} for row in rows]


def with_shuffled_prompts(rows: Sequence[PairRow]) -> list[PairRow]:
    """Give every pair the prompt of the pair half the list away; one pair alone keeps its own."""
    half = len(rows) // 2
    others = [*rows[half:], *rows[:half]]
    # The prompt is cut as it is where it belongs.
    return [
        {**row, "prompt": other["prompt"], "sides": sides_of(other)}
        for row, other in zip(rows, others, strict=True)
    ]


_WORD = re.compile(r"\w")


def _filler(message: Message) -> Message:
    filled: Message = {
        "role": message["role"],
        "content": _WORD.sub("x", str(message.get("content") or "")),
    }
    if message.get("tool_calls"):
        calls = [
            {"name": _WORD.sub("x", name), "arguments": _WORD.sub("x", arguments)}
            for name, arguments in canonical_calls(message)
        ]
        filled["content"] += "".join(
            f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}'
            "\n</tool_call>"
            for call in calls
        )
    return filled


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How much of the held-out sessions is scored."""

    max_pairs: int = 200
    max_prompts: int = 12
    max_new_tokens: int = 64


def evaluate(
    model: Any,
    collator: ComposerDataCollator,
    pairs: Sequence[PairRow],
    prompts: Sequence[PromptRow],
    *,
    options: EvaluationOptions,
    level: Agreement = agreement,
    forward: PairForward = pair_logps,
) -> dict[str, Any]:
    """Measure preference score, its controls, greedy actions and general loss of one model.

    `prompt_gain` is the accuracy with the true prompt minus that with a blank one.
    """
    pairs = pairs[: options.max_pairs]
    asked = {
        "preference": pairs,
        "blank_prompt": with_blank_prompts(pairs),
        "shuffled_prompt": with_shuffled_prompts(pairs),
        "format_only": format_only(pairs),
    }
    scores = {
        name: preference_score(model, collator, rows, forward=forward)
        for name, rows in asked.items()
    }
    return {
        "prompt_gain": scores["preference"].accuracy - scores["blank_prompt"].accuracy,
        **{name: asdict(score) for name, score in scores.items()},
        "consensus": consensus_rate(
            model,
            collator.renderer,
            prompts[: options.max_prompts],
            level=level,
            max_new_tokens=options.max_new_tokens,
        ),
        "general_loss": general_loss(model, collator.renderer.tokenizer),
    }
