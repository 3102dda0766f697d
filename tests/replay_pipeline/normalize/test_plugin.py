"""Our recipes under data-juicer's own executor, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import replay_pipeline
from replay_pipeline.errors import ConfigError, MissingDependencyError, NormalizeError
from replay_pipeline.normalize import DJNormalizer, load_recipe
from tests.replay_pipeline.normalize.rows import pair_table, row
from tests.support.forked import forked
from tests.support.messages import call

pytestmark = pytest.mark.slow

EXECUTE = """
import sys
from replay_pipeline.normalize import data_juicer
data_juicer.load()  # data-juicer without its installer, and with our operators
from data_juicer.config import init_configs
from data_juicer.core.executor import DefaultExecutor
source, *recipes = sys.argv[1:]
for recipe in recipes:
    name = recipe.split("/")[-1].removesuffix(".yaml")
    arguments = ["--config", recipe, "--dataset_path", source, "--work_dir", f"work/{name}"]
    DefaultExecutor(init_configs([*arguments, "--export_path", f"{name}/out.parquet"])).run()
"""


@pytest.mark.slow
def test_the_executor_of_data_juicer_keeps_the_same_rows(tmp_path):
    texts = ["no", "read the file again", "--------", "unbelievable", "Read the File again!"]
    rows = [
        row(
            f"s{n}",
            session_id=f"x{n % 3}",
            prompt=f"p{n % 40}",
            chosen=texts[n % 5],
            rejected=["write it", "!!!!!! -- a", f"write it {n % 9}"][n // 5 % 3],
            chosen_action=call("Read", file_path=f"{n % 13}") if n % 4 == 0 else None,
        )
        for n in range(120)
    ]
    table = pair_table(*rows)
    pq.write_table(table, tmp_path / "pairs.parquet")
    recipes = {"agent": load_recipe("agent").path}
    done = subprocess.run(
        forked([sys.executable, "-c", EXECUTE, "pairs.parquet", *map(str, recipes.values())]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(replay_pipeline.__path__[0]).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in recipes:
        ours = DJNormalizer(name).run(table)
        theirs = pq.read_table(tmp_path / name / "out.parquet", partitioning=None)
        columns = ["state_id", "chosen", "rejected"]
        assert theirs.select(columns).to_pylist() == ours.kept.select(columns).to_pylist()
        assert 0 < len(ours.kept) < len(table)


def test_data_juicer_finds_the_operators_by_the_entry_point():
    """The distribution names the module; importing it registers every operator."""
    import tomllib

    project = Path(replay_pipeline.__path__[0]).parent / "pyproject.toml"
    entry_points = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"]
    assert entry_points["data_juicer.ops"] == {
        "replay_pipeline": "replay_pipeline.normalize.operators"
    }
    program = """
import importlib
importlib.import_module("replay_pipeline.normalize.operators")
from data_juicer.ops import OPERATORS
assert {"pair_secret_filter", "pair_near_deduplicator"} <= OPERATORS.modules.keys()
"""
    subprocess.run(forked([sys.executable, "-c", program]), check=True, capture_output=True)


@pytest.fixture(scope="module")
def some_pairs():
    """Rows of which every recipe drops some: short, odd, identical, twice, without an offered tool."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("Read", "Bash")]
    rows = [
        row(
            f"s{n}",
            session_id=f"x{n % 3}",
            prompt=f"p{n % 40}",
            chosen=["no", "read the file again", "--------", "Mail a@b.c, see http://x.y"][n % 4],
            chosen_action=call("Read", file_path=f"{n % 13}") if n % 4 == 0 else None,
            rejected=None if n == 5 else f"write it {n % 9}",
            tools=tools if n % 2 else None,
        )
        for n in range(200)
    ]
    return pair_table(*rows)


BUILT_IN = [
    {"text_length_filter": {"min_len": 3, "max_len": 500}},
    {"alphanumeric_filter": {"tokenization": False, "min_ratio": 0.3}},
    {"alphanumeric_filter": {"text_key": "rejected", "tokenization": False, "min_ratio": 0.5}},
    {"average_line_length_filter": {"min_len": 3}},
    {"maximum_line_length_filter": {"max_len": 400}},
    {"word_repetition_filter": {"rep_len": 3, "max_ratio": 0.9}},
    {"document_deduplicator": {"lowercase": True}},
]
"""data-juicer's operators as its own pages write them, and one that names a column."""


@pytest.mark.slow
def test_an_executor_judges_as_this_process_does(some_pairs, tmp_path):
    recipe = tmp_path / "built_in.yaml"
    recipe.write_text(json.dumps({"process": BUILT_IN}))
    ours = DJNormalizer(recipe).run(some_pairs)
    theirs = DJNormalizer(recipe, executor="default").run(some_pairs)
    assert theirs.dropped.to_pylist() == ours.dropped.to_pylist()
    assert theirs.kept.drop_columns("stats_json").equals(ours.kept.drop_columns("stats_json"))
    for mine, other in zip(ours.kept["stats_json"], theirs.kept["stats_json"], strict=True):
        assert json.loads(other.as_py()) == pytest.approx(json.loads(mine.as_py()), abs=1e-9)
    assert theirs.report.dropped == ours.report.dropped
    assert theirs.report.findings == ours.report.findings
    assert len(ours.kept) > 0
    assert len(ours.dropped) > 1


def test_an_unknown_executor_is_refused():
    with pytest.raises(ConfigError, match="in_process, default, ray"):
        DJNormalizer(executor="spark")


def test_without_ray_the_extra_is_named(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "ray" else find(name, *a)
    )
    with pytest.raises(MissingDependencyError, match=r"replay-pipeline\[normalize,ray\]"):
        DJNormalizer(executor="ray")


def test_an_executor_that_fails_ends_with_its_last_words(monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit('no disk is left')"]
    monkeypatch.setattr("replay_pipeline.normalize.executors.python", lambda *_: command)
    with pytest.raises(NormalizeError, match="no disk is left"):
        DJNormalizer(executor="default").run(pair_table(row()))
