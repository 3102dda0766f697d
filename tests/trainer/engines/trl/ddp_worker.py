"""One rank of a data-parallel run; started by test_trl_ddp.py, writes its weights."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests.trainer.published import rows_of
from tests.trainer.training import make_trainer
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.diloco.callback import OuterOptions, outer_callbacks, shard, train_replica
from trainer.diloco.environment import replica_place
from trainer.engines.trl.run import without_upstream_warnings


def shard_on_cpu() -> None:
    """Let Accelerate shard on gloo as it does on GPUs; on a CPU it ignores the FSDP settings."""
    make_state = AcceleratorState.__init__

    def make_sharded_state(self: AcceleratorState, *args: Any, **options: Any) -> None:
        make_state(self, *args, **options)
        if (plugin := options.get("fsdp_plugin")) is not None:
            self.fsdp_plugin = plugin
            # Every further AcceleratorState() copies the type from here.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = make_sharded_state


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(settings_path: str) -> None:
    torch.set_num_threads(1)
    settings = json.loads(Path(settings_path).read_text())
    output, n_pairs = Path(settings.pop("output")), settings.pop("n_pairs")
    options = OuterOptions(**settings.pop("outer", {}))
    if settings.get("fsdp"):
        shard_on_cpu()
    place, rows = replica_place(), rows_of(3)
    tokenizer = train_tokenizer(corpus(rows), vocab_size=512)
    loops = outer_callbacks("object_store" if options.uri else "none", options)
    rows = shard(rows_of(6), place) if place else rows
    model = make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=1)
    with without_upstream_warnings():
        trainer = make_trainer(
            output, model, tokenizer, rows=rows, pairs=rows[:n_pairs], **settings
        )
        for loop in loops:
            trainer.add_callback(loop)
        train_replica(trainer, loops)
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    rank = trainer.accelerator.process_index
    save_file(
        {name: whole(value).clone() for name, value in state.items() if name != "lm_head.weight"},
        output / f"rank{rank}-of-{trainer.accelerator.num_processes}.safetensors",
    )
    is_sharded = any(isinstance(value, DTensor) for value in state.values())
    report = {
        "is_sharded": is_sharded,
        "live": trainer.n_live_steps,
        "log": trainer.state.log_history,
    }
    (output / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
