"""Small models of random weights of the families that the docs name, with their makers' own templates."""

import re
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.trainer.published import rows_of
from trainer.data.tiny import corpus, train_tokenizer

SHIPPED = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^｜]{1,40}｜>|<[a-z_]+\|>|<\|[a-z_]+>|<(?:start|end)_of_turn>"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that knows no tools."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
}
HEAD = {"head_dim": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{f"linear_num_{one}_heads": 2 for one in ("key", "value")},
    **{f"linear_{one}_head_dim": 16 for one in ("key", "value")},
}
MIXTURE = {"num_experts_per_tok": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        HEAD
        | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4moe": (
        "glm4_moe",
        HEAD | MIXTURE | {"n_routed_experts": 2, "moe_intermediate_size": 32},
    ),
    "gptoss": ("gpt_oss", HEAD | MIXTURE | {"num_local_experts": 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama3": ("llama", {}),
    "nemotron_3": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 2, "mamba_head_dim": 16}
        | {"ssm_state_size": 16, "n_groups": 1},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", HEAD),
    **{f"qwen3_{one}": ("qwen3_5_text", HEAD | LINEAR) for one in (5, 6, 8)},
}
"""What transformers calls a family, and its own sizes, by how the names of its templates begin."""


def causal_lm(kind: str, *, seed: int = 0, **own: Any) -> Any:
    """Return a small model of random weights, by what transformers calls its family."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **SIZES | heads | {"vocab_size": 60} | own)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template, and with the special tokens in it."""
    tiny = train_tokenizer(corpus(rows_of(3)), vocab_size=400)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny.backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token="<|im_end|>" if "<|im_end|>" in template else "</s>",
        pad_token="<|endoftext|>",
        additional_special_tokens=sorted(set(SPECIAL.findall(template))),
    )
    fast.chat_template = template
    return fast


def shipped(name: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with one of the templates that TRL ships."""
    return tokenizer_with((SHIPPED / f"{name}.jinja").read_text("utf-8"))


def save_family(folder: Path, name: str, *, template: str | None = None, **sizes: Any) -> Path:
    """Save a small model with a template's tokenizer, as its maker would."""
    tokenizer = tokenizer_with(template) if template else shipped(name)
    kind, own = MODELS[max((one for one in MODELS if name.startswith(one)), key=len)]
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES | own | sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
