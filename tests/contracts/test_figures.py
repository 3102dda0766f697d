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
ON_FRONT = (
    "cheap first, SFT",
    "consensus, SFT",
    "one teacher, SFT",
    "recorded sessions, SFT",
    "nothing",
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
    page, found = words(REPO / "README.md"), regimes("table.json")["stronger"]
    for arm in ON_FRONT:
        assert f"| {told(found['arms'][arm])} |" in page, (arm, told(found["arms"][arm]))
    shipped = regimes("table-draw-6.json")["stronger"]["arms"]["as shipped"]
    assert f"as shipped | | {told(shipped)} |" in page
    for file, ahead in (
        ("table.json", " ahead of the best other way"),
        ("table-draw-6.json", ""),
    ):
        of = regimes(file)["stronger"]
        low, high = (round(100 * each) for each in of["named"]["interval"])
        points = f"{round(100 * of['named']['difference'])} points{ahead} (+{low} to +{high}, p = "
        assert points + f"{of['named']['p']:.3f}".lstrip("0") in page
        assert told(of["arms"][of["named"]["best_of_agreement"]]) in page


def test_the_readme_tells_what_replay_costs_as_its_page_has_it():
    row = r"\| (\d+\.\d\d) to (\d+\.\d\d) \| (\d+\.\d\d) \| (\d+\.\d\d) \|"
    [figures] = re.findall(row, words(REPO / "README.md"))
    page = words(REPO / "docs" / "replay.md")
    assert [each for each in figures if each not in page] == []
