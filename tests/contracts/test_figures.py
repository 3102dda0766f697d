"""Figures of the front page are those of the tables that a command wrote."""

import copy
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).parents[2]
RECIPE = REPO / "recipes" / "what_a_dollar_buys"
PLAN = RECIPE / "preregistration.toml"


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


def trained_by(values: dict[str, Any]) -> str | None:
    """Return the settings of the recipe's arms that a file trains by, or None if no arm measures them."""
    trl = values["trl"]
    if trl["objective"] != "sft" or trl.get("alpha_sdpo"):
        return None
    return "shipped" if trl["beta_replay"] else "imitate"


def act_worse(table: dict[str, Any], recipe: dict[str, Any]) -> set[str]:
    """Return the settings by which an arm surely acts worse than the untrained model, or than another arm on the same rows."""
    # What a ceiling, a control, or another purchase teaches tells nothing of settings.
    own = {arm["name"]: arm for arm in recipe["arms"] if "regime" not in arm}
    own["nothing"] = {"settings": "untrained"}
    named = tomllib.loads(PLAN.read_text("utf-8"))["named"]
    found = set()
    for figures in (each for regime in table["regimes"].values() for each in regime.values()):
        p_of = dict(figures["corrected_p"])
        if "named" in figures:
            p_of[f"{named['ours']} - {named['theirs']}"] = figures["named"]["p"]
        for name, p in p_of.items():
            arms = sorted(name.split(" - "), key=lambda one: figures["arms"][one]["executed"])
            worse, better = (own.get(arm, {"settings": "control"}) for arm in arms)
            settings = [worse.get("settings"), better.get("settings")]
            rows = [
                [arm.get(key) for key in ("lessons", "teachers", "rounds")]
                for arm in (worse, better)
            ]
            is_told = "untrained" in settings or rows[0] == rows[1]
            if p < 0.05 and is_told and "control" not in settings and settings[0] != settings[1]:
                found.add(settings[0])
    return found


def test_no_bundled_file_trains_by_what_the_recipes_table_shows_to_act_worse():
    table = json.loads((RECIPE / "table.json").read_text("utf-8"))
    recipe = tomllib.loads((RECIPE / "arms.toml").read_text("utf-8"))
    files = sorted((REPO / "trainer").glob("*.yaml"))
    by = {path.name: trained_by(yaml.safe_load(path.read_text("utf-8"))) for path in files}
    assert set(by) >= {"tiny.yaml", "demo.yaml", "pretrained.yaml", "gpu.yaml"}
    assert set(by.values()) == {"shipped", "imitate"}
    worse = act_worse(table, recipe)
    assert {name: settings for name, settings in by.items() if settings in worse} == {}
    # A draw in which an arm acts worse than the untrained model would refuse its files, and one in which the named
    # arms differ would not: they train on other rows.
    told = copy.deepcopy(table)
    figures = told["regimes"][told["preregistered"]["regime"]]["epochs"]
    figures["named"]["p"] = 0.01
    assert act_worse(told, recipe) == worse
    figures["corrected_p"]["as shipped - nothing"] = 0.01
    figures["arms"]["as shipped"]["executed"] = 0.0
    assert act_worse(told, recipe) - worse == {"shipped"}
    three_channels = (REPO / "recipes/trl/three_channels.yaml").read_text("utf-8")
    assert trained_by(yaml.safe_load(three_channels)) is None


def test_the_drift_term_that_ships_has_most_pairs_right_of_those_that_keep_three_other_domains():
    told = (REPO / "recipes" / "real_model" / "README.md").read_text("utf-8")
    row = r"^\| ([^|]+) \| (\d+) % \(.+?\) \|.*\| ([^|]+, [^|]+) % \|$"
    measured = {
        name: (int(share), max(float(rise.replace("−", "-")) for rise in rises.split(", ")))
        for name, share, rises in re.findall(row, told, re.M)
    }
    assert len(measured) == 6
    keeping = {name: share for name, (share, rise) in measured.items() if rise <= 2}
    [shipped] = [name for name in measured if name.endswith(", as shipped")]
    assert max(keeping, key=keeping.__getitem__) == shipped
    for file in ("pretrained.yaml", "demo.yaml"):
        trl = yaml.safe_load((REPO / "trainer" / file).read_text("utf-8"))["trl"]
        assert trl["drift_weight"] == float(shipped.removesuffix(", as shipped"))


def test_the_readme_tells_what_replay_costs_as_its_page_has_it():
    page = words(REPO / "README.md")
    [figures] = re.findall(
        r"costs \$(\d\.\d\d) to \$(\d\.\d\d) as shipped, and \$(\d+\.\d\d)", page
    )
    told_there = words(REPO / "docs" / "replay.md")
    assert [each for each in figures if each not in told_there] == []
