"""What a checkpoint does in repositories, and which of two actions it thinks likelier."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tasks import Repository
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.acting import greedy_texts
from trainer.data.collator import ComposerDataCollator
from trainer.data.evaluation import preference_score
from trainer.data.rewards import parse_action
from trainer.model.packing import enable_tree_attention, packed_pair_logps


class Policy:
    """A checkpoint that acts in repositories."""

    def __init__(self, model: Path) -> None:
        """Load it with the trainer's own rendering."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.collator = ComposerDataCollator(
            self.tokenizer, max_prompt_tokens=192, max_response_tokens=64, with_tools=False
        )

    def act(self, asked: Sequence[Repository]) -> list[dict[str, Any]]:
        """Return the greedy action at each repository."""
        ids = [self.collator.renderer.prompt_ids(one.prompt) for one in asked]
        texts = greedy_texts(self.model, self.tokenizer, ids, max_new_tokens=48)
        return [parse_action(text) for text in texts]

    def ranks(self, asked: Sequence[Repository]) -> list[bool]:
        """Say of each repository whether a right action is likelier per token than a wrong one."""
        rows: Any = []
        for one in asked:
            draw = random.Random(one.id)
            right, wrong = one.right_action(draw), one.wrong_action(draw)
            rows.append({"prompt": one.prompt, "chosen": [right], "rejected": [wrong]})
        enable_tree_attention(self.model)  # both sides read their prompt once
        score = preference_score(self.model, self.collator, rows, forward=packed_pair_logps)
        return [margin > 0 for margin in score.margins]
