"""One rank of a run that distills; started by test_distill.py."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tests.trainer.trl.test_distill import options_of, trained
from trainer.data.tiny import make_model


def main(output: Path, folders: Path, *, n_rows: int) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folders / "same")
    model = make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=1)
    trainer, _ = trained(
        output,
        model,
        tokenizer,
        options_of(folders),
        per_device_train_batch_size=n_rows,
        max_steps=2,
    )
    rank, n_ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    weights = {
        name: value.detach().clone()
        for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    save_file(weights, output / f"rank{rank}-of-{n_ranks}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), n_rows=2)
