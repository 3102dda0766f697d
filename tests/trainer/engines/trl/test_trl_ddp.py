"""Two real gloo processes: replicas stay equal, whatever channels each rank has."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.programs import Program, start_ranks


def start(folder: Path, n_processes: int, **settings) -> list[Program]:
    """Start the ranks of one run."""
    folder.mkdir(parents=True)
    path = folder / "settings.json"
    variables = settings.pop("environment", {})
    path.write_text(json.dumps({"output": str(folder), **settings}))
    worker = "tests.trainer.engines.trl.ddp_worker"
    return start_ranks("-m", worker, str(path), n=n_processes, folder=folder, **variables)


def weights_of(folder: Path, ranks: list[Program]) -> list[dict[str, torch.Tensor]]:
    """Wait for the ranks, and read what each has trained."""
    for process in ranks:
        status, errors = process.ended(400)
        assert status == 0, errors[-3000:]
    return [
        load_file(folder / f"rank{rank}-of-{len(ranks)}.safetensors") for rank in range(len(ranks))
    ]


def train(folder: Path, n_processes: int, **settings) -> list[dict[str, torch.Tensor]]:
    return weights_of(folder, start(folder, n_processes, **settings))


THREE_STEPS = {
    "alpha_sdpo": 0.5,
    "beta_replay": 1.0,
    "pairs_per_step": 1,
    "n_pairs": 3,
    "max_steps": 3,
}


SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    },
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
    assert_logs_equal(report, json.loads((folder / "one" / "rank0.json").read_text()))
    return report


def assert_logs_equal(report: dict, expected: dict) -> None:
    """Two ranks say of a step what one says that has all of it."""
    for row, other in zip(report["log"], expected["log"], strict=True):
        names = {name for name in other if name.split("/")[0] in ("policy", "sdpo", "replay")}
        for name in names:
            assert row[name] == pytest.approx(other[name], abs=2e-4), (name, row, other)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [None, "sft"])
def test_replicas_stay_equal_with_channels_on_one_rank_only(tmp_path, objective):
    """One pair a step falls on one rank; hints reach the rank whose state failed."""
    report_of_two_like_one(tmp_path, THREE_STEPS | {"objective": objective})


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["ema", "live"])
def test_sharded_ranks_train_like_one_process(tmp_path, teacher):
    """FSDP2 by Accelerate's own code; ranks differ in which channels they have."""
    report = report_of_two_like_one(
        tmp_path,
        THREE_STEPS | {"teacher": teacher, "save_strategy": "no"},
        **SHARDED,
    )
    assert report["is_sharded"]


@pytest.mark.slow
def test_two_replicas_of_two_sharded_ranks_are_two_of_one(tmp_path):
    """Replicas exchange by their first ranks; all ranks of all replicas end at the same weights."""

    def trained(folder: Path, n_ranks: int) -> list[dict[str, torch.Tensor]]:
        outer = {"uri": f"file://{folder}/store", "sync_every": 2, "codec": "fp32", "quorum": 2}
        outer |= {"rounds": "synchronous"}
        settings = THREE_STEPS | {
            "max_steps": 4,
            "per_device_train_batch_size": 4 // n_ranks,
            "save_strategy": "no",
            "teacher": "live",
            "ddp_timeout": 2_000,
            "outer": outer,
        }
        replicas = [
            start(
                folder / f"replica-{rank}",
                n_ranks,
                environment={"REPLICA_RANK": str(rank), "REPLICA_COUNT": "2"},
                **settings,
                **(SHARDED if n_ranks > 1 else {}),
            )
            for rank in range(2)
        ]
        return [
            weights
            for rank, ranks in enumerate(replicas)
            for weights in weights_of(folder / f"replica-{rank}", ranks)
        ]

    first, *others = trained(tmp_path / "grouped", 2)
    single, _ = trained(tmp_path / "single", 1)
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
        torch.testing.assert_close(value, single[name], atol=5e-5, rtol=1e-3, msg=name)
