"""The recipe on a real model, without the model: its repositories, its measures, its short cut."""

import importlib
import json
import sys
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = Path(__file__).parents[3] / "recipes" / "real_model"


@pytest.fixture(scope="module")
def recipe():
    """The two modules of the recipe, which is a folder of scripts and no package."""
    sys.path.insert(0, str(RECIPE))
    try:
        yield importlib.import_module("proof"), importlib.import_module("repositories")
    finally:
        sys.path.remove(str(RECIPE))
        for name in ("proof", "repositories"):
            del sys.modules[name]


def test_the_repositories_are_many_and_the_splits_share_neither_names_nor_unseen_families(recipe):
    found = recipe[1].repositories()
    assert len(found) >= 300
    assert len({one.family.name for one in found}) >= 12
    assert found == recipe[1].repositories()
    by_split = defaultdict(list)
    for one in found:
        by_split[one.split].append(one)
    names = {split: {name for r in of for name in r.names} for split, of in by_split.items()}
    assert not names["train"] & (names["new_repositories"] | names["new_families"])
    families = {split: {r.family.name for r in of} for split, of in by_split.items()}
    assert not families["train"] & families["new_families"]
    assert families["new_repositories"] <= families["train"]
    statuses = {split: {r.family.wanted for r in of} for split, of in by_split.items()}
    assert not statuses["train"] & statuses["new_families"]
    requests = {split: {r.family.request for r in of} for split, of in by_split.items()}
    assert not requests["train"] & requests["new_families"]


def test_twins_have_the_same_words_and_only_the_prompt_decides(recipe):
    for one in recipe[1].repositories():
        first, second = (one.prompt(wanted)[-1]["content"] for wanted in (0, 1))
        assert first != second
        assert Counter(first.split()) == Counter(second.split()) or one.family.line.startswith("{")
        assert one.calls[0] != one.calls[1]


@pytest.mark.slow
def test_the_right_action_succeeds_when_it_is_run_and_the_other_does_not(recipe):
    one_of_each = {one.family.name: one for one in recipe[1].repositories()}
    for one, wanted in product(one_of_each.values(), (0, 1)):
        did = [recipe[1].execute(call, one, wanted) for call in one.calls]
        assert did[wanted] == "success", one.family.name
        assert did[1 - wanted] == "wrong", one.family.name


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Bash", {"command": "rm -rf ."}),
        ("Bash", {"command": "rm ../outside"}),
        ("Bash", {"command": "python -c print(1)"}),
        ("Bash", {"command": "cat notes.txt; rm notes.txt"}),
        ("Read", {"file_path": "/etc/passwd"}),
        ("Read", {"file_path": "../outside"}),
        ("Read", "no JSON"),
        ("Write", {"file_path": "a", "content": "b"}),
    ],
)
def test_an_action_that_reaches_beyond_the_folder_is_refused(recipe, name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    message = {"tool_calls": [{"function": {"name": name, "arguments": text}}]}
    assert recipe[1].execute(message, recipe[1].repositories()[0], 0) == "refused"


@pytest.mark.slow
def test_word_ngrams_do_not_tell_the_better_action(recipe):
    found = recipe[1].repositories()
    trained = [one for one in found if one.split == "train"]
    tested = [one for one in found if one.split != "train"]
    accuracy = recipe[0].ngram_baseline(trained, tested)
    assert set(accuracy) == {split for split, _ in recipe[0].TESTED.values()}
    assert max(accuracy.values()) <= 0.55


@pytest.fixture
def policy(recipe, tokenizer, tmp_path):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    proof, _ = recipe
    return proof.Policy(str(tmp_path), proof.Options(rank=2, first_layer=1, steps=2))


def test_one_tree_gives_the_log_probabilities_of_plain_calls(recipe, policy):
    proof, repositories = recipe
    policy.adapt(0)
    rows = proof.twin_rows(policy, repositories.repositories()[0])
    with torch.no_grad():
        for _ in range(2):  # the second time from what was kept of the lower layers
            found = policy.logps(rows, keep=True)
            for (prompt, responses), values in zip(rows, found, strict=True):
                for response, value in zip(responses, values, strict=True):
                    logits = policy.model(torch.tensor([prompt + response])).logits[0]
                    plain = logits[len(prompt) - 1 : -1].log_softmax(-1)
                    expected = plain.gather(1, torch.tensor(response)[:, None]).mean()
                    assert torch.allclose(value, expected, atol=1e-5)


def test_drift_is_the_divergence_from_the_untouched_model(policy):
    policy.adapt(0)
    window = policy.prompt([{"role": "user", "content": "Go on with something else."}])
    assert policy.drift(window).item() == pytest.approx(0.0, abs=1e-7)
    with torch.no_grad(), policy.model.disable_adapter():
        before = policy.model(torch.tensor([window])).logits[0].log_softmax(-1)
    with torch.no_grad():
        for name, weights in policy.model.named_parameters():
            if "lora_B" in name:
                weights.fill_(0.5)
        after = policy.model(torch.tensor([window])).logits[0].log_softmax(-1)
        expected = (before.exp() * (before - after)).sum(-1).mean()
        assert policy.drift(window).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["pairs", "three_channels", "swapped", "sft", "on_policy"])
def test_every_arm_trains_the_adapters_and_nothing_else(recipe, policy, arm):
    proof, repositories = recipe
    before = [weights.clone() for weights in policy.base.parameters()]
    told = proof.train(policy, arm, 0, repositories.repositories()[:2])
    assert told["steps"] == 2
    adapters = [w for name, w in policy.model.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(weights.abs().max() > 0 for weights in adapters)  # 0 at first
    policy.restore()
    assert all(map(torch.equal, policy.base.parameters(), before))


@pytest.mark.slow
def test_an_arm_that_was_trained_is_taken_up_again_and_not_trained_twice(recipe, policy, tmp_path):
    proof, repositories = recipe
    pool, folder = repositories.repositories()[:2], tmp_path / "pairs-0"
    rows = proof.twin_rows(policy, pool[0])
    told = proof.trained(policy, "pairs", 0, pool, folder)
    with torch.no_grad():
        measured = policy.logps(rows)
        policy.restore()
        assert not torch.equal(policy.logps(rows)[0][0], measured[0][0])
        assert proof.trained(policy, "pairs", 0, [], folder) == told
        assert torch.equal(policy.logps(rows)[0][0], measured[0][0])


def test_runs_of_another_length_stand_beside_the_usual_ones(recipe):
    proof, _ = recipe
    assert proof.name_of("pairs", proof.Options()) == "pairs"
    assert proof.name_of("pairs", proof.Options(steps=200)) == "pairs_200"
    assert proof.name_of("untouched", proof.Options(steps=200)) == "untouched"


def test_p_of_mcnemar_is_that_of_the_coin(recipe):
    assert recipe[0].mcnemar([0.0] * 8, [1.0] * 8) == pytest.approx(2 / 2**8)
    assert recipe[0].mcnemar([0.0, 1.0], [1.0, 0.0]) == 1.0


def test_the_readme_shows_the_table_that_was_measured(recipe):
    measured = json.loads((RECIPE / "table.json").read_text("utf-8"))
    assert recipe[0].as_markdown(measured) in (RECIPE / "README.md").read_text("utf-8")
    page = (RECIPE.parents[1] / "docs" / "how-to" / "train-a-real-model.md").read_text("utf-8")
    for part in ("new repositories", "new families"):
        before, after = (
            100 * measured["arms"][arm][part]["true"][0] for arm in ("untouched", "pairs")
        )
        assert f"from {before:.1f} to {after:.1f} %" in " ".join(page.split())
