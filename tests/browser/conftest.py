"""A real Chromium, the demo's data, and pages that tell what went wrong in them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.serving import ADDRESSES, CHROMIUM, FLAGS, PATIENCE_MS, make_demo, serving


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """A folder in which `replay-pipeline demo` has run."""
    return make_demo(tmp_path_factory.mktemp("home"))


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
        for place, address in ADDRESSES.items():
            if url.startswith(place):
                page.goto(address)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def _leaves(url: str) -> bool:
    return url.startswith(("http:", "https:", "ws:", "wss:")) and "//127.0.0.1:" not in url
