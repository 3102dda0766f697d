"""The settings file that TRL, VeRL and Monarch all read, and what its first step must show."""

from pathlib import Path
from typing import Any

import torch
import yaml

from trainer.data.collator import ComposerDataCollator, add_reference_logps
from trainer.data.dataset import load_preference_data
from trainer.data.sampler import PairSampler
from trainer.engines.settings_file import read_settings
from trainer.losses.channels import replay_per_pair
from trainer.losses.compose import pair_logps

SETTINGS = Path(__file__).parents[2] / "tests/frameworks" / "settings.yaml"


def settings_values(*, dataset: Path, output: Path, model: Path) -> dict[str, Any]:
    """The file with the three paths that differ from run to run."""
    values = yaml.safe_load(SETTINGS.read_text("utf-8"))
    return values | {"dataset": str(dataset), "output": str(output), "model": str(model)}


def share_of_lower_case(message: dict[str, Any], row: dict[str, Any]) -> float:
    """A reward that random weights get by accident, so that advantages differ."""
    text = str(message.get("content") or "")
    return sum(letter.islower() for letter in text) / (1 + len(text))


def first_replay_loss(values: dict[str, Any]) -> float:
    """Channel 3 of the first step by the loss core alone: which pairs, and what they cost."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = read_settings(values, "verl")
    shared = settings.shared
    pairs = load_preference_data(settings.dataset).pairs
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()
    sampler = PairSampler(
        len(pairs),
        batch_size=shared.pairs_per_step,
        seed=shared.seed,
        groups=[row.get("session_id") or i for i, row in enumerate(pairs)],
    )
    collator = ComposerDataCollator(
        tokenizer,
        max_prompt_tokens=shared.max_prompt_tokens,
        max_response_tokens=shared.max_response_tokens,
        with_tools=shared.render_tools,
        window=shared.prompt_window,
    )
    batch = add_reference_logps(model, collator([pairs[i] for i in sampler.step(0)]))
    with torch.no_grad():
        (chosen, n_chosen), (rejected, n_rejected) = pair_logps(model, batch)
    losses = replay_per_pair(
        chosen,
        rejected,
        n_chosen,
        n_rejected,
        batch["dpo_chosen_ref_logprobs"],
        batch["dpo_rejected_ref_logprobs"],
        shared.preference,
    )
    return float(losses.mean())
