"""A tiny model and a dataset in the published layout; a key that opens nothing."""

from pathlib import Path

import pytest

from tests.trainer.published import rows_of, write_dataset
from tests.trainer.training import save_tiny_model


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "pairs")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", rows_of(8), n_layers=2)


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-loopback")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
