"""TRL's trainers take the configs as they are: a tiny model, one step each."""

import json
import re

import pytest

from replay_pipeline.publish import publish
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table
from tests.support.messages import call

TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{{ call.function.arguments | tojson }}</call>{% endfor %}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


def of_card(folder, name="for_templates"):
    """A function that the card gives."""
    code = (folder / "README.md").read_text("utf-8").split("```python\n")[2].split("\n```")[0]
    scope = {}
    exec(code.split("\n\nas_text = ")[0], scope)
    return scope[name]


@pytest.fixture
def model(tokenizer, tmp_path):
    """Path of a tiny model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tiny = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    tiny.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    import datasets

    root = tmp_path_factory.mktemp("trl")
    publish(
        [("b1", kept_table(*range(12)))],
        folder=root / "set",
        positives=[("b1", positives_table(*range(40, 46)))],
    )

    def load(config):
        return datasets.load_dataset(
            str(root / "set"), config, split="train", cache_dir=str(root / "cache")
        )

    return load


def options(tmp_path):
    return {
        "output_dir": str(tmp_path),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "activation_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
    }


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of torch, transformers and TRL, not ours
]


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("config", ["positives", "pairs"])
def test_kto_trainer_trains_on_lessons_and_on_each_side_of_pairs(
    config, loss_type, load, model, tokenizer, tmp_path
):
    from trl.trainer.kto_config import KTOConfig
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = KTOTrainer(
        model,
        args=KTOConfig(**options(tmp_path), loss_type=loss_type, max_length=None),
        train_dataset=load(config),
        processing_class=tokenizer,
    )
    assert trainer.train().training_loss > 0


def test_grpo_trainer_trains_on_prompts_and_sees_the_consensus(load, model, tokenizer, tmp_path):
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    seen = []

    def reward(completions, consensus, hint, **_):
        seen.extend(zip(completions, consensus, hint, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    trainer = GRPOTrainer(
        model,
        args=GRPOConfig(**options(tmp_path), num_generations=2, max_completion_length=4),
        reward_funcs=reward,
        train_dataset=load("prompts"),
        processing_class=tokenizer,
    )
    trainer.train()
    assert len(seen) == 2
    assert seen[0][1]["tool_calls"][0]["function"]["name"] == "Read"


def test_with_the_cards_line_no_row_is_dropped_and_no_side_cut_off(model, tmp_path):
    """By the setting of each config; TRL's own default drops every one of these rows."""
    import datasets
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from trainer.data.tiny import train_tokenizer

    def long_row(number):
        messages = [{"role": "user", "content": f"Fix {number}."}]
        for step in range(12):
            text = f"{number} {step} " + "def total(prices): return sum(prices)\n" * 60
            messages.append(call("Read", file_path=f"{step}.py"))
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": text})
        return kept_row(number, state_messages_json=json.dumps(messages))

    rows = [long_row(number) for number in range(8)]
    tokenizer = train_tokenizer([row["state_messages_json"] for row in rows], vocab_size=400)
    folder = tmp_path / "set"
    publish([("b1", kept_table(*rows))], folder=folder, lengths=[3_072], test_fraction=0)
    card = (folder / "README.md").read_text("utf-8")
    lines = dict(re.findall(r"DPOConfig\(max_length=(\d+)\)  # (\w+)", card))
    settings = {config: int(length) for length, config in lines.items()}
    assert set(settings) == {"pairs", "pairs_3k"}
    for config, max_length in settings.items():
        loaded = datasets.load_dataset(
            str(folder), config, split="train", cache_dir=str(tmp_path / "cache")
        )
        kept = {}
        for length in (max_length, 1_024):
            trainer = DPOTrainer(
                model,
                args=DPOConfig(**options(tmp_path), max_length=length),
                train_dataset=loaded.with_transform(of_card(folder)),
                processing_class=tokenizer,
            )
            kept[length] = trainer.train_dataset.with_format(None).to_list()
        assert (len(kept[max_length]), len(kept[1_024])) == (8, 0)
        for row in kept[max_length]:
            sides = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
            assert len(row["prompt_ids"]) + sides <= max_length


WITHOUT_CALLS = """{%- for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
"""As SmolLM2's template: no tools, no calls, no results of their own."""


@pytest.fixture
def calls_alone(tmp_path):
    """A dataset whose sides differ in their calls alone."""
    rejected = json.dumps([call("Grep", pattern="elsewhere")])
    rows = [kept_row(n, rejected_messages_json=rejected) for n in range(12)]
    publish([("b1", kept_table(*rows))], folder=tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize("template", [TEMPLATE, WITHOUT_CALLS])
def test_the_sides_differ_for_every_family_of_templates(
    calls_alone, model, tokenizer, tmp_path, template
):
    import copy

    import datasets
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    cache = str(tmp_path / "cache")
    mine = copy.deepcopy(tokenizer)
    mine.chat_template = template
    as_text = not of_card(calls_alone, "has_place_for_calls")(mine)
    assert as_text == (template == WITHOUT_CALLS)
    for_templates = of_card(calls_alone)
    loaded = datasets.load_dataset(str(calls_alone), "pairs", split="train", cache_dir=cache)
    rows = loaded.with_transform(lambda rows: for_templates(rows, as_text))
    arguments = DPOConfig(**options(tmp_path), max_length=None)
    trainer = DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=mine)
    for row in trainer.train_dataset:
        assert row["chosen_ids"] != row["rejected_ids"]
        assert "Read" in mine.decode(row["chosen_ids"])
        assert "test_" in mine.decode(row["prompt_ids"])
        assert "<tool" in mine.decode(row["prompt_ids"])
    trainer.train()
