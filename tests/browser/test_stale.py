"""Settings that would make other pairs, as Dagster's own pages show it, and the click that redoes them."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from replay_pipeline.assets.records import sync
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.browser.serving import PATIENCE_MS, serving
from tests.roots import pipeline_at, run_batches
from tests.support.dagster_web import graphql
from tests.support.settings_files import write_settings

BY_BATCH = ("trace_states", "teacher_actions", "dpo_pairs", "normalized_pairs")
STALE = """
query($key: AssetKeyInput!, $batch: String!) { assetNodeOrError(assetKey: $key) {
    ... on AssetNode { staleStatus(partition: $batch) staleCauses(partition: $batch) { reason } } } }
"""


def set_up(root: Path, **pairs: object) -> None:
    write_settings(
        root,
        ingest={"sources": [SESSIONS_DIR / "-home-mira-code-tideline"], "settle_s": 0},
        replay={"sample_teachers": True},
        pairs=pairs,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A root that was taken as far as normalized pairs, and whose matcher was changed after that."""
    root = tmp_path_factory.mktemp("stale") / "data"
    set_up(root)
    work = pipeline_at(root)
    run_batches(work)
    sync(work)
    set_up(root, level="exact")
    return root


@pytest.fixture(scope="module")
def stale_ui(root) -> Iterator[str]:
    with serving(root) as url:
        yield url


def stale(url: str, batch: str) -> dict[str, list[str]]:
    """Why each asset of a batch is stale, as the pages ask it."""
    found = {}
    for asset in BY_BATCH:
        node = graphql(url, STALE, key={"path": [asset]}, batch=batch)["assetNodeOrError"]
        if node["staleStatus"] != "FRESH":
            found[asset] = [cause["reason"] for cause in node["staleCauses"]]
    return found


def test_a_changed_matcher_shows_the_pairs_as_stale_and_a_click_redoes_them(opened, stale_ui, root):
    (batch,) = pipeline_at(root).batches()
    assert stale(stale_ui, batch) == {"dpo_pairs": ["has a new code version"]}
    made = root / "dpo_pairs" / f"trace_batch={batch}"
    before = {path: path.read_bytes() for path in made.iterdir()}

    page = opened(f"{stale_ui}/assets/dpo_pairs?view=partitions&partition={batch}")
    expect(page.get_by_text("Unsynced").first).to_be_visible(timeout=PATIENCE_MS)
    page.get_by_role("button", name=re.compile("Materialize")).first.click()
    launch = page.get_by_role("dialog").get_by_role("button", name=re.compile("Launch"))
    expect(launch).to_be_enabled(timeout=PATIENCE_MS)
    launch.click()
    deadline = time.monotonic() + 300
    while "dpo_pairs" in (left := stale(stale_ui, batch)):
        assert time.monotonic() < deadline, left
        page.wait_for_timeout(500)
    assert {path: path.read_bytes() for path in made.iterdir()} != before
    assert left == {"normalized_pairs": ["has a new data version"]}

    page.goto(f"{stale_ui}/assets/dpo_pairs?view=partitions&partition={batch}")
    expect(page.get_by_text("dagster/partition_row_count").first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_text("Unsynced")).to_have_count(0)
    page.goto(f"{stale_ui}/assets/normalized_pairs?view=partitions&partition={batch}")
    expect(page.get_by_text("Unsynced").first).to_be_visible(timeout=PATIENCE_MS)
