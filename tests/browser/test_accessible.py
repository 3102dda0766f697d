"""Every tab held to the rules of axe-core, in light and in dark; `make test-browser` fetches them."""

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.serving import PATIENCE_MS

TABS = ("overview", "sessions", "teachers", "pairs", "dataset", "training")
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def rules() -> str:
    return Path(os.environ["AXE"]).read_text("utf-8")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_tab_has_a_serious_finding(browser: Browser, demo: Path, rules: str, scheme, width):
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    index = (demo / "look" / "index.html").as_uri()
    places = [f"#/{tab}" for tab in TABS]
    page.goto(f"{index}#/sessions")
    first = page.locator("td.title a").first
    first.wait_for()
    places.append(first.get_attribute("href") or "")
    found = {}
    for place in places:
        page.goto("about:blank")
        page.goto(index + place)
        page.locator("html[data-ready]").wait_for(state="attached")
        page.evaluate(rules)
        result = page.evaluate("axe.run()")
        assert len(result["passes"]) > 10
        grave = [
            (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
            for each in result["violations"]
            if each["impact"] in GRAVE
        ]
        if grave:
            found[place] = grave
    context.close()
    assert found == {}
