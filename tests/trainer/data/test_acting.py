"""What a report says of a model that acts better, worse, or as before."""

import random

import pytest
from torch import nn

from trainer.data.acting import general_loss, verdict, wilson_interval
from trainer.data.tiny import corpus, make_model, train_tokenizer


def scores(*, agreed, valid_at, general=3.0, accuracy=0.5, margins=()):
    rate = sum(agreed) / len(agreed)
    return {
        "consensus": {"agreed": agreed, "valid_at": valid_at, "same": rate},
        "general_loss": general,
        "preference": {"accuracy": accuracy, "margins": list(margins)},
    }


def test_a_model_that_lost_states_acts_worse_however_many_pairs_it_ranks_right():
    before = scores(agreed=[True] * 8 + [False] * 2, valid_at=[True] * 10)
    after = scores(agreed=[True] * 2 + [False] * 8, valid_at=[True] * 10, accuracy=0.9)
    found = verdict(before, after)
    assert found["acts_worse"]
    assert "2 of 10" in found["findings"][0]
    assert "8" in found["findings"][0]


def test_lost_calls_are_found_where_the_rate_of_the_consensus_hides_them():
    before = scores(agreed=[True] * 3 + [False] * 7, valid_at=[True] * 10)
    after = scores(agreed=[True] * 3 + [False] * 7, valid_at=[True] * 3 + [False] * 7)
    assert verdict(before, after)["acts_worse"]


def test_as_many_lost_as_gained_is_no_finding():
    before = scores(agreed=[True, False] * 10, valid_at=[True] * 20)
    after = scores(agreed=[False, True] * 10, valid_at=[True] * 20, accuracy=0.6)
    assert verdict(before, after) == {"acts_worse": False, "learned": None, "findings": []}


def test_four_lost_states_may_be_chance_and_five_are_not():
    five = [True] * 5
    before = scores(agreed=five, valid_at=five)
    four_lost = scores(agreed=[False] * 4 + [True], valid_at=five)
    five_lost = scores(agreed=[False] * 5, valid_at=five)
    assert not verdict(before, four_lost)["acts_worse"]
    assert verdict(before, five_lost)["acts_worse"]


def test_a_run_that_changed_nothing_says_so_of_however_few_pairs():
    same = scores(agreed=[True, False], valid_at=[True], margins=[0.1, -0.2])
    found = verdict(same, same)
    assert found["learned"] is False
    assert found["findings"][0].startswith("nothing was learned: ")


def learned_by(changes, **after):
    """The verdict on pairs whose margins moved by `changes`, from about nothing."""
    before = scores(agreed=[False] * 40, valid_at=[True], margins=[0.0] * len(changes))
    return verdict(
        before, scores(**{"agreed": [False] * 40, "valid_at": [True]} | after, margins=changes)
    )


def test_labels_by_a_coin_teach_nothing_though_the_model_begins_to_write_calls():
    """Moves of held-out pairs that nothing decides, at ten seeds of a hundred pairs."""
    for seed in range(10):
        draw = random.Random(seed)
        found = learned_by(
            [draw.gauss(0, 1) for _ in range(100)], agreed=[True] * 20 + [False] * 20
        )
        assert found["learned"] is False
        assert "held-out pairs" in found["findings"][0]


def test_most_pairs_moved_to_their_chosen_side_is_learning():
    assert learned_by([0.1] * 29 + [-0.1] * 10) == {
        "acts_worse": False,
        "learned": True,
        "findings": [],
    }
    assert learned_by([0.1] * 24 + [-0.1] * 15)["learned"] is False


def test_of_six_pairs_nobody_can_tell():
    assert learned_by([0.1] * 6)["learned"] is None
    assert learned_by([0.1] * 7)["learned"] is True


def test_a_loss_of_language_is_told():
    before = scores(agreed=[True], valid_at=[True])
    after = scores(agreed=[True], valid_at=[True], general=3.6, accuracy=0.9)
    assert verdict(before, after)["findings"] == ["its loss on general text rose by 20%"]


def test_the_interval_is_wilsons():
    low, high = wilson_interval(0.5, 10)
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert wilson_interval(1.0, 10)[1] == 1.0
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


def test_general_loss_is_of_plain_text_and_grows_when_the_weights_are_spoiled():
    words = [{"prompt": [{"role": "user", "content": "Read it."}]}]
    tokenizer = train_tokenizer(corpus(words), vocab_size=300)
    model = make_model(tokenizer)
    kept = general_loss(model, tokenizer)
    nn.init.normal_(model.get_output_embeddings().weight, std=5.0)
    assert general_loss(model, tokenizer) > kept > 0
