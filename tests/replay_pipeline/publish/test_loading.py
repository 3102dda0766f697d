"""The dataset in the hands of its users: `datasets`, pandas, and polars."""

import json

import pytest

from replay_pipeline.publish import publish
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "set"
    batches = [("b1", kept_table(*range(8))), ("b2", kept_table(*range(8, 16)))]
    publish(batches, folder=folder, positives=[("b2", positives_table(*range(40, 46)))])
    return folder


@pytest.fixture(scope="module")
def load(folder, tmp_path_factory):
    import datasets

    cache = tmp_path_factory.mktemp("cache")

    def load(config, **options):
        return datasets.load_dataset(str(folder), config, cache_dir=str(cache), **options)

    return load


def test_the_default_config_is_pairs_of_messages(load):
    rows = load(None)
    assert set(rows) == {"train", "test"}
    every = {row["state_id"]: row for split in rows.values() for row in split}
    assert len(every) == 16
    row, source = every["state-3"], kept_row(3)
    none = {"tool_calls": None, "tool_call_id": None}
    assert row["prompt"][0] == none | json.loads(source["state_messages_json"])[0]
    (chosen,) = row["chosen"]
    assert chosen["content"] == ""
    function = {"name": "Read", "arguments": '{"file_path":"src/module_3.py"}'}
    assert chosen["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    assert row["rejected"] == [none | json.loads(source["rejected_messages_json"])[0]]
    assert json.loads(row["tools"]) == json.loads(source["tools_json"])
    scalars = ["session_id", "agreement_level", "n_teachers_agreeing", "teachers_agreeing"]
    scalars += ["hint", "weight", "source", "is_distillable", "student_model", "outcome"]
    assert {name: row[name] for name in scalars} == {name: source[name] for name in scalars}


def test_what_nobody_confirmed_is_in_a_config_of_its_own(tmp_path):
    import datasets

    agreed, alone = positives_table(*range(6)), positives_table(*range(6, 12))
    kinds = ["answer"] * 5 + ["continuation"]
    alone = alone.set_column(alone.schema.get_field_index("kind"), "kind", [kinds])
    folder = tmp_path / "set"
    publish([], folder=folder, positives=[("b1", agreed), ("b2", alone)])

    def kinds_of(config):
        splits = datasets.load_dataset(str(folder), config, cache_dir=str(tmp_path / "cache"))
        return sorted(kind or "" for rows in splits.values() for kind in rows["kind"])

    assert kinds_of("answers") == kinds
    assert kinds_of("positives") == [""] * 6
    assert kinds_of("prompts") == ["agreement"] * 6


def test_a_dataset_without_rows_has_no_data_and_its_manifests_are_not_taken_for_it(tmp_path):
    import datasets

    publish([("b1", kept_table())], folder=tmp_path / "set")
    with pytest.raises(FileNotFoundError):
        datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))


def test_distillable_pairs_are_those_whose_teachers_allow_it(load):
    states = {row["state_id"] for split in load("pairs_distillable").values() for row in split}
    assert states == {f"state-{n}" for n in range(16) if n % 3}


def test_prompts_hold_every_consensus(load):
    rows = [row for split in load("prompts").values() for row in split]
    assert {row["kind"] for row in rows} == {"pair", "agreement"}
    assert len(rows) == 16 + 6
    assert all(row["consensus"]["tool_calls"] for row in rows)


def test_a_new_publication_is_never_hidden_by_the_cache_of_an_older_one(tmp_path):
    import datasets

    def states(folder):
        rows = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        return {row["state_id"] for split in rows.values() for row in split}

    here, there = tmp_path / "here" / "set", tmp_path / "there" / "set"
    publish([("b1", kept_table(1, 2, 3))], folder=here)
    assert states(here) == {"state-1", "state-2", "state-3"}
    publish([("b1", kept_table(4, 5, 6))], folder=here)
    assert states(here) == {"state-4", "state-5", "state-6"}
    publish([("b1", kept_table(7, 8, 9))], folder=there)
    assert states(there) == {"state-7", "state-8", "state-9"}


def test_pandas_reads_the_folder_of_a_config_with_messages_as_structs(folder):
    import pandas as pd

    pairs = pd.read_parquet(folder / "data" / "pairs")
    assert len(pairs) == 16
    assert set(pairs["trace_batch"]) == {"b1", "b2"}
    row = pairs.set_index("state_id").loc["state-3"]
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant", "tool"]
    (call,) = row["chosen"][0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"file_path": "src/module_3.py"}
