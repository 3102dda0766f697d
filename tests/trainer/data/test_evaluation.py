import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
)

from tests.trainer.published import assistant, rows_of
from trainer.data.acting import end_tokens, greedy_ids
from trainer.data.collator import ComposerDataCollator
from trainer.data.evaluation import (
    EvaluationOptions,
    consensus_rate,
    evaluate,
    preference_score,
    preference_scores,
    stratified,
)
from trainer.data.rendering import Renderer
from trainer.losses.compose import compose_loss
from trainer.model.loading import without_peft_warnings


def pair(chosen, rejected):
    sides = {"chosen": [chosen], "rejected": [rejected]}
    return {"prompt": [{"role": "user", "content": "Fix cart.py."}], **sides}


READ = assistant("Read", file_path="cart.py")
SAID = {"role": "assistant", "content": "The test is flaky."}


@pytest.fixture
def collator(tokenizer):
    return ComposerDataCollator(tokenizer, max_prompt_tokens=128, max_response_tokens=48)


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
    assert read["blank_prompt"]["accuracy"] == 0.5
    assert read["prompt_gain"] == 0.5


def asked(question, chosen, rejected):
    return {**pair(chosen, rejected), "prompt": [{"role": "user", "content": question}]}


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
    acts = rates.pop("acts")
    assert [(act["asked"], act["consensus"], act["level"]) for act in acts] == [
        ("Fix cart.py.", READ, "exact"),
        ("Fix cart.py.", SAID, None),
    ]
    assert acts[0]["text"] == acts[1]["text"]
    assert "cart.py" in acts[0]["text"]
    assert rates == {
        "exact": 0.5,
        "same": 0.5,
        "n": 2,
        "valid": 1.0,
        "n_calls": 1,
        "agreed": [True, False],
        "valid_at": [True],
    }


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize(
    ("config", "is_padded"),
    [
        (LlamaConfig(**SMALL, num_attention_heads=4, intermediate_size=64), True),
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=512), True),
        (MambaConfig(**SMALL, state_size=8), False),
    ],
    ids=["rotary", "learned positions", "recurrent"],
)
def test_prompts_are_continued_together_as_each_alone(
    tokenizer, config: PretrainedConfig, is_padded: bool, is_adapted: bool
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if is_adapted:
        names = {"llama": "q_proj", "gpt2": "c_attn", "mamba": "in_proj"}
        options = LoraConfig(
            r=2,
            target_modules=[names[config.model_type]],
            init_lora_weights=False,
            fan_in_fan_out=config.model_type == "gpt2",
        )
        with without_peft_warnings():
            model = get_peft_model(model, options)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(9, 500, (n,), generator=draw).tolist() for n in [5, 40, 5, 17, 90] * 4]
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    alone = []
    for ids in prompts:
        ids_1P = torch.tensor([ids])
        ends = end_tokens(model, tokenizer)
        found = model.generate(
            input_ids=ids_1P, attention_mask=torch.ones_like(ids_1P), eos_token_id=ends, **how
        )
        alone.append(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
    assert len(set(alone)) > 5
    seen: list[int] = []
    written = greedy_ids(model, tokenizer, prompts, max_new_tokens=6, on_acted=seen.append)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]
    assert texts == alone
    assert seen == ([16, 4] if is_padded else [8, 4, 4, 4])


def test_evaluation_has_all_its_parts_and_respects_its_limits(model, collator):
    rows = [pair(READ, SAID)] * 3
    prompts = [{"prompt": rows[0]["prompt"], "consensus": READ}] * 3
    options = EvaluationOptions(max_pairs=2, max_prompts=1, max_new_tokens=4)
    result = evaluate(model, collator, rows, prompts, options=options)
    assert result["preference"]["n_pairs"] == 2
    assert result["blank_prompt"]["n_pairs"] == 2
    assert result["consensus"]["n"] == 1
    assert result["general_loss"] > 0


def test_a_sample_has_every_kind_and_session_by_its_share():
    said = {"role": "assistant", "content": "Done."}
    rows = [
        {"session_id": f"s{i // 10}", "chosen": [READ if i % 5 else said], "n": i}
        for i in range(100)
    ]
    drawn = stratified(rows, 20, seed=0, side="chosen")
    assert drawn == stratified(rows, 20, seed=0, side="chosen")
    assert drawn != stratified(rows, 20, seed=1, side="chosen")
    assert [row["n"] for row in drawn] == sorted({row["n"] for row in drawn})
    assert abs(sum(row["chosen"] == [said] for row in drawn) - 4) <= 1
    by_session = [sum(row["session_id"] == f"s{k}" for row in drawn) for k in range(10)]
    assert max(by_session) <= 4
    assert min(by_session) >= 1
    assert stratified(rows, 200, seed=0, side="chosen") == rows
    assert stratified(rows, 0, seed=0, side="chosen") == []


def test_what_is_not_said_takes_a_tenth_of_the_run():
    cost = {"pair_tokens": 500, "prompt_tokens": 144, "run_tokens": 2_000_000}
    options = EvaluationOptions().within(**cost)
    acting = options.max_prompts * (144 + 4 * 64)
    assert 2 * (options.max_pairs * 500 + acting) <= 0.1 * 2_000_000
    assert options.max_pairs == 100
    assert EvaluationOptions(max_pairs=7).within(**cost).max_pairs == 7
    small = EvaluationOptions().within(pair_tokens=1e4, prompt_tokens=1e4, run_tokens=9)
    assert (small.max_pairs, small.max_prompts) == (8, 8)


def test_an_evaluation_in_trees_runs_a_prompt_once_and_says_the_same(model, tokenizer):
    from trainer.model.scoring import choose_pair_forward

    rows = rows_of(3)
    collator = ComposerDataCollator(tokenizer, max_prompt_tokens=512, max_response_tokens=48)
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    asked = {"preference": rows, "turned": turned}
    packed, padded = (
        choose_pair_forward(model, collator.pairs(rows[:2]), setting=how, max_tokens=8192)
        for how in ("packed", "padded")
    )
    n_tokens = []
    hook = model.model.layers[0].register_forward_hook(
        lambda _m, args, _o: n_tokens.append(args[0].shape[:2].numel())
    )
    found = preference_scores(model, collator, asked, forward=packed, batch_size=packed.batch_size)
    n_packed, n_tokens[:] = sum(n_tokens), []
    expected = preference_scores(model, collator, asked, forward=padded, batch_size=1)
    hook.remove()
    assert n_packed < 0.3 * sum(n_tokens)
    for name, score in expected.items():
        assert found[name].accuracy == score.accuracy
        assert found[name].margin == pytest.approx(score.margin, abs=1e-5)
