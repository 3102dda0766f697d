"""`replay-pipeline ui` on data of its own, for a browser to look at."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_pipeline.storage.processes import child_environment
from tests.integration.processes import ui_of
from tests.support.dagster_web import address
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
    log, port = data.parent / f"{data.name}-ui.log", free_port()
    words = command("ui", "--data", str(data), "--port", str(port))
    env = environment() | {"REPLAY_SETTINGS": str(data / "settings.toml")}
    with ui_of(words, log, cwd=data.parent, env=env) as (url, _):
        ADDRESSES[url] = address(log)
        yield url
