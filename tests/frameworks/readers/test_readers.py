"""Readers of the published folder that are no dependency of ours: `datasets` 4.0 and duckdb."""

import json
import re
from pathlib import Path

import datasets
import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

HOW_TO = Path(__file__).parents[3] / "docs" / "look.md"


@pytest.fixture(scope="module")
def dataset(sessions):
    return sessions / "dataset"


@pytest.fixture(scope="module")
def n_rows(dataset):
    (manifest,) = (
        json.loads(path.read_text("utf-8")) for path in (dataset / "manifests").glob("[!_]*.json")
    )
    return {
        config: sum(sum(files.values()) for files in splits.values())
        for config, splits in manifest["files"].items()
    }


def test_datasets_4_0_reads_every_config_streaming_or_not(dataset, n_rows, tmp_path):
    assert datasets.__version__ == "4.0.0"
    for config, expected in n_rows.items():
        rows = datasets.load_dataset(str(dataset), config, cache_dir=str(tmp_path))
        assert sum(len(split) for split in rows.values()) == expected
        for split, loaded in rows.items():
            streamed = datasets.load_dataset(str(dataset), config, split=split, streaming=True)
            assert next(iter(streamed)) == loaded[0]
    message = datasets.load_dataset(str(dataset), "pairs", split="train", cache_dir=str(tmp_path))[
        9
    ]
    assert message["prompt"][1]["role"] == "user"
    (call,) = message["chosen"][0]["tool_calls"]
    assert call["function"]["name"] == "Read"
    assert set(json.loads(call["function"]["arguments"])) == {"file_path"}
    assert json.loads(message["tools"])[0]["function"]["name"] == "Read"


def test_every_reader_counts_the_same_rows_in_the_folder_of_a_config(dataset, n_rows):
    for config in ("pairs", "pairs_4k"):
        folder = dataset / "data" / config
        counted = duckdb.sql(f"SELECT count(*) FROM '{folder}/**/*.parquet'").fetchall()
        assert counted == [(n_rows[config],)]
        assert len(pd.read_parquet(folder)) == n_rows[config]
        assert len(pl.read_parquet(folder / "**" / "*.parquet")) == n_rows[config]
        assert pq.read_table(folder).num_rows == n_rows[config]


def test_the_queries_of_the_docs_run(sessions, tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(sessions)
    monkeypatch.chdir(tmp_path)
    queries = re.findall(r"```sql\n(.*?)```", HOW_TO.read_text("utf-8"), re.DOTALL)
    assert queries
    for query in queries:
        assert duckdb.sql(query).fetchall()
