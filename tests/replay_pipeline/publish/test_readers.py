"""The dataset in the hands of pandas and polars, by its folder."""

import json

import pandas as pd
import polars as pl
import pytest

from replay_pipeline.publish import publish


@pytest.fixture(scope="module")
def folder(tmp_path_factory, kept_table):
    folder = tmp_path_factory.mktemp("published") / "set"
    publish([("b1", kept_table(*range(8))), ("b2", kept_table(*range(8, 16)))], folder=folder)
    return folder / "data" / "pairs"


def test_pandas_reads_the_folder_of_a_config_with_messages_as_structs(folder):
    pairs = pd.read_parquet(folder)
    assert len(pairs) == 16
    assert set(pairs["trace_batch"]) == {"b1", "b2"}
    row = pairs.set_index("state_id").loc["state-3"]
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "tool"]
    (call,) = row["chosen"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"file_path": "src/module_3.py"}


def test_polars_asks_for_fields_of_messages(folder):
    last = pl.col("prompt").list.last().struct
    called = (
        pl.col("chosen")
        .list.first()
        .struct.field("tool_calls")
        .list.first()
        .struct.field("function")
    )
    found = (
        pl.scan_parquet(folder / "**" / "*.parquet")
        .select(
            "trace_batch",
            role=last.field("role"),
            tool=called.struct.field("name"),
            path=called.struct.field("arguments").str.json_path_match("$.file_path"),
        )
        .collect()
    )
    assert found["role"].to_list() == ["tool"] * 16
    assert set(found["tool"]) == {"Read"}
    assert set(found["path"]) == {f"src/module_{n}.py" for n in range(16)}
    assert set(found["trace_batch"]) == {"b1", "b2"}
