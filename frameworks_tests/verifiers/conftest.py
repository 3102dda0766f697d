"""A published dataset, and a home folder without credentials."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Three small configurations; written by the trainer's own fixtures, which want no torch."""
    path = ROOT / "tests" / "trainer" / "conftest.py"
    text = path.read_text().replace("import torch\n", "")
    spec = importlib.util.spec_from_loader("trainer_fixtures", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(compile(text, path, "exec"), module.__dict__)
    return module.write_dataset(tmp_path_factory.mktemp("published"), n_sessions=5, n_test=1)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Variables of a command that finds the recipe's taskset and no credentials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PRIME")}
    paths = [str(ROOT), str(ROOT / "recipes" / "verifiers")]
    home = tmp_path / "home"
    home.mkdir()
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "HOME": str(home), "NO_KEY": "none"}
