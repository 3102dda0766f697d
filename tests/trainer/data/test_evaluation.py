import pytest
import torch

from trainer.data.collator import ComposerDataCollator
from trainer.data.evaluation import (
    EvaluationOptions,
    consensus_rate,
    evaluate,
    format_only,
    preference_score,
)
from trainer.data.rendering import Renderer
from trainer.losses.compose import compose_loss


def call(name, arguments):
    return {"function": {"name": name, "arguments": arguments}}


def pair(chosen, rejected):
    sides = {"chosen": [chosen], "rejected": [rejected]}
    return {"prompt": [{"role": "user", "content": "Fix cart.py."}], **sides}


READ = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("Read", '{"file_path": "cart.py"}')],
}
SAID = {"role": "assistant", "content": "The test is flaky."}


@pytest.fixture
def collator(tokenizer):
    return ComposerDataCollator(tokenizer, max_prompt_tokens=128, max_response_tokens=48)


def test_the_format_only_control_keeps_form_and_drops_content():
    (masked,) = format_only([pair(READ, SAID)])
    assert masked["rejected"][0]["content"] == "xxx xxxx xx xxxxx."
    text = masked["chosen"][0]["content"]
    assert text.startswith('<tool_call>\n{"name": "xxxx"')
    assert "cart" not in text
    assert masked["prompt"] == pair(READ, SAID)["prompt"]


def test_a_pair_that_differs_in_content_alone_is_not_in_the_control():
    other = {**READ, "tool_calls": [call("Edit", '{"file_path": "auth.py"}')]}
    assert format_only([pair(READ, other)]) == []


def test_accuracy_and_margin_follow_the_model(model, collator):
    rows = [pair(READ, SAID), pair(READ, {"role": "assistant", "content": "Nothing is wrong."})]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = collator(rows)
    for _ in range(15):
        parts = compose_loss(model, batch, beta_replay=1.0, dpo_variant="simpo")
        optimizer.zero_grad()
        parts.trace_replay_dpo.backward()
        optimizer.step()
    score = preference_score(model, collator, rows, batch_size=1)
    swapped = preference_score(model, collator, [pair(r["rejected"][0], READ) for r in rows])
    assert (score.n_pairs, score.accuracy, swapped.accuracy) == (2, 1.0, 0.0)
    assert score.margin == pytest.approx(-swapped.margin, abs=1e-4)


@pytest.mark.slow
def test_a_model_that_reads_gains_by_the_prompt_and_one_that_does_not_gains_nothing(
    model, collator
):
    """Twins: the same two actions behind two prompts, the preference turned round."""
    twins = [asked("Read it.", READ, SAID), asked("Say it.", SAID, READ)]
    options = EvaluationOptions(max_pairs=2, max_prompts=0)
    unread = evaluate(model, collator, [twins[0], {**twins[1], "prompt": twins[0]["prompt"]}], [],
                      options=options)  # fmt: skip
    assert unread["preference"]["accuracy"] == unread["blank_prompt"]["accuracy"] == 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = collator(twins)
    for _ in range(80):
        parts = compose_loss(model, batch, beta_replay=1.0, dpo_variant="simpo")
        optimizer.zero_grad()
        parts.trace_replay_dpo.backward()
        optimizer.step()
    read = evaluate(model, collator, twins, [], options=options)
    assert read["preference"]["accuracy"] == 1.0
    assert read["shuffled_prompt"]["accuracy"] == 0.0
    assert read["blank_prompt"]["accuracy"] == 0.5
    assert read["prompt_gain"] == 0.5


def asked(question, chosen, rejected):
    return {**pair(chosen, rejected), "prompt": [{"role": "user", "content": question}]}


def test_a_tie_counts_half_and_nothing_is_nan(model, collator):
    assert preference_score(model, collator, [pair(SAID, SAID)]).accuracy == 0.5
    empty = preference_score(model, collator, [])
    assert empty.n_pairs == 0
    assert empty.accuracy != empty.accuracy


def test_greedy_actions_are_compared_with_the_consensus(model, tokenizer):
    """A model that has memorised one action agrees exactly there, and nowhere else."""
    renderer = Renderer(tokenizer=tokenizer, max_prompt_tokens=128, max_response_tokens=48)
    rows = [
        {"prompt": [{"role": "user", "content": "Fix cart.py."}], "consensus": READ},
        {"prompt": [{"role": "user", "content": "Fix cart.py."}], "consensus": SAID},
    ]
    ids = torch.tensor([renderer.prompt_ids(rows[0]["prompt"]) + renderer.response_ids(READ)])
    labels = ids.clone()
    labels[:, : -len(renderer.response_ids(READ))] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rates = consensus_rate(model, renderer, rows, max_new_tokens=48)
    assert rates == {
        "exact": 0.5,
        "any": 0.5,
        "n": 2,
        "valid": 1.0,
        "n_calls": 1,
        "agreed": [True, False],
        "valid_at": [True],
    }


def test_evaluation_has_all_its_parts_and_respects_its_limits(model, collator):
    rows = [pair(READ, SAID)] * 3
    prompts = [{"prompt": rows[0]["prompt"], "consensus": READ}] * 3
    options = EvaluationOptions(max_pairs=2, max_prompts=1, max_new_tokens=4)
    result = evaluate(model, collator, rows, prompts, options=options)
    assert result["preference"]["n_pairs"] == 2
    for control in ("blank_prompt", "shuffled_prompt", "format_only"):
        assert result[control]["n_pairs"] == 2
    assert result["consensus"]["n"] == 1
    assert result["general_loss"] > 0
