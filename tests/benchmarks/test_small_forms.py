"""The benchmarks' small form runs as one command, and its variants compute the same loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import forked, forked_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_one_command_runs_everything_that_needs_a_gpu_and_compares_equal_steps(tmp_path):
    """On the CPU, in small shapes."""
    file = tmp_path / "gpu.json"
    done = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--dry", "--json", file],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | dict.fromkeys(["PYTHON", "BENCHMARK_PYTHON"], forked_python()),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    dry = {row["step"]: row for row in json.loads(file.read_text())["steps"]}
    assert {row["status"] for row in dry.values()} == {0}
    assert "1 passed" in dry["tests"]["last_lines"][-1]
    report = json.loads("\n".join(dry["recompilations"]["last_lines"]))
    assert len(set(report["tree_lengths"])) == 5

    pairs = dry["pairs small"]["figures"]
    assert_equal(row["loss"] for row in pairs["rows"])
    assert_equal(row["grad_norm"] for row in pairs["rows"])
    assert pairs["n_tokens"]["one_by_one"] > 3 * pairs["n_tokens"]["packed"]
    rollouts = dry["whole_step small"]["figures"]["rows"]
    assert rollouts[0]["policy_loss"] != 0
    assert_equal(row["policy_loss"] for row in rollouts)


def assert_equal(numbers):
    first, *others = numbers
    assert others == pytest.approx([first] * len(others), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_three_days_of_the_month_end_with_everything_in_and_paid_once(tmp_path):
    file = tmp_path / "month.json"
    command = [sys.executable, BENCHMARKS / "month.py", "--small", "--json", file]
    done = subprocess.run(
        forked(command, children=forked_python()),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "crash" in done.stdout
    report = json.loads(file.read_text())
    assert report["runs"] == {"SUCCESS": 8, "FAILURE": 1}
    assert report["sessions"] == 6
    assert report["dataset_rows"] > 0
