"""The same training runs on the CPU and on a spare device; prints both as one line of JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import fake_device
from tests.trainer.published import write_dataset
from trainer.data.evaluation import EvaluationOptions
from trainer.integrations.settings import RunConfig, TinyOptions
from trainer.integrations.trl.run import run

ALL_CHANNELS = {"alpha_sdpo": 0.5, "beta_replay": 1.0, "dpo_variant": "dpo"}
"""Sigmoid DPO has a reference pass; the rollouts on record have behaviour log-probabilities."""
RUNS: dict[str, dict[str, Any]] = {
    "fast": {"pair_forward": "packed", "teacher": "live", "activation_checkpointing": False},
    "plain": {
        "pair_forward": "padded",
        "max_packed_tokens": 1,
        "teacher": "ema",
        "head": "reference",
    },
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
    steps: list[dict[str, Any]] = []
    settings = {"max_steps": 1, "max_prompt_tokens": 128, "use_cpu": False, "learning_rate": 1e-3}
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
        on_metrics=steps.append,
    )
    return [*steps, {key: value for key, value in report.items() if key != "preflight"}]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dataset = write_dataset(folder / "dataset", n_sessions=3, n_test=1)
    device = fake_device.register()  # autograd counts the devices in its first backward pass
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    on_cpu = {name: one_run(name, dataset, folder / "cpu" / name) for name in RUNS}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    # As on CUDA, `Module.to` must keep tied weights one parameter.
    torch.__future__.set_swap_module_params_on_conversion(True)
    with EmbeddingsOnCpu() as seen:
        on_device = {name: one_run(name, dataset, folder / "device" / name) for name in RUNS}
    sys.stdout.write(
        json.dumps({"cpu": on_cpu, "device": on_device, "n_left_behind": seen.n_calls}) + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
