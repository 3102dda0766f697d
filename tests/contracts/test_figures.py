"""Figures of the front page are those of the tables that a command wrote."""

import importlib
import json
import re
from pathlib import Path

REPO = Path(__file__).parents[2]
RECIPE = REPO / "recipes" / "what_a_dollar_buys"


def words(path: Path) -> str:
    """Return a page's text without emphasis and line breaks."""
    return re.sub(r"\s+", " ", path.read_text("utf-8").replace("*", ""))


def test_both_pages_tell_what_a_dollar_buys_as_its_table_has_it(monkeypatch):
    monkeypatch.syspath_prepend(RECIPE)
    table = importlib.import_module("table")
    kept = RECIPE / "table.json"
    found = json.loads(kept.read_text("utf-8")) if kept.exists() else None
    for page, root in (
        (REPO / "README.md", f"{RECIPE.relative_to(REPO)}/"),
        (RECIPE / "README.md", ""),
    ):
        told = page.read_text("utf-8").partition("<!--headline-->")[2].partition("<!--end-->")[0]
        assert told.split() == table.headline(found).replace("ROOT", root).split()
    told = (RECIPE / "README.md").read_text("utf-8").partition("<!--tables-->")[2]
    assert told.partition("<!--end-->")[0].split() == (table.pages(found) if found else "").split()


def test_the_readme_tells_what_replay_costs_as_its_page_has_it():
    page = words(REPO / "README.md")
    [figures] = re.findall(
        r"costs \$(\d\.\d\d) to \$(\d\.\d\d) as shipped, and \$(\d+\.\d\d)", page
    )
    told_there = words(REPO / "docs" / "replay.md")
    assert [each for each in figures if each not in told_there] == []
