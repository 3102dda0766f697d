"""What the tests of every engine stand on: no hub, and a small published dataset."""

import os
from pathlib import Path

import pytest

from tests.trainer.published import write_dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("published"), n_sessions=5, n_test=1)
