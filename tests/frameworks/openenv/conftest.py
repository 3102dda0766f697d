"""A process that serves the states of the dataset as an OpenEnv environment."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@contextmanager
def started(*command: Any) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a server until the block ends; gives the address that it prints, and its process."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def states_of(dataset: Path) -> AbstractContextManager[tuple[str, subprocess.Popen]]:
    script = Path(sys.executable).with_name("replay-pipeline")
    return started(script, "workspace", "serve", "--port", "0", "--dataset", dataset)


@pytest.fixture(scope="session")
def server(dataset) -> Iterator[str]:
    """Address of a server that pays for the consensus."""
    with states_of(dataset) as (address, _):
        yield address


@pytest.fixture
def mortal_server(dataset) -> Iterator[tuple[str, subprocess.Popen]]:
    """One more, that a test may end."""
    with states_of(dataset) as running:
        yield running


@pytest.fixture
def plain_server() -> Iterator[str]:
    """A server that knows nothing of us."""
    with started(sys.executable, Path(__file__).with_name("plain_server.py")) as (address, _):
        yield address
