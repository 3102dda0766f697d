"""A whole round on policy: train, sample the trained model, train on that, sample again."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.budget.spending import estimate_samples, stale_work
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.integration.test_training import CONFIG
from tests.support.forked import forked_python

pytestmark = pytest.mark.slow

N_SAMPLES = 2
SESSIONS = ("6cfe9440", "a9359e44", "e281782e")
"""Short ones, with pairs and agreements."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("on-policy") / "data"


def open_root(root: Path, **trainee) -> Pipeline:
    if not (root.parent / "train.yaml").exists():
        (root.parent / "train.yaml").write_text(CONFIG)
    changes = {
        "ingest": {"sources": [next(SESSIONS_DIR.rglob(f"{name}*.jsonl")) for name in SESSIONS]},
        "replay": {"sample_teachers": True, "ask_at": "steps"},
        "train": {"config": root.parent / "train.yaml"},
        "trainee": trainee,
    }
    return Pipeline(Settings.load(data_dir=root, changes=changes, env={}))


def test_a_round_on_policy_goes_from_samples_to_the_dataset_and_back(root, monkeypatch):
    monkeypatch.setattr("sys.executable", forked_python())
    work = open_root(root)
    [batch] = work.ingest_new()
    for stage in (work.replay, work.pairs, work.normalize):
        stage(batch)
    work.publish()
    work.train()
    work = open_root(
        root,
        folder=root / "model" / "checkpoint",
        n_samples=N_SAMPLES,
        max_prompt_tokens=128,
        max_completion_tokens=400,
        temperature=2.0,  # a model of 16 steps seldom ends by itself
    )
    n_calls = estimate_samples(work, [batch]).n_calls
    first = work.sample(batch).report
    outcomes = {row["outcome"] for row in work.root.read("outcomes", batch).to_pylist()}
    assert {"pair", "agreement"} <= outcomes
    assert n_calls == first["n_sent"] == first["n_samples"] == N_SAMPLES * first["n_states"]
    assert first["n_samples"] == sum(first["errors"].values()) + sum(first["outcomes"].values())
    # A model of 16 steps writes no calls: its texts show without the prompt which side is worse.
    assert first["n_pairs"] == 0
    assert "Train on `chosen` first" in first["advice"]
    assert work.sample(batch).is_reused
    assert estimate_samples(work, [batch]).n_calls == 0

    work.normalize(batch)
    work.publish()
    parts = [*(root / "dataset" / "data" / "pairs").rglob("*.parquet")]
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    assert {row["rejected_source"] for row in rows} == {"recorded"}

    (root.parent / "train.yaml").write_text(CONFIG.replace("seed: 0", "seed: 1"))
    assert not open_root(root).train().is_reused
    second = open_root(root, **work.settings.trainee.model_dump(exclude_none=True))
    [why] = stale_work(second)["batches"][batch]["sample"]
    assert why.startswith("trainee.folder: checkpoint@")
    again = second.sample(batch)
    report = again.report
    # Other weights: what was sampled of the old ones is not taken for theirs.
    assert not again.is_reused
    assert report["n_sent"] == first["n_sent"]
    assert report["n_states"] == first["n_states"]
    assert "sample" not in stale_work(second)["batches"].get(batch, {})


def test_without_a_model_the_stage_says_what_to_set(tmp_path):
    work = open_root(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"trainee\.folder"):
        work.sample("any")
