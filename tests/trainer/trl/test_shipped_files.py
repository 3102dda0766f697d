"""The settings files that come with the trainer: each makes two steps."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.published import rows_of, write_dataset
from trainer.__main__ import main
from trainer.data.tiny import corpus, train_tokenizer
from trainer.errors import TrainerConfigError
from trainer.trl import ComposerConfig

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[3]
TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
FILES = {
    "trainer/tiny.yaml": None,
    "trainer/demo.yaml": "smollm2",
    "trainer/pretrained.yaml": "smollm2",
    "trainer/gpu.yaml": "qwen3",
    "recipes/trl/three_channels.yaml": None,
}
"""By file the family of models that it is for; none is the tiny one that the trainer makes."""
FAMILIES = {
    "smollm2": (LlamaConfig, LlamaForCausalLM, None, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "qwen3", {"head_dim": 16}),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save(folder: Path, family: str) -> Path:
    """Save a small model of a family, of random weights, with the template of its maker."""
    config, model, template, more = FAMILIES[family]
    tokenizer = train_tokenizer(corpus(rows_of(3)), vocab_size=400)
    tokenizer.response_template = None
    tokenizer.chat_template = CHATML
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    torch.manual_seed(0)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model(
        config(vocab_size=len(tokenizer), bos_token_id=None, **ends, **SIZES, **more)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_every_file_makes_two_steps_with_the_family_that_it_is_for(name, tmp_path):
    dataset = write_dataset(tmp_path / "dataset")
    given = {"dataset": dataset, "output": tmp_path / "out", "trl.max_steps": 2}
    given["preflight.max_cut_prompts"] = 1.0
    given |= {
        "evaluation.max_pairs": 2,
        "evaluation.max_prompts": 1,
        "evaluation.max_new_tokens": 4,
    }
    if FILES[name] is None:
        given["tiny.pretraining_steps"] = 2
    else:
        given["model"] = save(tmp_path / "model", FILES[name])
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    assert main(["--config", str(REPO / name), *words]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] == 2
    assert report["channels_live"]
    as_text = report["preflight"]["rendered_as_text"]
    assert ("tool calls" in as_text) is (FILES[name] == "smollm2")


def test_a_guard_that_sharded_models_cannot_have_is_refused_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(os.environ, "ACCELERATE_USE_FSDP", "true")
    with pytest.raises(TrainerConfigError, match="drift_weight does not support sharded models"):
        ComposerConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, drift_weight=0.5)
