"""A penalty for drifting from the original model, for everything that training shouldn't change.

A preference loss only separates two answers, so the model may lose the form of calls, or plain
language. The penalty is the forward divergence KL(original || trained) per token, on whole texts:
recorded actions that need no change, each behind its own prompt, and general text. Actions that the
run imitates aren't held where they were: the two would pull against each other.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.data.acting import held_texts
from trainer.data.rendering import Renderer
from trainer.engines.trl.config import ComposerConfig
from trainer.engines.trl.teacher import Teacher
from trainer.errors import TrainerConfigError
from trainer.model.causal_lm import head_divergence
from trainer.model.packing import enable_tree_attention, packed_hidden
from trainer.model.scoring import response_states
from trainer.model.tree_layout import TokenSequence, pack_pairs


class Drift:
    """The penalty for a model's distance from its first weights, in nats per token."""

    def __init__(
        self,
        model: nn.Module,
        acted: Sequence[TokenSequence],
        general: Sequence[TokenSequence],
        *,
        n_tokens: int,
        seed: int,
    ) -> None:
        """Keep the untouched weights: a frozen copy, or under PEFT the model with its adapter off."""
        self._untouched = Teacher("base", model, ema_rate=0.0)
        self._acted, self._general = (
            [(list(before), list(held)) for before, held in texts if 0 < len(held) <= n_tokens]
            for texts in (acted, general)
        )
        self._n_tokens, self._seed = n_tokens, seed
        self._is_packed = True
        try:
            enable_tree_attention(model)
        except TrainerConfigError:
            self._is_packed = False

    def draw(self, number: int) -> list[TokenSequence]:
        """Return the texts of a draw, which depends only on its number: whole ones, as many as fit."""
        order = random.Random(f"{self._seed}:{number}")
        left, drawn = self._n_tokens, []
        while self._acted or self._general:
            is_general = not self._acted or (self._general and order.random() < 0.25)
            text = order.choice(self._general if is_general else self._acted)
            if len(text[1]) > left:
                break
            drawn.append(text)
            left -= len(text[1])
        return drawn

    def term(
        self, model: nn.Module, number: int, autocast: Callable[[], AbstractContextManager[None]]
    ) -> Tensor:
        """Return KL(original || trained) of a draw in nats per token, as a scalar with a graph."""
        texts = self.draw(number)
        if not texts:
            return torch.zeros((), device=next(model.parameters()).device)
        with torch.no_grad(), self._untouched.weights(model) as untouched, autocast():
            wanted_NH = self._states(untouched, texts)
        with autocast():
            found_NH = self._states(model, texts)
            # Under PEFT the original's head is the model's own.
            original = self._untouched.copy if self._untouched.copy is not None else model
            divergence_N = head_divergence(model, found_NH, original, wanted_NH, beta=0.0)
        return divergence_N.sum() / sum(len(held) for _, held in texts)

    def _states(self, model: nn.Module, texts: Sequence[TokenSequence]) -> Tensor:
        """Compute the states that predict the counted tokens of all texts, [N, H]."""
        if self._is_packed:
            tree = pack_pairs([], sequences=texts).to(next(model.parameters()).device)
            return packed_hidden(model, tree)[torch.cat(tree.predictors_R)]
        device = next(model.parameters()).device
        states = []
        for before, held in texts:
            ids_1T = torch.tensor([[*before, *held]], device=device)
            states.append(response_states(model, ids_1T, None)[0, len(before) - 1 : -1])
        return torch.cat(states)


def make_drift(
    model: nn.Module,
    renderer: Renderer,
    kept: Sequence[Mapping[str, Any]],
    args: ComposerConfig,
) -> Drift:
    """Make the penalty for drifting from the present model."""
    is_imitated = args.is_sft and args.sft_on in ("consensus", "answers")
    acted = [
        (
            renderer.prompt_ids(row["prompt"], row.get("tools")),
            renderer.side_ids(row, "completion"),
        )
        for row in (() if is_imitated else kept)
    ]
    general = [(ids[:1], ids[1:]) for ids in held_texts(renderer.tokenizer, args.drift_tokens)]
    return Drift(model, acted, general, n_tokens=args.drift_tokens, seed=args.seed)
