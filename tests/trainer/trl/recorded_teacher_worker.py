"""One rank of a run whose teacher is on record; started by test_recorded_teacher.py."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.trainer.published import rows_of
from tests.trainer.trl.test_recorded_teacher import build, scored_by
from trainer.data.rendering import Renderer
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.trl.run import without_upstream_warnings


def main(output: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(corpus(rows_of(3)), vocab_size=512)
    renderer = Renderer(
        tokenizer=tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )
    model, teacher = (
        make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=seed) for seed in (1, 5)
    )
    answers, _ = scored_by(teacher.eval(), renderer)
    with without_upstream_warnings():
        # Of one answer a step, one of two ranks has none.
        trainer = build(output, model, renderer, answers, pairs_per_step=1, max_steps=3)
        trainer.train()
    rank, n_ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    trained = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    weights = {name: value.detach().clone() for name, value in trained}
    save_file(weights, output / f"rank{rank}-of-{n_ranks}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
