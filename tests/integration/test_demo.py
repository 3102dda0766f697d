"""`replay-pipeline demo`, as `make demo` runs it."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.commands import command
from tests.support.forked import forked_python

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def table_rows(text: str) -> dict[str, str]:
    rows: dict[str, str] = {}
    name = ""
    for begins, words in re.findall(r"^│ (\w*) +│(.+)│$", text, re.M):
        name = begins or name  # a long row goes on below, without its name
        rows[name] = " ".join([rows[name], words.strip()] if not begins else [words.strip()])
    return rows


def said(folder: Path, *words: str) -> tuple[str, str]:
    home = str(Path.home())  # where the fonts of plots are known already
    done = command("demo", *words, cwd=folder, children=forked_python(), COLUMNS="120", HOME=home)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def demo(folder: Path) -> tuple[dict, str]:
    shown, _ = said(folder)
    return json.loads((folder / "demo" / "report.json").read_text()), shown


def test_the_demo_makes_pairs_a_dataset_and_a_model_and_then_reuses_them(tmp_path):
    """In two steps, as `make demo` runs it: what the first has done counts as done now."""
    first, told = said(tmp_path, "--until-pairs")
    assert "Pairs to look at first" in first
    assert first.count("Next: ") == 1
    assert (tmp_path / "demo" / "look" / "index.html").exists()
    assert not (tmp_path / "demo" / "dataset").exists()
    lines = told.splitlines()
    stages = [stage for stage, _ in groupby(line.partition(" ")[0] for line in lines)]
    assert stages[0] == "replay"
    assert len(stages) == len(set(stages))  # each is told once, from its beginning to its end
    replayed = [line for line in lines if line.startswith("replay ")]
    done = [int(line.split()[1].replace(",", "")) for line in replayed]
    assert done == sorted(set(done))
    assert replayed[-1].startswith(f"replay {done[-1]:,} of {done[-1]:,}, $")
    report, shown = demo(tmp_path)
    assert shown.count("Next: ") == 1
    assert report["sessions"] >= 6
    assert report["states"] >= 60
    assert report["turns"] > report["states"]
    assert report["calls"] > 0
    assert 0 < report["spent_usd"] <= report["max_total_usd"]
    assert report["pairs"] >= 10
    assert report["agreements"] >= report["pairs"]
    assert isinstance(report["dropped"], dict)
    assert report["train"]["loss_last"] < report["train"]["loss_first"]
    assert report["train"]["channels_live"] == ["policy", "replay"]
    assert report["train"]["steps"] > 0
    assert report["train"]["preference_accuracy_after"] >= 0.70
    # One of the 34 held-out pairs is worth three points.
    assert abs(report["train"]["blank_prompt_accuracy_after"] - 0.5) <= 0.1
    assert report["train"]["prompt_gain_after"] > 0.15
    train = report["train"]
    assert not train["acts_worse"]
    assert train["consensus_rate_after"] > train["consensus_rate_before"] + 0.1
    # Two of the 45 held-out states.
    assert train["valid_calls_after"] >= train["valid_calls_before"] - 0.05
    assert set(report["seconds"]) >= {"ingest", "replay", "pairs", "normalize", "publish", "train"}
    for word in ("dataset", "loss", "points by reading the prompt", "replay-pipeline ui"):
        assert word in shown

    page = (REPO / "docs" / "tutorial.md").read_text("utf-8")
    box = table_rows(page)
    for name in ("sessions", "states", "calls", "dollars", "agreements", "pairs", "dropped"):
        assert table_rows(shown)[name] == box[name]

    told_s = re.findall(rf"({'|'.join(report['seconds'])}) (\d+\.\d)", page)
    assert {name for name, _ in told_s} == set(report["seconds"])
    # As on the machine of a reader, or on a busy one.
    assert 0.05 < sum(report["seconds"].values()) / sum(float(s) for _, s in told_s) < 20

    from datasets import load_dataset  # half a second, which no other file waits for

    dataset = load_dataset(str(tmp_path / report["dataset"]), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in dataset.items()} == report["rows_by_split"]["pairs"]
    sessions = [set(dataset[split]["session_id"]) for split in ("train", "test")]
    assert not sessions[0] & sessions[1]

    assert all(report["seconds"].values())
    again, _ = demo(tmp_path)
    assert again["calls"] == 0
    assert again["newly_spent_usd"] == 0
    assert sum(again["seconds"].values()) == 0
    for key in ("pairs", "spent_usd", "rows_by_split", "train", "outcomes"):
        assert again[key] == report[key]
