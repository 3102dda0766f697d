"""The same training runs on the CPU and on a spare device; prints both as one line of JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import fake_device
from tests.support.fake_device import SpareTensor
from tests.trainer.published import write_dataset
from trainer.data.evaluation import EvaluationOptions
from trainer.engines.trl.run import run
from trainer.engines.trl.trainer import ComposerReplicationTrainer
from trainer.model import packing
from trainer.model.tree_attention import FlashTreeAttention
from trainer.settings import RunConfig, TinyOptions

ALL_CHANNELS = {"alpha_sdpo": 0.5, "beta_replay": 1.0, "dpo_variant": "dpo"}
"""Sigmoid DPO has a reference pass; the rollouts on record have behaviour log-probabilities."""
RUNS: dict[str, dict[str, Any]] = {
    "fast": {"pair_forward": "packed", "teacher": "live", "activation_checkpointing": False},
    "plain": {
        "pair_forward": "padded",
        "max_packed_tokens": 1,
        "teacher": "ema",
    },
    "ema": {"teacher": "ema", "max_packed_tokens": 300},
}


class EmbeddingsOnCpu(TorchDispatchMode):
    """Counts forward passes of models that were left on the CPU."""

    n_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and args[0].device.type == "cpu":
            self.n_calls += 1
        return func(*args, **kwargs or {})


def one_run(name: str, dataset: Path, output: Path) -> list[dict[str, Any]]:
    """Every metric of every step, and what the evaluations before and after found."""
    settings = {
        "max_steps": 1,
        "max_prompt_tokens": 128,
        "prompt_window": "tail",
        "use_cpu": False,
        "learning_rate": 1e-3,
    }
    report = run(
        RunConfig(
            tiny=TinyOptions(
                vocab_size=331, hidden_size=32, n_heads=2, n_layers=1, pretraining_steps=1
            ),
            dataset=str(dataset),
            output=str(output),
            evaluation=EvaluationOptions(max_pairs=2, max_prompts=1, max_new_tokens=2),
            trl=settings | ALL_CHANNELS | RUNS[name],
        ),
    )
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [
        *map(json.loads, lines),
        {key: value for key, value in report.items() if key != "preflight"},
    ]


def watch_steps() -> None:
    """Note for what the host waits between a step's forward pass and the end of its update."""

    def around(name: str, *, is_step: bool) -> None:
        method = getattr(ComposerReplicationTrainer, name)

        def watched(self: Any, *args: Any, **options: Any) -> Any:
            SpareTensor.is_watched = is_step and self.model.training
            return method(self, *args, **options)

        setattr(ComposerReplicationTrainer, name, watched)

    around("_compute_loss", is_step=True)
    for name in ("_prepare_inputs", "log", "save_model", "evaluate"):
        around(name, is_step=False)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dataset = write_dataset(folder / "dataset", n_sessions=3, n_test=1)
    device = fake_device.register()  # autograd counts the devices in its first backward pass
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    on_cpu = {name: one_run(name, dataset, folder / "cpu" / name) for name in RUNS}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    # FlexAttention refuses a device that it doesn't know.
    packing.attention_for = FlashTreeAttention
    # As on CUDA, `Module.to` must keep tied weights one parameter.
    torch.__future__.set_swap_module_params_on_conversion(True)
    watch_steps()
    on_device, waits = {}, {}
    with EmbeddingsOnCpu() as seen:
        for name in RUNS:
            SpareTensor.waits.clear()
            on_device[name] = one_run(name, dataset, folder / "device" / name)
            SpareTensor.is_watched = False
            waits[name] = dict(SpareTensor.waits)
    found = {"cpu": on_cpu, "device": on_device, "n_left_behind": seen.n_calls, "waits": waits}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
