"""`replay-pipeline ui` on data of its own, for a browser to look at."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_pipeline.storage.processes import child_environment
from tests.support.dagster_web import address, sign_in
from tests.support.ports import free_port

REPO = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 90_000
"""The machine may be busy, and Dagster's pages ask much of it."""

ADDRESSES: dict[str, str] = {}
"""By where a UI is served, the address that lets a browser in."""


def environment() -> dict[str, str]:
    return child_environment(PYTHONPATH=str(REPO), PYTHONWARNINGS="ignore", COLUMNS="120")


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from replay_pipeline.cli import main; main()", *words]


def make_demo(folder: Path) -> Path:
    """Run `replay-pipeline demo` in a folder; returns its data root."""
    done = subprocess.run(
        command("demo"), cwd=folder, env=environment(), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "demo"


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """`replay-pipeline ui` on a data root, until the end of the block."""
    port = free_port()
    log = (data.parent / f"{data.name}-ui.log").open("wb")
    process = subprocess.Popen(
        command("ui", "--data", str(data), "--port", str(port)),
        cwd=data.parent,
        env=environment() | {"REPLAY_SETTINGS": str(data / "settings.toml")},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 300
        while "token=" not in Path(log.name).read_text():
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.3)
        url = sign_in(Path(log.name))
        ADDRESSES[url] = address(Path(log.name))
        yield url
    finally:
        _end(process)
        log.close()


def _end(process: subprocess.Popen) -> None:
    """Stop the whole group that was started: Dagster is several processes."""
    for sent, patience_s in ((signal.SIGINT, 60), (signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, sent)
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
        if sent is signal.SIGINT:
            continue  # the leader is gone; its children may not be
    process.wait(20)
