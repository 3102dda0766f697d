"""What a stranger wrote is shown, and nothing of it runs, fetches or links anywhere.

The corpus goes the way of the data: from tables and receipts through our own code into Dagster's
Markdown, the dataset card and the page of `look`. The first test shows that the trap works.
"""

from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Browser, Page

from replay_pipeline.assets.instance import open_instance
from replay_pipeline.assets.reporting import metadata_value
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.work.markdown import (
    Markdown,
    bars,
    code_block,
    literal_markdown,
    markdown_table,
)
from tests.browser.serving import ADDRESSES, PATIENCE_MS, serving
from tests.hostile import HOSTILE, MARK, REMOTE
from tests.hostile_data import hostile_root

Trap = Callable[[Page], list[str]]

DRAWN = "img, script, iframe, svg:not(.chart svg)"
"""What no text of a session may become; charts are drawn by the page."""

LIVE = """() => [...document.querySelectorAll('a[href], img, iframe, form, style, base, link, meta')]
  .map(e => e.getAttribute('href') || e.getAttribute('src') || e.getAttribute('action') || '')
  .filter(where => /^\\s*(javascript|data:text|vbscript):/i.test(where) || where.includes('HOST'))
""".replace("HOST", REMOTE)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Pipeline:
    return hostile_root(tmp_path_factory.mktemp("hostile") / "data")


@pytest.fixture
def trapped(browser: Browser):
    """A page, and what in it came alive: scripts that ran, requests made, links to follow."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    page.on("request", lambda one: REMOTE in one.url and asked.append(one.url))
    page.on("dialog", lambda dialog: asked.append(dialog.message))

    def alive() -> list[str]:
        ran = ["script ran"] if page.evaluate(f"{MARK} !== undefined") else []
        return [*ran, *asked, *page.evaluate(LIVE)]

    yield page, alive
    context.close()


def test_the_trap_catches_what_is_not_made_harmless(trapped):
    page, alive = trapped
    page.route(f"**/*{REMOTE}/**", lambda route: route.abort())
    for n, text in enumerate(HOSTILE[:3]):
        page.set_content(f"<p>{n}</p>{text}")
    page.wait_for_function(f"{MARK} !== undefined")
    page.set_content(HOSTILE[2] + MarkdownIt("commonmark").render("\n\n".join(HOSTILE[10:14])))
    page.wait_for_function("document.images.length > 1")
    found = alive()
    assert "script ran" in found
    assert any("pixel.png" in one for one in found)


def facts() -> dict[str, Any]:
    """The corpus through each function that makes Markdown, one entry for each text."""
    made = {
        "table": markdown_table(
            [dict.fromkeys(HOSTILE, "x"), dict(zip(HOSTILE, HOSTILE, strict=True))]
        ),
        "bars": bars(dict.fromkeys(HOSTILE, 1.0)),
        "quotes": Markdown("\n\n".join(f"> {literal_markdown(text)}" for text in HOSTILE)),
        "blocks": Markdown("\n\n".join(code_block(t, "diff") for t in HOSTILE)),
    }
    for n, text in enumerate(HOSTILE):
        made[f"one {n}"] = Markdown(f"{literal_markdown(text)}\n\n{code_block(text)}")
    return {name: metadata_value(text) for name, text in made.items()}


@pytest.fixture(scope="module")
def hostile_ui(work):
    """Dagster on the hostile data, with the corpus as metadata: through our code, and as it is."""
    raw = dg.MetadataValue.md("\n\n".join(HOSTILE))
    with open_instance(work) as instance:
        for asset, metadata in (("published_dataset", facts()), ("trained_model", {"live": raw})):
            instance.report_runless_asset_event(dg.AssetMaterialization(asset, metadata=metadata))
    with serving(work.root.path) as url:
        yield url


def enter(page: Page, url: str) -> None:
    """Open the printed address, which lets the browser in."""
    page.goto(ADDRESSES[url])


def test_dagster_shows_hostile_text_and_does_nothing_that_it_says(work, hostile_ui, trapped):
    page, alive = trapped
    (batch,) = work.batches()
    enter(page, hostile_ui)
    for asset in ("trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs"):
        show_all(page, f"{hostile_ui}/assets/{asset}?view=partitions&partition={batch}")
        assert alive() == []
    show_all(page, f"{hostile_ui}/assets/published_dataset?view=events")
    assert alive() == []
    assert MARK in page.inner_text("body")


def show_all(page: Page, url: str) -> None:
    """Open everything that Dagster hides behind a click."""
    page.goto(url)
    page.get_by_text("Metadata", exact=True).first.wait_for()
    page.get_by_text("No metadata entries").wait_for(state="detached")  # still loading
    links = page.get_by_text("[Show Markdown]")
    for n in range(links.count()):
        links.nth(n).click()
        page.get_by_text("Close", exact=True).last.click()
        page.get_by_text("Close", exact=True).first.wait_for(state="detached")


@pytest.mark.parametrize("html", [True, False])
def test_the_dataset_card_is_inert_in_any_renderer(work, trapped, html):
    page, alive = trapped
    card = (work.settings.dataset_dir() / "README.md").read_text("utf-8").split("---\n", 2)[2]
    assert MARK in card
    rendered = MarkdownIt("commonmark", {"html": html}).enable("table").render(card)
    page.set_content(rendered)
    page.wait_for_load_state("networkidle")
    assert alive() == []
    assert MARK in page.inner_text("body")


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_of_a_root_runs_nothing_and_fits_the_screen(work, trapped, width):
    page, alive = trapped
    page.set_viewport_size({"width": width, "height": 800})
    index = work.root.path / "look" / "index.html"
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for tab in ("overview", "sessions", "teachers", "pairs", "dataset"):
        page.goto("about:blank")
        page.goto(f"{index.as_uri()}#/{tab}")
        page.locator("html[data-ready]").wait_for(state="attached")
        for _ in range(20 if tab == "pairs" else 0):
            page.keyboard.press("p")
            page.keyboard.press("j")
        # Links lead to other views of the page, whatever is searched there.
        assert [each for each in alive() if not each.startswith("#/")] == []
        assert page.locator(f"main :is({DRAWN})").count() == 0
        assert page.evaluate(overflow) == 0, tab
