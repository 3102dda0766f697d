"""What the docs say of costs is what `benchmarks/cost.py` printed last."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[3]
COST = json.loads((ROOT / "benchmarks" / "results" / "cost.json").read_text("utf-8"))
FRONTIER = [row for row in COST["rows"] if row.get("teachers") == "frontier teachers"]
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "replay.md").read_text("utf-8")


def dollars(beginning):
    found = [row for row in FRONTIER if row["policy"].startswith(beginning)]
    amounts = sorted(f"{row['usd_per_50_steps']:.2f}" for row in found)
    return amounts[0] if len(found) == 1 else f"{amounts[0]} to {amounts[-1]}"


def test_the_default_gate_meets_its_mark_under_each_of_three_models_of_votes():
    gated = [row for row in FRONTIER if row["policy"].startswith("lanes, as shipped (")]
    assert len(gated) == 3
    assert all(row["usd_per_50_steps"] <= 1.5 and row["pairs_kept"] >= 0.9 for row in gated)


def test_cheap_first_loses_no_pair_and_every_gate_costs_less_than_lanes():
    by_turns = ("lanes, cheap_first", "lanes, as shipped")
    alone = [row for row in FRONTIER if row["policy"].startswith(by_turns)]
    assert [row["pairs_kept"] for row in alone] == [1.0] * 6
    windows = [row for row in COST["rows"] if row.get("policy", "").endswith(("5", "10", "32000"))]
    assert len(windows) == 3
    lanes = float(dollars("lanes in order"))
    assert all(row["usd_per_50_steps"] < lanes for row in [*alone, *windows])


def test_the_readme_and_the_page_say_the_figures_of_the_benchmark():
    shipped, naive = (dollars(each) for each in ("lanes, as shipped", "every state"))
    readme = " ".join(README.split())
    assert (
        f"costs ${shipped.replace('to ', 'to $')} as shipped, and ${naive} if everybody" in readme
    )
    lanes = dollars("lanes in order")
    assert (
        f"${shipped} as shipped, ${lanes} if lanes ask every teacher everywhere, ${naive} so"
        in " ".join(PAGE.split())
    )
    kept = [row["pairs_kept"] for row in FRONTIER if row["policy"].startswith(("lanes", "every"))]
    assert set(kept) == {1.0}


def test_forecast_and_bound_meet_their_marks():
    assert all(0.75 <= ratio <= 1.25 for ratio in COST["forecast"])
    assert COST["bound"] <= 1.5
