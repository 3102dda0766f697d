"""A tiny model and a dataset in the published layout; our algorithm among PRIME-RL's."""

import sys
from pathlib import Path

import pytest

from tests.trainer.published import rows_of, write_dataset
from tests.trainer.training import save_tiny_model
from trainer.engines.prime_rl.register import register

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "recipes" / "verifiers"))  # the taskset, by its one-word name
register()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "pairs")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", rows_of(8), n_layers=2)
