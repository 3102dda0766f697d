"""A tiny model, a settings file, and the command that runs it with or without a mesh."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.trainer.published import write_dataset
from tests.trainer.training import save_tiny_model
from trainer.data.dataset import load_preference_data

LONGEST_S = 270
"""Of one run: three minutes on a machine with seven times its work; two of them end within nine."""
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SETTINGS = {
    "tiny": {"vocab_size": 400, "hidden_size": 32, "n_layers": 1},
    "evaluation": {"max_pairs": 4, "max_prompts": 0},
    "trl": {
        "objective": "grpo",
        "alpha_sdpo": 0.1,
        "beta_replay": 1.0,
        "teacher": "ema",
        "max_steps": 4,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "pairs_per_step": 4,
        "max_completion_length": 64,
        "max_prompt_tokens": 256,
        "max_response_tokens": 64,
        "render_tools": False,
        "activation_checkpointing": False,
        "seed": 0,
    },
}


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory) -> Path:
    """Four pairs to learn from: one batch holds them all."""
    return write_dataset(tmp_path_factory.mktemp("small"), n_sessions=2, n_test=1)


@pytest.fixture(scope="session")
def model(tmp_path_factory, dataset) -> Path:
    rows = load_preference_data(dataset).pairs
    return save_tiny_model(tmp_path_factory.mktemp("model"), rows, n_layers=1)


@pytest.fixture
def command(tmp_path, dataset):
    """`command(engine, output, *overrides, **variables)`: one run of `replay-train`."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"dataset": str(dataset), "output": "x", **SETTINGS}))

    def run(
        engine: str, output: Path, *overrides: str, file: Path = settings, **variables: str
    ) -> SimpleNamespace:
        arguments = [engine] if engine != "trl" else []
        for override in (f"output={output}", *overrides):
            arguments += ["--set", override]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "--config", str(file), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        lines = done.stdout.strip().splitlines()
        report = json.loads(lines[-1]) if done.returncode == 0 else None
        return SimpleNamespace(code=done.returncode, report=report, errors=done.stderr)

    return run
