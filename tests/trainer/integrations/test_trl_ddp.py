"""Two real gloo processes: replicas stay equal, whatever channels each rank has."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("ddp_worker.py")
ROOT = Path(__file__).parents[3]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(folder: Path, n_processes: int, **settings) -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    path = folder / "settings.json"
    path.write_text(json.dumps({"output": str(folder), **settings}))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_processes),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(WORKER), str(path)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_processes)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
    return [
        load_file(folder / f"rank{rank}-of-{n_processes}.safetensors")
        for rank in range(n_processes)
    ]


THREE_STEPS = {
    "alpha_sdpo": 0.5,
    "beta_replay": 1.0,
    "pairs_per_step": 1,
    "n_pairs": 3,
    "max_steps": 3,
}


def report_of_two_like_one(folder: Path, settings: dict, **of_two) -> dict:
    """Train by two ranks and by one, and see that all weights are equal; the first rank's report."""
    first, second = train(folder / "two", 2, per_device_train_batch_size=2, **settings, **of_two)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    report = json.loads((folder / "two" / "rank0.json").read_text())
    assert report["live"]["sdpo"] == 3
    assert report["live"]["replay"] == 3

    (single,) = train(folder / "one", 1, per_device_train_batch_size=4, **settings)
    for name, value in single.items():
        torch.testing.assert_close(first[name], value, atol=5e-5, rtol=1e-3, msg=name)
    return report


@pytest.mark.slow
def test_replicas_stay_equal_with_channels_on_one_rank_only(tmp_path):
    """One pair a step falls on one rank; hints reach the rank whose state failed."""
    report_of_two_like_one(tmp_path, THREE_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["ema", "live"])
def test_sharded_ranks_train_like_one_process(tmp_path, teacher):
    """FSDP2 by Accelerate's own code; ranks differ in which channels they have."""
    report = report_of_two_like_one(
        tmp_path,
        THREE_STEPS | {"teacher": teacher, "save_strategy": "no"},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
        },
    )
    assert report["is_sharded"]
