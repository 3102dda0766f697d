"""Make a tiny model and tokenizer, for runs without a download and without a GPU."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data.rendering import template_message
from trainer.losses.compose import PairForward, pair_logps

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from trainer.data.collator import ComposerDataCollator

MAX_CHARS = 4000
"""The most characters of one text. A tokenizer learns little from the rest of a long file."""

CHAT_TEMPLATE = r"""
{%- if tools -%}
  {{- '<|im_start|>system\nTools:' -}}
  {%- for tool in tools -%}
    {%- set names = (tool.function.parameters.properties or {}) | list | join(', ') -%}
    {{- ' ' + tool.function.name + '(' + names + ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n' if message.content or not loop.first else '' -}}
      {{- '<tool_call>\n{"name": ' + (call.function.name | tojson) -}}
      {{- ', "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
"""Chat template with tools (names and parameter names), tool calls in Hermes's form, and tool
results. It preserves prefixes: later messages never change the rendering of earlier ones."""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""The reverse template, by which transformers parses tool calls in a generated response."""

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` entries, with the template above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE  # type: ignore[attr-defined]
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 64,
    n_layers: int = 2,
    n_heads: int = 4,
    max_positions: int = 4096,
    is_mimetic: bool = False,
    seed: int = 0,
) -> "Qwen2ForCausalLM":
    """Build a Qwen2 model of random weights in float32 for this tokenizer.

    With `is_mimetic`, value and output projections start as each other's transpose, so that
    attention copies the tokens that it looks at, as in trained models. Then a few steps are enough
    to learn where to look (Trockman and Kolter 2023, arXiv:2305.09828).
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 - slow to load

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=max(n_heads // 2, 1),
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        if is_mimetic:
            _make_mimetic(model)
    return model


@torch.no_grad()
def _make_mimetic(model: "Qwen2ForCausalLM") -> None:
    # Embeddings are also the output layer: at unit length, a token handed on is a token proposed.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=model.config.hidden_size**-0.5)
    for layer in model.model.layers:
        attention = layer.self_attn
        values = attention.v_proj.weight
        torch.nn.init.orthogonal_(values)
        of_heads = values.view(-1, attention.head_dim, values.size(1))
        repeated = of_heads.repeat_interleave(attention.num_key_value_groups, dim=0)
        attention.o_proj.weight.copy_(repeated.flatten(0, 1).T)


def pretrain(
    model: "Qwen2ForCausalLM",
    collator: "ComposerDataCollator",
    rows: Sequence[Any],
    *,
    n_steps: int,
    n_rows: int = 8,
    learning_rate: float = 2e-3,
    seed: int = 0,
    forward: PairForward = pair_logps,
) -> None:
    """Teach a randomly initialized model the form of actions, but none of the preference.

    It learns both sides of each pair equally, as next tokens after their prompt. This replaces the
    pretraining that a tiny model never had.
    """
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    rng = random.Random(seed)
    for step in range(n_steps):
        batch = collator(rng.sample(rows, min(n_rows, len(rows))))
        batch = {key: value.to(model.device) for key, value in batch.items()}
        (chosen_B, n_chosen_B), (rejected_B, n_rejected_B) = forward(model, batch)
        loss = -(chosen_B / n_chosen_B + rejected_B / n_rejected_B).mean() / 2
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / 5)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def corpus(rows: Sequence[Any]) -> list[str]:
    """Collect the texts of dataset rows for training a tokenizer: messages, calls, and hints.

    System prompts are left out, because a prompt that all rows share would take up the small
    vocabulary.
    """
    texts = []
    for row in rows:
        for key in ("prompt", "chosen", "rejected"):
            texts.extend(
                piece[:MAX_CHARS]
                for message in row.get(key) or ()
                if message["role"] != "system"
                for piece in _pieces(message)
            )
        texts.append(row.get("hint") or "")
    return texts


def _pieces(message: dict[str, Any]) -> list[str]:
    rendered = template_message(message)
    calls = [
        f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        for call in rendered.get("tool_calls", ())
    ]
    return [rendered["content"], *calls]
