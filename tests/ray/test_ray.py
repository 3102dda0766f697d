"""Normalization by data-juicer's Ray executor, on a cluster of two nodes."""

import json
import time

import pyarrow as pa
import pytest
import ray

from replay_pipeline.errors import NormalizeError
from replay_pipeline.normalize import DJNormalizer, normalizer
from tests.roots import sample_root

N_ROWS_PER_FILE = 20
"""So few that there is work for both nodes."""
UNKNOWN_TOOL = {"type": "function", "function": {"name": "Nobody", "arguments": "{}"}}
SPOILED = [
    {"chosen": "no", "chosen_action_json": None},
    {"rejected": "-------- !!", "rejected_action_json": None},
    {"chosen_action_json": json.dumps({"role": "assistant", "tool_calls": [UNKNOWN_TOOL]})},
    {"rejected": None},
]
"""What the filters of a recipe drop, each in a row of its own."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The sample's pairs, some of them spoiled so that filters drop them, and their prompts."""
    work = sample_root(tmp_path_factory.mktemp("sample"), n_batch_sessions=64)
    (batch,) = work.ingest_new()
    work.replay(batch)
    work.pairs(batch)
    pairs = work.root.read("dpo_pairs", batch)
    rows = pairs.to_pylist()
    for n, spoiled in enumerate(SPOILED * 5):
        rows[7 * n].update(spoiled)
    return pa.Table.from_pylist(rows, pairs.schema), work.prompts(batch)


@pytest.mark.parametrize("recipe", ["agent", "default", "tool_calls", "strict"])
def test_a_cluster_judges_as_this_process_does(cluster, sample, recipe, monkeypatch):
    monkeypatch.setattr(normalizer, "_ROWS_PER_FILE", N_ROWS_PER_FILE)
    table, prompts = sample
    ours = DJNormalizer(recipe).run(table, prompts=prompts)
    before = workers_of_filters(cluster)
    theirs = DJNormalizer(recipe, executor="ray", ray_address=cluster).run(table, prompts=prompts)
    assert theirs.dropped.to_pylist() == ours.dropped.to_pylist()
    assert theirs.report.dropped == ours.report.dropped
    assert theirs.kept.drop_columns("stats_json").equals(ours.kept.drop_columns("stats_json"))
    for mine, other in zip(ours.kept["stats_json"], theirs.kept["stats_json"], strict=True):
        assert json.loads(other.as_py()) == pytest.approx(json.loads(mine.as_py()), abs=1e-9)
    assert sum(name.endswith("_filter") for name in ours.report.dropped) >= 2, ours.report
    assert len(workers_of_filters(cluster, n_more_than=len(before) + 1) - before) >= 2


def workers_of_filters(cluster: str, *, n_more_than: int = -1) -> set[str]:
    """Workers that the cluster's records say have mapped rows; they come a second late."""
    deadline = time.monotonic() + 30
    ray.init(cluster, log_to_driver=False)
    try:
        while True:
            events = ray.timeline()
            found = {e["tid"] for e in events if e["name"].endswith("map_operator._map_task")}
            if len(found) > n_more_than or time.monotonic() > deadline:
                return found
            time.sleep(0.2)
    finally:
        ray.shutdown()


def test_a_ray_of_its_own_leaves_no_token_in_the_home_folder(sample, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE")
    table, prompts = sample
    ours = DJNormalizer().run(table, prompts=prompts)
    theirs = DJNormalizer(executor="ray", ray_address="local").run(table, prompts=prompts)
    assert theirs.dropped.to_pylist() == ours.dropped.to_pylist()
    assert not (tmp_path / ".ray").exists()


@pytest.mark.usefixtures("cluster")
def test_auto_finds_the_cluster(sample):
    table, prompts = sample
    theirs = DJNormalizer(executor="ray", ray_address="auto").run(table, prompts=prompts)
    assert len(theirs.kept)


def test_what_ray_refuses_is_said_in_its_words(sample):
    table, prompts = sample
    with pytest.raises(NormalizeError, match="Ray at nonsense cannot be used: Invalid address"):
        DJNormalizer(executor="ray", ray_address="nonsense").run(table, prompts=prompts)
