"""`replay-train inspect`: what the model reads, what is scored, and what was cut."""

import json

import pytest

from tests.trainer.programs import words_of
from trainer.__main__ import main
from trainer.data.as_seen import parts_of
from trainer.data.dataset import load_preference_data

TIGHT = ("trl.max_prompt_tokens=200", "trl.max_response_tokens=8", "trl.render_tools=false")


@pytest.fixture
def inspect(dataset_folder, tmp_path, capsys):
    def call(*arguments: str, settings: tuple[str, ...] = ()) -> tuple[int, str, str]:
        told = words_of(f"dataset={dataset_folder}", f"output={tmp_path}", *settings)
        status = main(["inspect", *arguments, *told])
        return (status, *capsys.readouterr())

    return call


def test_rows_are_shown_with_what_is_scored_and_what_was_cut(inspect):
    status, shown, _ = inspect("--rows", "2", settings=TIGHT)
    assert status == 0
    assert shown.count("══ row") == 2
    _, told, _ = inspect("--rows", "2", "--json", settings=TIGHT)
    for row in json.loads(told):
        prompt, chosen = row["prompt (read, not scored)"], row["chosen (scored)"]
        assert prompt["text"] in shown
        assert chosen["text"] in shown
        assert chosen["n_tokens"] == len(chosen["token_ids"]) == 8
        assert f"prompt: {prompt['n_tokens']} of 200 tokens, read and not scored" in shown
        assert f"cut: {row['cut by max_response_tokens']['chosen']}" in shown
        assert "tokens cut off" in row["cut by max_response_tokens"]["chosen"]


def test_the_pairs_of_one_state_and_none_of_another(inspect):
    _, told, _ = inspect("--rows", "1", "--json")
    (row,) = json.loads(told)
    _, again, _ = inspect("--state", row["state_id"], "--json")
    assert row in json.loads(again)
    assert inspect("--state", "nobody", "--json")[1].strip() == "[]"
    status, _, error = inspect("--state", "nobody")
    assert status == 2
    assert "no state nobody among its training rows" in error


def test_a_state_that_is_only_imitated_shows_one_side(inspect, dataset_folder):
    state = load_preference_data(dataset_folder).positives[0]["state_id"]
    _, told, _ = inspect("--state", state, "--json")
    (row,) = json.loads(told)
    assert row["chosen (scored)"]["n_tokens"] == len(row["chosen (scored)"]["token_ids"]) > 0
    assert "rejected (scored)" not in row
    assert [heading.partition(":")[0] for heading, _ in parts_of(row)] == ["prompt", "chosen"]
    _, told, _ = inspect("--state", state, "--json", settings=("trl.objective=dapo",))
    assert json.loads(told) == []
