"""The benchmarks' small form runs as one command, and its variants compute the same loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import forked, forked_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_small(name, folder):
    file = folder / f"{name}.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--small", "--json", file]
    done = subprocess.run(
        forked(command, children=forked_python()),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """Figures by step of all that a GPU is to run, on the CPU in small shapes."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--dry", "--json", file],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | dict.fromkeys(["PYTHON", "BENCHMARK_PYTHON"], forked_python()),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["step"]: row for row in json.loads(file.read_text())["steps"]}


@pytest.mark.slow
def test_one_command_runs_everything_that_needs_a_gpu(dry):
    assert {row["status"] for row in dry.values()} == {0}
    assert "1 passed" in dry["tests"]["last_lines"][-1]
    report = json.loads("\n".join(dry["recompilations"]["last_lines"]))
    assert len(set(report["tree_lengths"])) == 5


@pytest.mark.slow
def test_losses_benchmark_compares_equal_losses(dry):
    case = dry["losses small"]["figures"]["cases"][0]
    rows = [row for row in case["rows"] if "absent" not in row]
    assert {"fused", "recompute", "trl", "naive"} <= {row["variant"] for row in rows}
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(rows), abs=1e-5)
    norms = [row["weight_grad_norm"] for row in rows]
    assert norms == pytest.approx([norms[0]] * len(rows), rel=1e-4)
    assert set(case["ratio_over_fused"]) == {row["variant"] for row in rows[1:]}


@pytest.mark.slow
def test_pairs_benchmark_compares_equal_steps(dry):
    report = dry["pairs small"]["figures"]
    losses = [row["loss"] for row in report["rows"]]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    norms = [row["grad_norm"] for row in report["rows"]]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-3)
    assert report["n_tokens"]["one_by_one"] > 3 * report["n_tokens"]["packed"]


@pytest.mark.slow
def test_whole_step_benchmark_compares_equal_rollouts(dry):
    rows = dry["whole_step small"]["figures"]["rows"]
    losses = [row["policy_loss"] for row in rows]
    assert losses[0] != 0
    assert losses == pytest.approx([losses[0]] * 2, abs=1e-5)


@pytest.mark.slow
def test_teacher_benchmark_compares_equal_states(dry):
    report = dry["teacher small"]["figures"]
    assert report["is_bitwise_equal"]
    assert report["n_reused"] == 256


@pytest.mark.slow
def test_orchestration_benchmark_beats_stock_storage(tmp_path):
    printed, report = run_small("orchestration", tmp_path)
    assert "click to success s" in printed
    assert "backfill of unchanged s" in printed
    assert report["stock_over_fast_cpu"] > 1.2
    assert report["cpu_ms_per_batch_and_asset"] <= 40, "few batches share the fixed costs"


@pytest.mark.slow
def test_three_days_of_the_month_end_with_everything_in_and_paid_once(tmp_path):
    printed, report = run_small("month", tmp_path)
    assert "crash" in printed
    assert report["runs"] == {"SUCCESS": 8, "FAILURE": 1}
    assert report["sessions"] == 6
    assert report["dataset_rows"] > 0


def test_committed_figures_meet_the_marks():
    losses = json.loads((BENCHMARKS / "results" / "losses.json").read_text())
    small, large = losses["cases"]
    assert small["ratio_over_fused"]["trl"] >= 3.0
    assert large["sizes"]["n_tokens"] == 4096
    assert large["rows"][0]["peak_mib"] <= 1.7 * 1024
    pairs = json.loads((BENCHMARKS / "results" / "pairs.json").read_text())
    assert pairs["sizes"]["n_states"] == 16
    assert pairs["ratio_over_packed"]["trl"] >= 12.0
    real = json.loads((BENCHMARKS / "results" / "real_pairs.json").read_text())
    assert real["best_of_trl_over"]["ours"] >= 5.0
    losses = [row["loss"] for row in real["rows"]]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    step = json.loads((BENCHMARKS / "results" / "step.json").read_text())
    assert min(step["separate_over_shared"].values()) >= 1.5
    assert step["loss_difference"] <= 1e-5
    assert step["pairs_over_dpo"] <= 1.05
    assert step["collation_share"] < 0.01
    assert step["off_the_line"] <= 0.15
