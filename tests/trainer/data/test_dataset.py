import shutil

import pytest
from datasets import Dataset

from trainer.data.dataset import load_preference_data
from trainer.errors import DatasetError


def test_rows_come_back_as_messages_split_by_session(dataset_folder):
    data = load_preference_data(dataset_folder)
    assert (len(data.pairs), len(data.test_pairs)) == (20, 12)
    assert not {r["session_id"] for r in data.pairs} & {r["session_id"] for r in data.test_pairs}
    row = data.pairs[0]
    assert row["prompt"][0]["role"] == "user"
    assert row["chosen"][0]["tool_calls"][0]["function"]["name"] == "Read"
    assert data.prompts[0]["consensus"]["role"] == "assistant"
    assert row["tools"][0]["function"]["name"] == "Read"


def test_a_dataset_of_pairs_alone_is_enough(dataset_folder, tmp_path):
    (tmp_path / "pairs").mkdir()
    shutil.copy(dataset_folder / "pairs" / "train-0.parquet", tmp_path / "pairs")
    card = "---\nconfigs:\n- config_name: pairs\n  data_files:\n  - split: train\n"
    (tmp_path / "README.md").write_text(card + "    path: pairs/train-*.parquet\n---\n")
    data = load_preference_data(str(tmp_path))
    assert len(data.pairs) == 20
    assert (data.prompts, data.test_pairs, data.test_prompts) == ([], [], [])


def test_a_folder_published_again_is_read_again(dataset_folder, tmp_path):
    folder = shutil.copytree(dataset_folder, tmp_path / "published")
    assert len(load_preference_data(folder).pairs) == 20
    shutil.copy(folder / "pairs" / "test-0.parquet", folder / "pairs" / "train-0.parquet")
    assert len(load_preference_data(folder).pairs) == 12


def test_a_missing_folder_and_a_missing_column_are_named(tmp_path):
    with pytest.raises(DatasetError, match="no such dataset folder"):
        load_preference_data(tmp_path / "nothing")
    (tmp_path / "pairs").mkdir()
    Dataset.from_list([{"prompt": "x", "chosen": "y"}]).to_parquet(
        tmp_path / "pairs" / "train-0.parquet"
    )
    card = "---\nconfigs:\n- config_name: pairs\n  data_files:\n  - split: train\n"
    (tmp_path / "README.md").write_text(card + "    path: pairs/train-*.parquet\n---\n")
    with pytest.raises(DatasetError, match="has no column rejected"):
        load_preference_data(tmp_path)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="cannot read pairs/train"):
        load_preference_data(tmp_path)
