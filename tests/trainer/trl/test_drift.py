"""The leash to the untouched model: its value, its gradient, its cost, and what it keeps."""

import contextlib

import pytest
import torch
from torch.nn import functional

from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.trl.drift import Drift

ROW = {"prompt": [{"role": "user", "content": "Fix the cart, then read the tests again."}]}


@pytest.fixture
def model():
    return make_model(train_tokenizer(corpus([ROW]), vocab_size=300))


def leash(model, *, acted=((5, 6, 7, 8), (9, 10, 11)), general=((3, 4, 5),), n_tokens=16):
    return Drift(model, acted, general, n_tokens=n_tokens, seed=0)


def moved(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))


def test_an_untouched_model_is_charged_nothing(model):
    assert float(leash(model).term(model, 0, contextlib.nullcontext).detach()) == pytest.approx(
        0, abs=1e-6
    )


def test_the_charge_is_the_divergence_of_torch_per_token(model):
    drift = leash(model, general=())
    untouched = make_model(train_tokenizer(corpus([ROW]), vocab_size=300))
    untouched.load_state_dict(model.state_dict())
    moved(model)
    total, n = torch.zeros(()), 0
    for text in drift.draw(3):
        ids = torch.tensor([text])
        found, wanted = (one(input_ids=ids).logits.log_softmax(-1) for one in (model, untouched))
        total += functional.kl_div(found, wanted, log_target=True, reduction="sum")
        n += len(text)
    term = drift.term(model, 3, contextlib.nullcontext)
    assert float(term.detach()) == pytest.approx(float((total / n).detach()), rel=1e-5)
    term.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_step_of_the_leash_brings_the_model_back(model):
    drift = leash(model)
    moved(model)
    first = drift.term(model, 0, contextlib.nullcontext)
    first.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(0.01 * weight.grad)
    assert drift.term(model, 0, contextlib.nullcontext) < first


def test_a_draw_is_a_function_of_its_number_and_keeps_to_its_tokens(model):
    drift = leash(model, n_tokens=10)
    draws = [drift.draw(number) for number in range(40)]
    assert draws == [drift.draw(number) for number in range(40)]
    assert {sum(map(len, draw)) for draw in draws} <= {9, 10}
    assert any(text[-3:] == [3, 4, 5] for draw in draws for text in draw)


def test_general_text_alone_is_enough(model):
    assert leash(model, acted=()).draw(0)
    assert leash(model, acted=(), general=()).draw(0) == []
