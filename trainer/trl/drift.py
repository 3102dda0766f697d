"""A penalty for drifting from the original model, for everything that training on pairs shouldn't change.

A preference loss only separates two answers, so the model may lose the form of calls, or plain
language. The penalty is the forward divergence KL(original || trained) per token, on recorded
actions that need no change and on general text. It costs a few hundred tokens per step for any
batch size.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.acting import other_texts
from trainer.data.rendering import Renderer
from trainer.trl.config import ComposerConfig
from trainer.trl.teacher import Teacher


class Drift:
    """The penalty for a model's distance from its first weights, in nats per token."""

    def __init__(
        self,
        model: nn.Module,
        acted: Sequence[Sequence[int]],
        general: Sequence[Sequence[int]],
        *,
        n_tokens: int,
        seed: int,
    ) -> None:
        """Keep the untouched weights: a frozen copy, or under PEFT the model with its adapter off.

        Args:
            model: the trainee before its first step.
            acted: token ids of prompts with actions that need no change.
            general: token ids of general text; every fourth draw is one of them.
            n_tokens: tokens per draw.
            seed: of the order in which texts are drawn.
        """
        self._untouched = Teacher("base", model, ema_rate=0.0)
        self._acted = [list(text) for text in acted if len(text) > 1]
        self._general = [list(text) for text in general if len(text) > 1]
        self._n_tokens, self._seed = n_tokens, seed

    def draw(self, number: int) -> list[list[int]]:
        """Return the texts of a draw, which depends only on its number. The last text is cut to its end."""
        order = random.Random(f"{self._seed}:{number}")
        left, drawn = self._n_tokens, []
        while left > 1 and (self._acted or self._general):
            is_general = not self._acted or (self._general and order.random() < 0.25)
            text = order.choice(self._general if is_general else self._acted)[-left:]
            drawn.append(text)
            left -= len(text)
        return drawn

    def term(
        self, model: nn.Module, number: int, autocast: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """Return KL(original || trained) of a draw in nats per token, as a scalar with a graph."""
        device = next(model.parameters()).device
        total, n = torch.zeros((), device=device), 0
        for text in self.draw(number):
            ids = torch.tensor([text], device=device)
            with torch.no_grad(), self._untouched.weights(model) as untouched, autocast():
                wanted = untouched(input_ids=ids).logits.float().log_softmax(-1)
            with autocast():
                found = model(input_ids=ids).logits.float().log_softmax(-1)
            total = total + (wanted.exp() * (wanted - found)).sum()
            n += len(text)
        return total / max(n, 1)


def make_drift(
    model: nn.Module,
    renderer: Renderer,
    kept: Sequence[Mapping[str, Any]],
    args: ComposerConfig,
) -> Drift:
    """Make the penalty for drifting from the present model.

    Args:
        model: the trainee before its first step.
        renderer: renderer of the run.
        kept: rows with `prompt` and `completion` whose action needs no change.
        args: arguments of the run.
    """
    acted = [
        renderer.prompt_ids(row["prompt"], row.get("tools"))
        + renderer.response_ids(row["completion"], after=row["prompt"])
        for row in kept
    ]
    general = other_texts(renderer.tokenizer)
    return Drift(model, acted, general, n_tokens=args.drift_tokens, seed=args.seed)
