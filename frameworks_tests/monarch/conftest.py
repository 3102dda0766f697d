"""A published dataset, a settings file, and the command that runs it with or without a mesh."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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


def trainer_fixtures():
    path = ROOT / "tests" / "trainer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("trainer_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    return trainer_fixtures().write_dataset(folder, n_sessions=5, n_test=1)


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory) -> Path:
    """Four pairs to learn from: one batch holds them all."""
    folder = tmp_path_factory.mktemp("small")
    return trainer_fixtures().write_dataset(folder, n_sessions=2, n_test=1)


@pytest.fixture(scope="session")
def model(tmp_path_factory, dataset) -> Path:
    """A tiny model and its tokenizer in a folder, as other engines want them."""
    from trainer.data.dataset import load_preference_data
    from trainer.data.tiny import corpus, make_model, train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(corpus(load_preference_data(dataset).pairs), vocab_size=400)
    make_model(tokenizer, hidden_size=32, n_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def command(tmp_path, dataset):
    """`command(engine, output, *overrides, **variables)`: one run of `python -m trainer`."""
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
            timeout=500,
        )
        lines = done.stdout.strip().splitlines()
        report = json.loads(lines[-1]) if done.returncode == 0 else None
        return SimpleNamespace(code=done.returncode, report=report, errors=done.stderr)

    return run
