"""Dagster in a real browser, as a person walks through it: graph, batch, plots, checks, a run."""

import re
import time

import pytest
from playwright.sync_api import Page, expect

from tests.browser.serving import PATIENCE_MS
from tests.support.dagster_web import graphql

ASSETS = (
    "claude_code_sessions",
    "trace_states",
    "teacher_actions",
    "dpo_pairs",
    "normalized_pairs",
    "published_dataset",
    "trained_model",
    "night_summary",
)


def pictures(page: Page) -> list[int]:
    """Widths of the inline pictures that the browser could draw."""
    images = page.locator('img[src^="data:image/svg"]')
    images.first.wait_for()
    return images.evaluate_all("images => images.map(image => image.naturalWidth)")


def open_first_batch(page: Page) -> None:
    first = page.get_by_text(re.compile("-0001-")).locator("visible=true").last
    first.click(timeout=PATIENCE_MS)


def row(page: Page, key: str):
    return page.locator("tr", has=page.get_by_text(key, exact=True)).last


def test_the_address_that_is_printed_opens_the_page_with_links_to_the_graph_and_the_runs(
    opened, ui
):
    page = opened(f"{ui}/")
    expect(page).to_have_url(re.compile(r"/look/index\.html"))
    page.locator(".figure").first.wait_for()
    page.get_by_role("link", name="its last runs").click()
    expect(page.get_by_text("publish_and_train").first).to_be_visible(timeout=PATIENCE_MS)
    page.go_back()
    page.get_by_role("link", name="Dagster: assets").click()
    expect(page.get_by_text("trained_model").locator("visible=true").first).to_be_visible(
        timeout=PATIENCE_MS
    )


PARTITIONS = "{ assetNodes { assetKey { path } partitionKeys } }"
STALE = """
query($key: AssetKeyInput!, $batch: String) { assetNodeOrError(assetKey: $key) {
    ... on AssetNode { staleStatus(partition: $batch) } } }
"""


def test_nothing_of_a_demo_that_was_just_made_is_stale(opened, ui):
    """Made by the command with a relative path, looked at with an absolute one."""
    made = [name for name in ASSETS if name not in ("claude_code_sessions", "night_summary")]
    keys = {
        node["assetKey"]["path"][0]: node["partitionKeys"] or [None]
        for node in graphql(ui, PARTITIONS)["assetNodes"]
    }
    for name in made:
        found = {
            graphql(ui, STALE, key={"path": [name]}, batch=batch)["assetNodeOrError"]["staleStatus"]
            for batch in keys[name]
        }
        assert found == {"FRESH"}, name

    page = opened(f"{ui}/asset-groups")
    for name in made:
        expect(page.get_by_text(name).locator("visible=true").first).to_be_visible(
            timeout=PATIENCE_MS
        )
    expect(page.get_by_text("Materialize all")).to_be_visible()  # and not "Materialize unsynced"
    expect(page.get_by_text("Unsynced")).to_have_count(0)


def test_a_batch_shows_figures_tables_and_samples_and_a_model_its_curves(opened, ui):
    page = opened(f"{ui}/assets/dpo_pairs?view=partitions")
    open_first_batch(page)
    expect(page.get_by_text("usd_per_pair")).to_be_visible(timeout=PATIENCE_MS)
    for teacher in ("deepseek", "glm", "qwen"):
        expect(row(page, "agreement")).to_contain_text(teacher)
    expect(row(page, "outcomes")).to_contain_text("█")
    row(page, "sample 1").get_by_text("Show Markdown").or_(
        row(page, "sample 1").locator("code")
    ).first.click()
    expect(page.locator("pre code").last).to_contain_text("+++ chosen")

    page.goto(f"{ui}/assets/teacher_actions?view=partitions")
    open_first_batch(page)
    expect(page.get_by_text("usd deepseek", exact=True)).to_be_visible(timeout=PATIENCE_MS)
    expect(row(page, "cost_by_teacher")).to_contain_text("█")

    page.goto(f"{ui}/assets/trained_model")
    expect(row(page, "train/loss by step")).to_be_visible(timeout=PATIENCE_MS)
    assert set(pictures(page)) == {440}


def test_checks_say_what_they_look_for(opened, ui):
    page = opened(f"{ui}/assets/published_dataset?view=checks")
    names = ("dataset_loads", "prompts_decide", "splits_share_no_prompt")
    for name in (*names, "splits_share_no_conversation"):
        expect(page.get_by_text(name).first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_text("Succeeded")).to_have_count(len(names) + 1)
    page.get_by_text("splits_share_no_conversation").first.click()
    expect(page.get_by_text("Is every conversation in one split only").first).to_be_visible(
        timeout=PATIENCE_MS
    )


FROM_UI = """
{ runsOrError(filter: {tags: [{key: "dagster/from_ui", value: "true"}]}) {
    ... on Runs { results { runId status assetSelection { path } } } } }
"""


def runs_by_click(url: str) -> dict[str, dict]:
    return {run["runId"]: run for run in graphql(url, FROM_UI)["runsOrError"]["results"]}


@pytest.mark.parametrize("asset", ["trace_states", "normalized_pairs"])
def test_a_batch_is_materialized_by_clicks_and_nothing_is_asked(opened, ui, asset):
    page = opened(f"{ui}/assets/{asset}?view=partitions")
    before = runs_by_click(ui)
    open_first_batch(page)
    page.get_by_role("button", name=re.compile("Materialize")).first.click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    launch = dialog.get_by_role("button", name=re.compile("Launch"))
    expect(launch).to_be_enabled(timeout=PATIENCE_MS)
    launch.click()
    expect(page.get_by_text("Are you sure")).to_have_count(0)
    deadline = time.monotonic() + 300
    while True:
        new = {run: one for run, one in runs_by_click(ui).items() if run not in before}
        ended = [one for one in new.values() if one["status"] in ("SUCCESS", "FAILURE", "CANCELED")]
        if ended:
            break
        assert time.monotonic() < deadline, new
        page.wait_for_timeout(500)
    assert [one["status"] for one in new.values()] == ["SUCCESS"]
    assert ended[0]["assetSelection"] == [{"path": [asset]}]
    page.goto(f"{ui}/runs/{ended[0]['runId']}")
    expect(page.get_by_text("Success").locator("visible=true").first).to_be_visible(
        timeout=PATIENCE_MS
    )
