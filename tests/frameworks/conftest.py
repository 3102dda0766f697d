"""What the tests of every engine stand on: no hub, and a small published dataset."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.published import write_dataset

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("published"), n_sessions=5, n_test=1)


@pytest.fixture(scope="session")
def sessions() -> Path:
    """Published sessions of real length, as `tests.frameworks.sessions` prepares them."""
    return Path(os.environ["SESSIONS"]).absolute()


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Callable[..., str]:
    """Run a program of this environment without a network; gives what it printed."""

    def run(program: str, *words: Any, **variables: Any) -> str:
        home = tmp_path_factory.mktemp("home")
        place = Path(sys.executable).parent
        done = subprocess.run(
            [place / program, *map(str, words)],
            env={
                **os.environ,
                "PATH": f"{place}:{os.environ['PATH']}",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(home),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "DO_NOT_TRACK": "1",
                **{name: str(value) for name, value in variables.items()},
            },
            cwd=home,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6_000:]
        return done.stdout + done.stderr

    return run
