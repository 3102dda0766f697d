"""Tiny models, and a three-channel trainer on the invented sessions."""

from pathlib import Path

import torch

from tests.trainer.published import rows_of
from trainer.data.rendering import Renderer
from trainer.data.rewards import as_trl_reward, consensus_reward
from trainer.data.rollouts import RecordedRollouts, decision_of
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.model.scoring import chunked_response_logps


def save_tiny_model(folder: Path, rows, *, n_layers: int) -> Path:
    """A tiny model and the tokenizer of `rows` in a folder, as other engines want them."""
    tokenizer = train_tokenizer(corpus(rows), vocab_size=400)
    make_model(tokenizer, hidden_size=32, n_layers=n_layers).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def contrast_rollouts(pairs, renderer) -> RecordedRollouts:
    """Groups of two: the student's and the teachers' action at each state."""
    return RecordedRollouts(
        [
            [
                decision_of(row, row[side][-1], row["chosen"][-1], renderer)
                for side in ("rejected", "chosen")
            ]
            for row in pairs
        ]
    )


PLAIN: dict = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "activation_checkpointing": False,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "max_completion_length": 64,
    "max_prompt_tokens": 256,
    "max_response_tokens": 64,
    "render_tools": False,
    "pairs_per_step": 4,
    "shuffle_dataset": False,
}


def parameters(model) -> dict:
    """Copies of a model's parameters, or of those of a trainer's model."""
    if hasattr(model, "accelerator"):
        model = model.accelerator.unwrap_model(model.model)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_equal(ours, theirs, **tolerance) -> None:
    """Assert that two sets of parameters are equal."""
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], **tolerance)


def make_trainer(output, model, tokenizer, *, rows=None, pairs=None, kept=(), **settings):
    """A three-channel trainer on recorded rollouts of the invented sessions."""
    from trainer.engines.trl import ComposerConfig, ComposerReplicationTrainer

    rows = rows_of(3) if rows is None else rows
    args = ComposerConfig(output_dir=str(output), **(PLAIN | settings))
    renderer = Renderer(
        tokenizer=tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )
    recorded = contrast_rollouts(rows, renderer)
    recorded.add_behaviour_logps(model, logps_of=chunked_response_logps)
    return ComposerReplicationTrainer(
        model,
        as_trl_reward(consensus_reward),
        args,
        pairs=rows if pairs is None else pairs,
        recorded=recorded,
        kept=kept,
        processing_class=tokenizer,
    )
