"""Roots that older versions recorded, whose session logs are gone: brought over, and published."""

import itertools
import json
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replay_pipeline.actions import canonical_action
from replay_pipeline.errors import SchemaError
from replay_pipeline.judge.feasibility import cwd_of
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.storage.schemas import TABLES
from tests.roots import pipeline_at

ROOTS = Path(__file__).parents[2] / "data" / "roots"
SAMPLE = {"replay": {"sample_teachers": True}}


def opened(folder: Path, name: str) -> Pipeline:
    with tarfile.open(ROOTS / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return pipeline_at(folder, **SAMPLE)


def rows_of(dataset: Path) -> dict[str, list[dict]]:
    """The rows of a dataset by config and split, in one order."""
    found: dict[str, list[dict]] = {}
    for path in sorted((dataset / "data").rglob("*.parquet")):
        config, split = path.relative_to(dataset / "data").parts[:2]
        rows = pq.read_table(path, partitioning=None).to_pylist()
        found.setdefault(f"{config}/{split}", []).extend(rows)
    return {key: sorted(rows, key=repr) for key, rows in found.items()}


SIDES = ("chosen", "rejected", "completion", "consensus")


def recorded(rows: list[dict], names: list[str]) -> list[str]:
    """What the session and its teachers said: the system prompt and tools are of today's release.

    Sides are compared as actions, since older versions published another form of them.
    """
    return sorted(
        json.dumps([value_of(row, name) for name in names], sort_keys=True) for row in rows
    )


def value_of(row: dict, name: str):
    value = said(row[name])
    if name == "prompt":
        return value[1:]
    if name not in SIDES:
        return value
    message = value[-1] if isinstance(value, list) else value
    return canonical_action(message, cwd=cwd_of(said(row["prompt"]))).render()


def said(value):
    """Messages by what they say: they were JSON text, and are structs with nulls and arguments of it."""
    if isinstance(value, str) and value.startswith("{"):
        return said(json.loads(value))
    if isinstance(value, dict):
        return {key: said(one) for key, one in value.items() if one is not None}
    return [said(one) for one in value] if isinstance(value, list) else value


@pytest.fixture(params=["schema-1", "0.1.0"])
def old(request, tmp_path) -> Pipeline:
    return opened(tmp_path / "data", request.param)


@pytest.mark.slow
def test_an_old_root_without_its_logs_publishes_the_same_rows_for_nothing(old):
    before = rows_of(old.settings.dataset_dir())
    assert old.upgrade()["receipts"] == dict.fromkeys(("ingest", "replay", "pairs", "normalize"), 2)
    for name, batch in itertools.product(TABLES, old.batches()):
        # Only a model that is trained has been sampled, and nobody asked for probabilities.
        assert old.root.has(name, batch) != name.startswith(("sample", "token_logprobs"))
        assert not old.root.has(name, batch) or old.root.read(name, batch).num_rows >= 0
    spent = old.status()["ledger"]["spent_usd"]
    assert spent > 0
    old.publish()
    after = rows_of(old.settings.dataset_dir())
    # Pairs that are cut to a length came later.
    assert after.keys() - before.keys() == {"pairs_8k/train", "pairs_8k/test"}
    assert before.keys() < after.keys()
    for key, rows in before.items():
        names = sorted(set(rows[0]) & set(after[key][0]) - {"tools"})
        assert {"prompt", "state_id"} <= set(names)
        assert recorded(after[key], names) == recorded(rows, names)
    assert old.status()["ledger"]["spent_usd"] == spent
    assert old.upgrade() == {"tables": {}, "receipts": {}}


def test_an_upgraded_root_goes_on_as_one_of_today(old):
    old.upgrade()
    batch = old.batches()[0]
    turns, states = old.root.read("turns", batch), old.root.read("states", batch)
    assert old.ingest(batch).report["n_files_gone"] > 0
    assert (old.root.read("turns", batch), old.root.read("states", batch)) == (turns, states)
    assert old.replay(batch, max_total_usd=0).is_reused
    pairs = old.pairs(batch)
    assert not pairs.is_reused
    assert pairs.report["n_pairs"] > 0
    assert "normalize" in old.status()["batches"][batch]
    assert old.summary(since={})["spent_usd"] > 0


def test_both_versions_come_to_the_same_states(tmp_path):
    """The sessions are the same, so what either version left comes to the same turns."""
    works = [opened(tmp_path / name, name) for name in ("schema-1", "0.1.0")]
    for work in works:
        work.upgrade()
    first, second = ([work.root.read_all(n) for n in ("turns", "states")] for work in works)
    assert first == second


def test_a_table_of_a_version_to_come_is_refused_by_name(old):
    path = old.root.part("outcomes", old.batches()[0])
    table = pq.ParquetFile(path).read()
    pq.write_table(table.replace_schema_metadata({"schema_version": "99"}), path)
    with pytest.raises(SchemaError, match=r"outcomes.*schema version 99"):
        old.upgrade()


def test_an_old_table_says_what_brings_it_over(old):
    with pytest.raises(SchemaError, match="replay-pipeline upgrade"):
        old.root.read("dpo_pairs", old.batches()[0])
