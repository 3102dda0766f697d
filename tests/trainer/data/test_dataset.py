import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.published import rows_of
from trainer.data.collator import ComposerDataCollator
from trainer.data.dataset import load_preference_data
from trainer.data.sampler import weight_of
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


def test_a_dataset_of_lessons_alone_is_enough_to_imitate(dataset_folder, tmp_path):
    (tmp_path / "positives").mkdir()
    shutil.copy(dataset_folder / "positives" / "train-0.parquet", tmp_path / "positives")
    (tmp_path / "README.md").write_text(CARD.replace("pairs", "positives"))
    data = load_preference_data(str(tmp_path))
    assert data.pairs == []
    imitated = data.sft_pairs("consensus")
    assert len(imitated) == len(data.positives) == 10
    assert imitated[0]["chosen"] == data.positives[0]["completion"]


def test_a_folder_published_again_is_read_again(dataset_folder, tmp_path):
    folder = shutil.copytree(dataset_folder, tmp_path / "published")
    assert len(load_preference_data(folder).pairs) == 20
    shutil.copy(folder / "pairs" / "test-0.parquet", folder / "pairs" / "train-0.parquet")
    assert len(load_preference_data(folder).pairs) == 12


def test_a_missing_folder_and_a_missing_column_are_named(tmp_path):
    with pytest.raises(DatasetError, match="no such dataset folder"):
        load_preference_data(tmp_path / "nothing")
    with pytest.raises(DatasetError, match="has no column rejected"):
        load_preference_data(pairs_folder(tmp_path, [{"prompt": "x", "chosen": "y"}]))


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="cannot read pairs/train"):
        load_preference_data(tmp_path)


CARD = """---
configs:
- config_name: pairs
  data_files:
  - split: train
    path: pairs/train-*.parquet
---
"""


def pairs_folder(folder, rows):
    (folder / "pairs").mkdir(exist_ok=True)
    (folder / "README.md").write_text(CARD)
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "pairs" / "train-0.parquet")
    return folder


SAID = [{"role": "user", "content": "a"}]
GOOD = {"prompt": SAID, "chosen": SAID, "rejected": SAID, "weight": 1.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rejected": None}, "row 1, column rejected: expected a list of messages, not nothing"),
        ({"prompt": None}, "row 1, column prompt: expected a list of messages, not nothing"),
        ({"rejected": []}, "row 1, column rejected: expected a list of messages, not nothing"),
        ({"weight": -1.0}, "row 1, column weight: -1.0 is not a number that is at least 0"),
        ({"weight": float("nan")}, "row 1, column weight: nan is not a number that is at least 0"),
    ],
)
def test_a_fault_of_a_row_is_a_sentence_with_row_and_column(tmp_path, row, said):
    with pytest.raises(DatasetError, match=f"{tmp_path}: pairs/train, {said}"):
        load_preference_data(pairs_folder(tmp_path, [GOOD, GOOD | row]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"rejected": None}, "pairs, row 1, column rejected: expected a list of messages"),
        ({"tools": "Read, Edit"}, "pairs, row 1, column tools: expected a list of functions, or"),
        ({"tools": {"Read": 1}}, "pairs, row 1, column tools: expected a list of functions"),
    ],
)
def test_rows_given_to_the_trainer_are_held_to_the_same(composer, row, said):
    first, second = rows_of(1)[:2]
    with pytest.raises(DatasetError, match=said):
        composer(pairs=[first, second | row], beta_replay=1.0)


def test_names_that_arrow_put_into_other_rows_arguments_are_not_arguments(tmp_path):
    """A column of structs has every name in every row; a null in JSON text is somebody's own."""

    def calling(**arguments):
        function = {"name": "Read", "arguments": arguments}
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]

    rows = [
        GOOD | {"chosen": calling(path="a.py"), "rejected": calling(path="b.py")},
        GOOD | {"chosen": calling(lines=[1]), "rejected": calling(path="c.py")},
    ]
    first, second = load_preference_data(pairs_folder(tmp_path, rows)).pairs
    assert first["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"path": "a.py"}
    assert second["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"lines": [1]}
    own = [{"role": "assistant", "tool_calls": [{"function": {"name": "R", "arguments": "{}"}}]}]
    own[0]["tool_calls"][0]["function"]["arguments"] = '{"path": null}'
    written = [{**GOOD, "chosen": own, "rejected": own}]
    [read] = load_preference_data(pairs_folder(tmp_path, written)).pairs
    assert read["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"path": None}


def test_a_file_that_is_cut_short_is_a_sentence(tmp_path):
    folder = pairs_folder(tmp_path, [GOOD] * 3)
    path = folder / "pairs" / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DatasetError, match="cannot read pairs/train: "):
        load_preference_data(folder)


def test_a_weight_of_zero_is_zero_and_all_of_them_are_refused(tmp_path):
    rows = [GOOD, GOOD | {"weight": 0.0}, GOOD | {"weight": None}]
    pairs = load_preference_data(pairs_folder(tmp_path, rows)).pairs
    assert [weight_of(row) for row in pairs] == [1.0, 0.0, 1.0]
    with pytest.raises(DatasetError, match="column weight: all of them are 0"):
        load_preference_data(pairs_folder(tmp_path, [GOOD | {"weight": 0.0}]))


def test_a_batch_has_the_weights_of_its_rows(tokenizer):
    row = rows_of(1)[0]
    batch = ComposerDataCollator(tokenizer).pairs([row | {"weight": w} for w in (0.0, None, 0.5)])
    assert batch["dpo_weight"].tolist() == [0.0, 1.0, 0.5]
