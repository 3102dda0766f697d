"""The leash to the untouched model: its value, its gradient, its cost, and what it keeps."""

import contextlib

import pytest
import torch
from torch.nn import functional

from tests.trainer.published import rows_of
from trainer.data.acting import general_texts, held_texts
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.engines.trl.drift import Drift

ROW = {"prompt": [{"role": "user", "content": "Fix the cart, then read the tests again."}]}


@pytest.fixture
def model():
    return make_model(train_tokenizer(corpus([ROW]), vocab_size=300))


ACTED = (([5, 6], [7, 8]), ([9], [10, 11]), ([5, 6], [4, 7, 7]))


GENERAL = (([3], [4, 5]),)


def leash(model, *, acted=ACTED, general=GENERAL, n_tokens=16):
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
    for before, held in drift.draw(3):
        ids = torch.tensor([[*before, *held]])
        found, wanted = (
            one(input_ids=ids).logits[:, len(before) - 1 : -1].log_softmax(-1)
            for one in (model, untouched)
        )
        total += functional.kl_div(found, wanted, log_target=True, reduction="sum")
        n += len(held)
    term = drift.term(model, 3, contextlib.nullcontext)
    assert float(term.detach()) == pytest.approx(float((total / n).detach()), rel=1e-5)
    term.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_draw_is_a_function_of_its_number_and_has_whole_texts_alone(model):
    long = ([1], [2] * 20)
    drift = leash(model, acted=(*ACTED, long), n_tokens=10)
    draws = [drift.draw(number) for number in range(60)]
    assert draws == [drift.draw(number) for number in range(60)]
    texts = [text for draw in draws for text in draw]
    assert {(tuple(a), tuple(b)) for a, b in texts} == {
        (tuple(a), tuple(b)) for a, b in (*ACTED, *GENERAL)
    }
    assert all(sum(len(held) for _, held in draw) <= 10 for draw in draws)
    assert min(map(len, draws)) >= 3


def test_held_texts_are_whole_and_no_part_of_what_the_report_measures():
    tokenizer = train_tokenizer(corpus([ROW]), vocab_size=300)
    texts = [tokenizer.decode(ids) for ids in held_texts(tokenizer, 400)]
    assert len(texts) > 40
    assert all(text[0].isupper() or text[0] == "#" for text in texts)
    assert all(text.endswith("\n\n") for text in texts)
    measured = [tokenizer.decode(ids)[:60] for ids in general_texts(tokenizer)]
    assert not any(one in text for one in measured for text in texts)


def test_what_a_run_imitates_is_not_held_where_it_was(composer, tokenizer):
    kept = [{**row, "completion": row["chosen"]} for row in rows_of(1)]
    settings = {"drift_weight": 1.0, "beta_replay": 1.0, "drift_tokens": 96, "max_steps": 1}
    for more, is_held in (({"objective": "sft"}, False), ({"policy_weight": 0.0}, True)):
        trainer = composer(
            kept=kept, model=make_model(tokenizer, hidden_size=32), **settings, **more
        )
        assert bool(trainer.drift._acted) is is_held
        trainer.train()
        assert trainer.drift.draw(0)
        prompts = {tuple(before) for before, _ in trainer.drift._acted}
        renderer = trainer.collator.renderer
        assert not is_held or tuple(renderer.prompt_ids(kept[0]["prompt"])) in prompts
