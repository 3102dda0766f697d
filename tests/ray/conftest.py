"""A Ray cluster of two nodes on this machine."""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port

START = [
    str(Path(sys.executable).with_name("ray")),
    *("start", "--block", "--disable-usage-stats"),
    *("--num-cpus", "1", "--object-store-memory", "100000000"),
]
PATIENCE_S = 120

# The nodes listen beyond loopback too, so they ask who comes.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a head and one more node, which have one core each."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    nodes = []
    # A short path: Ray's sockets lie below it, and the path of a socket has 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="ray") as name:
        head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", name]
        try:
            for options in (head, ["--address", address]):
                nodes.append(started_node(options, Path(name) / f"node-{len(nodes)}.log"))
            yield address
        finally:
            for node in nodes:
                node.terminate()  # it ends the other processes of its node
            for node in nodes:
                node.wait(PATIENCE_S)


def started_node(options: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as lines:
        process = subprocess.Popen([*START, *options], stdout=lines, stderr=lines)
    deadline = time.monotonic() + PATIENCE_S
    while b"Ray runtime started" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            pytest.fail(log.read_text())
        time.sleep(0.1)
    return process
