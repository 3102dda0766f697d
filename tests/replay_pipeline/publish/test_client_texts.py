"""Texts of clients lie beside the dataset; rows name them, and have the neutral form in their place."""

import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from replay_pipeline.errors import SecretFoundError
from replay_pipeline.ingesters.harness.harness import system_prompt
from replay_pipeline.publish import publish, retract
from replay_pipeline.publish.client_texts import texts_in
from tests.replay_pipeline.publish.rows import kept_row, kept_table, tool
from tests.support.hub import HubServer

OF_THE_CLIENT = "You are the client, and read a file before you edit it."
LAST = {"role": "user", "content": "Skills: none."}


def client_texts(row, *, system=OF_THE_CLIENT):
    """What a client had around the conversation of a row, as states in the neutral form have it."""
    first = json.loads(row["state_messages_json"])[0]
    own = [{"role": "system", "content": system}]
    own += [{"role": "user", "content": f"Be kind.\n\n{first['content']}"}]
    tools = [tool("Read", file_path="string"), tool("Grep", pattern="string"), tool("Bash")]
    return {"n_replaced": 2, "messages": [*own, LAST], "tools": tools}


@pytest.fixture
def batch():
    def batch(*numbers, with_texts=lambda number: True, **more):
        rows, texts = [], []
        for number in numbers:
            row = kept_row(number)
            text = client_texts(row, **more) if with_texts(number) else None
            head = {"role": "system", "content": system_prompt()}
            messages = [head, *json.loads(row["state_messages_json"])]
            rows.append(row | {"state_messages_json": json.dumps(messages)})
            texts.append(text and json.dumps(text))
        return kept_table(*rows).append_column("client_texts_json", pa.array(texts, pa.string()))

    return batch


def is_odd(number):
    return number % 2 == 1


def rows_in(folder):
    from trainer.data.dataset import load_preference_data  # `datasets` comes with it

    data = load_preference_data(folder)
    return {row["state_id"]: row for row in [*data.pairs, *data.test_pairs]}


def stored(folder, config="pairs"):
    files = sorted(folder.glob(f"data/{config}/*/*/*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def test_rows_are_neutral_and_the_texts_lie_once(tmp_path, batch):
    publish([("b", batch(*range(12), with_texts=is_odd))], folder=tmp_path / "d")
    rows = stored(tmp_path / "d")
    assert len(rows) == 12
    assert OF_THE_CLIENT not in json.dumps(rows)
    assert all(row["prompt"][0]["content"] == system_prompt() for row in rows)
    assert {is_odd(int(row["state_id"].split("-")[1])) for row in rows if row["client_texts"]} == {
        True
    }
    (file,) = (tmp_path / "d" / "client_texts" / "b").iterdir()
    names = pq.read_table(file)["hash"].to_pylist()
    assert sorted(names) == sorted({row["client_texts"] for row in rows} - {None})
    assert {row["client_texts"] for row in stored(tmp_path / "d", "pairs_8k")} == {None}


def test_the_trainer_puts_them_in_and_says_where_it_cannot(tmp_path, batch, caplog):
    publish([("b", batch(*range(8), with_texts=is_odd))], folder=tmp_path / "d")
    rows = rows_in(tmp_path / "d")
    for number in range(8):
        row = rows[f"state-{number}"]
        contents = [message["content"] for message in row["prompt"]]
        names = [each["function"]["name"] for each in row["tools"]]
        if is_odd(number):
            assert contents[:2] == [OF_THE_CLIENT, f"Be kind.\n\nWhy does test {number} fail?"]
            assert contents[2] == "Skills: none."
            assert names == ["Read", "Grep", "Bash"]
        else:
            assert contents[:2] == [system_prompt(), f"Why does test {number} fail?"]
            assert names == ["Read", "Grep"]
        assert contents[-1] == f"tests/test_{number}.py:3"
    for file in (tmp_path / "d").glob("client_texts/*/*"):
        file.unlink()
    with caplog.at_level(logging.WARNING):
        neutral = rows_in(tmp_path / "d")
    assert all(row["prompt"][0]["content"] == system_prompt() for row in neutral.values())
    assert "use the neutral form" in caplog.text


def test_the_card_puts_in_what_the_trainer_does(tmp_path, batch, monkeypatch):
    folder = tmp_path / "d"
    publish([("b", batch(*range(8), with_texts=is_odd))], folder=folder)
    ours = rows_in(folder)
    card = (folder / "README.md").read_text()
    code = re.search(r"```python\n(try:\n.*?)```", card, re.DOTALL)[1]
    from datasets import load_dataset

    told: dict = {"load_dataset": load_dataset, "path": str(folder)}
    told["pairs"] = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    exec(code, told)
    loaded = {row["state_id"]: row for row in told["pairs"]}
    assert loaded
    assert loaded.keys() <= ours.keys()
    for state_id, row in loaded.items():
        shown = [(each["role"], each["content"]) for each in ours[state_id]["prompt"]]
        assert [(each["role"], each["content"]) for each in row["prompt"]] == shown


def test_retracting_takes_the_texts_of_a_session_along(tmp_path, batch):
    folder = tmp_path / "d"
    publish([("b", batch(*range(12)))], folder=folder)
    before = texts_in(folder)
    retract(folder=folder, session_ids=["session-1"])
    rows = stored(folder)
    assert {row["client_texts"] for row in rows} == texts_in(folder).keys() < before.keys()
    retract(folder=folder, batches=["b"])
    assert not texts_in(folder)


def test_no_secret_goes_out_with_a_text(tmp_path, batch):
    secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
    with pytest.raises(SecretFoundError, match="texts of clients"):
        publish([("b", batch(0, system=f"Log in with {secret}"))], folder=tmp_path / "d")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client
def test_a_push_leaves_the_texts_here(tmp_path, batch, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with HubServer() as server:
        target = {"repo_id": "me/set", "endpoint": server.url, "token": server.token}
        folder = tmp_path / "d"

        publish([("b", batch(*range(6)))], folder=folder, **target)
        files = server.repository("me/set")["files"]
        assert not {path for path in files if path.startswith("client_texts/")}
        assert texts_in(folder)
