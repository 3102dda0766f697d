"""Runs a process that sees VeRL on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

HERE = Path(__file__).parent
REPO = HERE.parents[2]


def environment(**more: str) -> dict[str, str]:
    """What makes VeRL run here: CPU platform, one thread, our modules on the path."""
    return {
        **os.environ,
        "PYTHONPATH": f"{HERE}{os.pathsep}{REPO}",
        "VERL_PLATFORM": "cpu",
        # Engines are looked up as on a GPU machine: without the plug-in VeRL finds its own.
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **more,
    }


def run(command: list[str], **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *command],
        env=environment(**more),
        capture_output=True,
        text=True,
        cwd=HERE,
    )
