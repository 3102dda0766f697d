"""A folder that an older version published: lists of JSON texts, a folder name that repeats a column.

`tests/data/dataset_of_layout_1` and `dataset_of_layout_4` were written by these versions.
"""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from replay_pipeline.harness.neutral import system_prompt
from replay_pipeline.publish import layout, publish, retract
from replay_pipeline.publish.client_texts import texts_in
from replay_pipeline.publish.earlier import read_manifests
from trainer.data.dataset import load_preference_data

OLD = Path(__file__).parents[2] / "data" / "dataset_of_layout_1"


@pytest.fixture
def old(tmp_path):
    return shutil.copytree(OLD, tmp_path / "old")


def prompts_in(folder):
    data = load_preference_data(folder)
    return {row["state_id"]: row for row in [*data.pairs, *data.test_pairs]}


@pytest.mark.slow
def test_our_trainer_reads_both_alike(tmp_path, kept_table):
    batches = [("b1", kept_table(*range(6))), ("b2", kept_table(*range(6, 12)))]
    publish(batches, folder=tmp_path / "new")
    before, after = prompts_in(OLD), prompts_in(tmp_path / "new")
    assert before.keys() == after.keys() == {f"state-{n}" for n in range(12)}
    for state, row in before.items():
        for column in ("prompt", "tools", "hint"):
            assert row[column] == after[state][column], (state, column)
        for column in ("chosen", "rejected"):
            old, new = (
                (side["content"] or "", [call["function"] for call in side.get("tool_calls", ())])
                for (side,) in (row[column], after[state][column])
            )
            assert old == new, (state, column)
    arguments = after["state-3"]["chosen"][0]["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"file_path": "src/module_3.py"}


@pytest.mark.slow
def test_publishing_one_batch_again_brings_the_others_over(old, kept_table):
    report = publish([("b1", kept_table(*range(6)))], folder=old)
    assert sum(report.rows_by_split["pairs"].values()) == 12
    assert sum(report.rows_by_split["pairs_8k"].values()) == 12
    assert not [path for path in old.rglob("*") if "trace_batch=" in path.name]
    assert {m["layout"] for m in read_manifests(old).values()} == {layout.VERSION}
    assert len(prompts_in(old)) == 12


def test_retracting_from_an_older_folder_brings_it_over(old):
    retract(folder=old, session_ids=["session-1"])
    rows = prompts_in(old)
    assert len(rows) == 10
    assert not [path for path in old.rglob("*") if "trace_batch=" in path.name]


WITH_TEXTS = OLD.with_name("dataset_of_layout_4")
OF_THE_CLIENT = "You are the client, and read a file before you edit it."


def brought_by_a_publication(folder, kept_table):
    publish([("b3", kept_table(20))], folder=folder)


def brought_by_retracting(folder, kept_table):
    retract(folder=folder, batches=["nothing"])


@pytest.mark.slow
@pytest.mark.parametrize("bring", [brought_by_a_publication, brought_by_retracting])
def test_texts_of_clients_leave_the_prompts_of_an_older_dataset(bring, tmp_path, kept_table):
    folder = shutil.copytree(WITH_TEXTS, tmp_path / "old")
    before = prompts_in(folder)
    assert all(row["prompt"][0]["content"] == OF_THE_CLIENT for row in before.values())
    bring(folder, kept_table)
    assert {m["layout"] for m in read_manifests(folder).values()} == {layout.VERSION}
    after = prompts_in(folder)
    assert {state: (row["prompt"], row["tools"]) for state, row in before.items()} == {
        state: (row["prompt"], row["tools"]) for state, row in after.items() if state in before
    }
    assert len(texts_in(folder)) == 1
    shutil.rmtree(folder / "client_texts")
    for row in (neutral := prompts_in(folder)).values():
        if row["state_id"] in before:
            assert row["prompt"][0]["content"] == system_prompt("/home/user/project")
    assert OF_THE_CLIENT not in json.dumps(list(neutral.values()))
    rows = [pq.ParquetFile(file).read().to_pylist() for file in folder.rglob("*.parquet")]
    assert OF_THE_CLIENT not in json.dumps(rows)
