"""A real Chromium, and `replay-pipeline ui` on data of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from replay_pipeline.settings import child_environment

REPO = Path(__file__).parents[1]
CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE_MS = 90_000
"""The machine may be busy, and Dagster's pages ask much of it."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield opened
        opened.close()


def environment() -> dict[str, str]:
    return child_environment(PYTHONPATH=str(REPO), PYTHONWARNINGS="ignore", COLUMNS="120")


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from replay_pipeline.cli import main; main()", *words]


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A folder in which `replay-pipeline demo` has run."""
    folder = tmp_path_factory.mktemp("home")
    done = subprocess.run(
        command("demo"), cwd=folder, env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "demo"


@contextmanager
def serving(data: Path) -> Iterator[str]:
    """`replay-pipeline ui` on a data root, until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (data.parent / f"{data.name}-ui.log").open("wb")
    process = subprocess.Popen(
        command("ui", "--data", str(data), "--port", str(port)),
        cwd=data.parent,
        env=environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not _answers(url):
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.3)
        yield url
    finally:
        _end(process)
        log.close()


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/server_info", timeout=5).status == 200  # noqa: S310 - loopback
    except OSError:
        return False


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


@pytest.fixture(scope="session")
def ui(demo: Path) -> Iterator[str]:
    """Where Dagster shows the demo's data."""
    with serving(demo) as url:
        yield url


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages that report every error and every request that leaves this machine."""
    contexts = []
    problems: list[str] = []

    def open_page(url: str, *, width: int = 1280, height: int = 800) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda one: _leaves(one.url) and problems.append(one.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def _leaves(url: str) -> bool:
    return url.startswith(("http:", "https:", "ws:", "wss:")) and "//127.0.0.1:" not in url
