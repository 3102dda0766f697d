"""One replica that trains with the Hugging Face `Trainer`: `hf_replica.py FOLDER --set KEY=VALUE`."""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from trainer.diloco import ParameterVector
from trainer.diloco.callback import OuterOptions, outer_callbacks, shard, train_replica
from trainer.diloco.environment import replica_place


class Rows(Dataset):
    """Sequences that count upwards."""

    def __init__(self, starts):
        self.starts = starts

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        ids = (torch.arange(16) + self.starts[index]) % 32
        return {"input_ids": ids, "labels": ids}


def main(folder, settings):
    torch.set_num_threads(1)
    values = dict(pair.split("=", 1) for pair in settings if "=" in pair)
    place = replica_place()
    # Over a store, all adopt the weights of the first.
    set_seed(0 if values["outer"] == "torchft" else place.rank)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.requires_grad_(False)
    given = {key.rpartition(".")[2]: value for key, value in values.items() if "options." in key}
    told = {"sync_every": 4, "codec": "ternary", "quorum": 2, "rounds": "synchronous", **given}
    options = OuterOptions(**told)
    callbacks = outer_callbacks(values["outer"], options)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder / f"out-{place.rank}"), max_steps=10, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=5e-3, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=5, disable_tqdm=True,
        ),
        train_dataset=Rows(shard(list(range(32)))),
        callbacks=callbacks,
    )  # fmt: skip
    train_replica(trainer, callbacks)
    digest = hashlib.sha256(ParameterVector(model).read().tobytes()).hexdigest()
    history = [row for row in trainer.state.log_history if "loss" in row]
    result = {
        "hash": digest,
        "contributions": [r.n_contributions for r in getattr(callbacks[0], "reports", [])],
        "loss": [row["loss"] for row in history],
        "n": ParameterVector(model).n,
    }
    (folder / f"result-{place.rank}.json").write_text(json.dumps(result))
    sys.stdout.write(f"done {place.rank}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
