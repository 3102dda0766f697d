"""What a report says of a model that acts better, worse, or as before."""

from torch import nn

from trainer.data.acting import general_loss, verdict
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


def test_most_pairs_moved_to_their_chosen_side_is_learning():
    assert learned_by([0.1] * 29 + [-0.1] * 10) == {
        "acts_worse": False,
        "learned": True,
        "findings": [],
    }
    assert learned_by([0.1] * 24 + [-0.1] * 15)["learned"] is False


def test_a_loss_of_language_is_told():
    before = scores(agreed=[True], valid_at=[True])
    after = scores(agreed=[True], valid_at=[True], general=3.6, accuracy=0.9)
    assert verdict(before, after)["findings"] == ["its loss on general text rose by 20%"]


def test_general_loss_is_of_plain_text_and_grows_when_the_weights_are_spoiled():
    words = [{"prompt": [{"role": "user", "content": "Read it."}]}]
    tokenizer = train_tokenizer(corpus(words), vocab_size=300)
    model = make_model(tokenizer)
    kept = general_loss(model, tokenizer)
    nn.init.normal_(model.get_output_embeddings().weight, std=5.0)
    assert general_loss(model, tokenizer) > kept > 0
