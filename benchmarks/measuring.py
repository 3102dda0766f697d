"""What the trainer's benchmarks measure with: seconds and peak memory on a CPU or a GPU.

On a CPU, seconds are the process's own user and system time and memory is its peak RSS. On CUDA,
seconds are wall time between two synchronizations and memory is what the allocator handed out at
most, the weights included.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Device = Literal["cpu", "cuda"]
SECONDS = {"cpu": "CPU-s", "cuda": "GPU-s"}
MEMORY = {"cpu": "peak RSS", "cuda": "peak GPU memory"}
_RSS_PER_MIB = 1024 if sys.platform != "darwin" else 1024 * 1024


def spent_s(device: Device) -> float:
    if device == "cpu":
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def peak_mib(device: Device) -> float:
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _RSS_PER_MIB
    import torch

    return torch.cuda.max_memory_allocated() / 2**20


def machine_of(device: Device) -> str:
    import platform

    if device == "cpu":
        return platform.machine()
    import torch

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


PYTHON = os.environ.get("BENCHMARK_PYTHON", sys.executable)
"""What variants and steps are run by; not `PYTHON`, by which make is told what to make an environment of."""


def arguments_of(
    parser: argparse.ArgumentParser, measure: Callable[..., dict[str, Any]]
) -> argparse.Namespace:
    """Parse the command line; in a process that `measure_fresh` began, measure and end."""
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, json.loads(args.sizes))))
        raise SystemExit
    return args


def measure_fresh(script: str, variant: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """One variant of `script` in a process of its own, which prints its figures as a JSON line."""
    child = subprocess.run(
        [PYTHON, script, "--variant", variant, "--sizes", json.dumps(sizes)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(child.stdout.splitlines()[-1])
