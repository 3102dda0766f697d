"""`python -m tools.screenshots [FOLDER]`: the pictures of the docs, from the running product.

Runs the demo in an empty folder, opens Dagster and the page of `look` on it in a headless Chromium,
and writes one small PNG per view.
"""

import io
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.serving import ADDRESSES, CHROMIUM, FLAGS, PATIENCE_MS, make_demo, serving

logger = logging.getLogger("screenshots")

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000
_N_COLORS = 128


def graph(page: Page, url: str) -> None:
    page.goto(f"{url}/runs")
    page.get_by_text("Hide navigation").click()
    page.goto(f"{url}/asset-groups")
    for name in ("claude_c", "trace_states", "trained_model"):
        page.get_by_text(name).last.wait_for()
    page.wait_for_load_state("networkidle")  # what each asset's state is comes later


def batch(page: Page, url: str) -> None:
    page.goto(f"{url}/assets/dpo_pairs?view=partitions")
    page.get_by_text(re.compile("-0001-")).locator("visible=true").last.click()
    page.get_by_text("usd_per_pair").wait_for()
    page.get_by_text("sample 1", exact=True).scroll_into_view_if_needed()
    page.get_by_text("pair_yield").scroll_into_view_if_needed()


VIEWS: dict[str, tuple[Callable[[Page, str], None], int, int]] = {
    "graph": (graph, 1900, 560),
    "batch": (batch, 1280, 1500),
}
"""Name → what is shown, and the width and height of the window."""


def take(page: Page, path: Path) -> None:
    """Write what the page shows now, in few colours."""
    page.wait_for_timeout(1500)  # what moves comes to rest
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(_N_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    logger.info("%s: %d kB", path, size // 1000)
    assert size <= MAX_BYTES, f"{path} has {size} bytes"


def shoot(browser: Browser, data: Path, folder: Path) -> None:
    """All views, of Dagster and of the page of `look`."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(data) as url:
        for name, (view, width, height) in VIEWS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(2 * PATIENCE_MS)
            page.goto(ADDRESSES[url])
            view(page, url)
            take(page, folder / f"{name}.png")
            page.close()
    shoot_page(browser, data, folder)


PAGES: dict[str, tuple[str, int, int]] = {
    "look-overview": ("#/overview", 1280, 900),
    "look-sessions": ("#/sessions?sort=-cost", 1280, 800),
    "look-session": ("#/sessions?tool=Edit&sort=-cost", 1280, 900),
    "look-teachers": ("#/teachers", 1280, 900),
    "review": ("#/pairs", 1280, 800),
    "look-dataset": ("#/dataset", 1280, 800),
    "look-training": ("#/training", 1280, 900),
    "look-examples": ("#/training", 1280, 760),
    "look-phone": ("#/sessions?sort=-cost", 400, 800),
    "review-phone": ("#/pairs", 400, 800),
}
"""Name → the address of a tab, and the width and height of the window."""


def shoot_page(browser: Browser, data: Path, folder: Path) -> None:
    """The tabs of the page of `look`."""
    index = (data / "look" / "index.html").as_uri()
    for name, (place, width, height) in PAGES.items():
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(index + place)
        page.locator("html[data-ready]").wait_for(state="attached")
        if name == "look-session":
            page.locator("td.title a").first.click()
            page.locator(".turn.decision > .answers > summary").nth(3).click()
        elif name == "look-examples":
            first = page.locator(
                "section", has=page.get_by_role("heading", name="the model before")
            )
            first.first.evaluate("section => section.scrollIntoView()")
        take(page, folder / f"{name}.png")
        page.close()


def main() -> None:
    """Make the demo and take the pictures."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="replay-") as home:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        shoot(browser, make_demo(Path(home)), folder)
        browser.close()


if __name__ == "__main__":
    main()
