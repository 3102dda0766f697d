"""A process that serves the states of the dataset as an OpenEnv environment."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def serve(dataset: Path) -> subprocess.Popen:
    script = Path(sys.executable).with_name("replay-pipeline")
    command = [script, "workspace", "serve", "--port", "0"]
    return subprocess.Popen(
        [*command, "--dataset", str(dataset)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    process.terminate()
    process.communicate(timeout=30)


@pytest.fixture(scope="session")
def server(dataset) -> Iterator[str]:
    """Address of a server that pays for the consensus."""
    process = serve(dataset)
    try:
        yield process.stdout.readline().strip()
    finally:
        end(process)


@pytest.fixture
def mortal_server(dataset) -> Iterator[tuple[str, subprocess.Popen]]:
    """One more, that a test may end."""
    process = serve(dataset)
    try:
        yield process.stdout.readline().strip(), process
    finally:
        end(process)


@pytest.fixture
def plain_server() -> Iterator[str]:
    """A server that knows nothing of us."""
    command = [sys.executable, str(Path(__file__).with_name("plain_server.py"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        end(process)
