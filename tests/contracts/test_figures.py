"""Figures of the front page are those of the tables that a command wrote."""

import json
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
RECIPE = REPO / "recipes" / "what_a_dollar_buys"
TABLES = (
    "table.json",
    "table-draw-6.json",
    "table-draw-4.json",
    "table-draw-3.json",
    "table-draw-2.json",
)


def words(path: Path) -> str:
    """Return a page's text without emphasis and line breaks."""
    return re.sub(r"\s+", " ", path.read_text("utf-8").replace("*", ""))


def told(arm: dict) -> str:
    """Return the share of right actions as a page writes it, with its interval."""
    low, high = (round(100 * each) for each in arm["interval"])
    return f"{round(100 * arm['executed'])} % ({low} to {high})"


def regimes(file: str) -> dict:
    return json.loads((RECIPE / file).read_text("utf-8"))["regimes"]


@pytest.mark.parametrize("file", TABLES)
def test_the_recipe_tells_every_arm_as_its_table_has_it(file):
    page = words(RECIPE / "README.md")
    for name, of in regimes(file).items():
        for arm, row in of["arms"].items():
            assert told(row) in page, (file, name, arm, told(row))


def test_the_recipe_tells_every_purchase_as_its_table_has_it():
    page = words(RECIPE / "README.md")
    bought = json.loads((RECIPE / "table.json").read_text("utf-8"))["bought"]
    real = {name: row for name, row in bought.items() if not name.startswith(("coin", "foreign"))}
    assert len(real) > 25
    for name, row in real.items():
        counts = f"{row['n_calls']} | {row['n_pairs']} | {row['n_right_pairs']}"
        sides = (f"{row[side]:.2f}".lstrip("0") for side in ("chosen_right", "rejected_right"))
        regime = name.partition(",")[0]
        told_row = (
            rf"\| {re.escape(regime)} \| [^|]+ \| {re.escape(' | '.join([counts, *sides]))} \|"
        )
        assert re.search(told_row, page), (name, told_row)


def test_the_readme_tells_what_a_dollar_buys_as_the_table_has_it():
    page, of = words(REPO / "README.md"), regimes("table-draw-6.json")["stronger"]
    percent = {arm: f"{round(100 * row['executed'])} %" for arm, row in of["arms"].items()}
    assert f"acts right in {percent['as shipped']} of new repositories" in page
    assert f"in {percent['nothing']} untrained" in page
    assert f"comes to {percent['one teacher, SFT']}, which is not surely less" in page
    shipped, teacher = (of["arms"][arm]["interval"] for arm in ("as shipped", "one teacher, SFT"))
    assert shipped[0] < teacher[1], "the intervals lie apart: it is surely less"


def test_the_readme_tells_what_replay_costs_as_its_page_has_it():
    page = words(REPO / "README.md")
    [figures] = re.findall(
        r"costs \$(\d\.\d\d) to \$(\d\.\d\d) as shipped, and \$(\d+\.\d\d)", page
    )
    told_there = words(REPO / "docs" / "replay.md")
    assert [each for each in figures if each not in told_there] == []
