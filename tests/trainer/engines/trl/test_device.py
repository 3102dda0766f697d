"""Every move to the device, on a device that any machine has; and the masks that only CUDA runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import forked, forked_python

ROOT = Path(__file__).parents[4]
WORKER = Path(__file__).parent / "spare_worker.py"
TIMED = ("seconds", "step_time", "runtime", "per_second")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a process of their own: a device stays for as long as its process."""
    done = subprocess.run(
        forked([sys.executable, WORKER, tmp_path_factory.mktemp("runs")], "trainer"),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast", "plain", "ema"])
def test_a_run_on_another_device_is_the_run_on_the_cpu(runs, name):
    """Behaviour, reference and evaluation passes, a step of all channels, teacher, checkpoint."""
    assert runs["n_left_behind"] == 0
    rows = zip(runs["cpu"][name], runs["device"][name], strict=True)
    for on_cpu, on_device in rows:
        for key, value in on_cpu.items():
            if not key.endswith(TIMED):
                other = on_device[key]
                is_number = isinstance(value, float)
                assert other == (pytest.approx(value, abs=2e-6) if is_number else value), key
    assert runs["device"][name][-1]["channels_live"] == ["policy", "sdpo", "replay"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast", "plain", "ema"])
def test_no_step_of_ours_waits_for_the_device(runs, name):
    """From the forward pass to the update of the weights; TRL's log lines do wait."""
    waits = runs["waits"][name]
    assert not [line for line in waits if line.startswith("trainer:")]
    assert any(line.startswith("upstream: grpo_trainer.py") for line in waits)


@pytest.mark.slow
def test_the_script_for_a_gpu_passes_all_its_steps_on_a_cpu(tmp_path):
    python = forked_python("trainer")
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", "--dry", "--json", tmp_path / "dry.json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHON": python, "BENCHMARK_PYTHON": python},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    rows = json.loads((tmp_path / "dry.json").read_text())["steps"]
    names = [row["step"] for row in rows]
    sharded, sampled = "sharded training (FSDP2)", "a step on rollouts (transformers: no vLLM here)"
    assert names[:5] == ["imitation", "tests", "training", sharded, sampled]
    assert all(row["status"] == 0 for row in rows)
    ratios = [row["figures"] for row in rows if "figures" in row]
    [ours, theirs] = (row["policy_loss"] for row in ratios[0]["rows"])
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ratios[1]["ratio_over_packed"]["one_by_one"] > 1
    assert ratios[2]["best_of_trl_over_ours"] > 0
