"""How long pairs are in tokens, and the configs that are cut to a length.

Trainers truncate or drop what is longer than their `max_length`, most of them without a word. So
every pair says how long it is, and the dataset has pairs that fit.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from replay_pipeline.errors import ConfigError, MissingDependencyError
from replay_pipeline.publish import layout
from replay_pipeline.types import Message
from replay_pipeline.windows import OMITTED, cut_steps, n_pinned

_BYTES_PER_TOKEN = 2.0
"""Without a tokenizer. Real sessions of coding agents took 2.2 to 4.3 bytes a token, so what fits by
this figure fits."""
_TOOL_FORM_TOKENS = 160
"""What templates write around a list of tools to say how they are called."""
_GENERATION_TOKENS = 8
_FILLED = 0.96
"""Of a length, by our own count. Templates differ, and two versions of one tokenizer were seen to
differ by 2 % on the same text; a row that is a token too long is dropped, or its end cut off."""


class TokenSizes:
    """Counts tokens of messages: ChatML, with tools and calls in the form of Hermes and Qwen.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model that has one; without it, tokens are
            estimated by bytes, rather too many.

    Raises:
        ConfigError: there is no tokenizer.
        MissingDependencyError: a tokenizer is named, but the package that reads it is missing.
    """

    def __init__(self, tokenizer: Path | None = None) -> None:
        self.name = f"estimated, {_BYTES_PER_TOKEN:g} bytes a token"
        self._count: Callable[[str], int] = _estimated
        if tokenizer is not None:
            file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
            self._count = _counting(file)
            self.name = f"by the tokenizer of {file.parent.name or file.name}"
        self._known: dict[int, int] = {}

    def of(self, message: Message) -> int:
        """Count the tokens of one message, of the form that is published."""
        return self._of_text(_chatml(message))

    def of_tools(self, tools: str | None) -> int:
        """Count the tokens of a list of tools, as JSON text."""
        return self._of_text(tools) + _TOOL_FORM_TOKENS if tools else 0

    def fixed(self, row: Mapping[str, Any]) -> int:
        """Count what no cut of the prompt takes away: the tools, and the longer side."""
        sides = (sum(map(self.of, row[side])) for side in ("chosen", "rejected"))
        return self.of_tools(row["tools"]) + max(sides) + _GENERATION_TOKENS

    def counted(self, pairs: pa.Table) -> pa.Table:
        """Fill in the column `n_tokens` of rows of the config `pairs`."""
        rows = pairs.select(["prompt", "chosen", "rejected", "tools"]).to_pylist()
        sizes = [self.fixed(row) + sum(map(self.of, row["prompt"])) for row in rows]
        column = layout.PAIRS.get_field_index("n_tokens")
        return pairs.set_column(column, layout.PAIRS.field(column), pa.array(sizes, pa.int32()))

    def _of_text(self, text: str) -> int:
        # States of one session share most of their messages, and counting is slow.
        sha = xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))
        if sha not in self._known:
            self._known[sha] = self._count(text)
        return self._known[sha]


def cut_pairs(pairs: pa.Table, n_tokens: int, sizes: TokenSizes, not_cut: Counter[str]) -> pa.Table:
    """Give the pairs whose prompts fit, or can be cut until they do.

    Whole steps go first, oldest first: the system message, the first request and the last step stay.
    Where these alone are too long, long messages lose their middle. Sides and tools stay as they are.

    Args:
        pairs: rows of the config `pairs`.
        n_tokens: length of prompt, tools and the longer side together.
        sizes: how tokens are counted.
        not_cut: how many pairs could not be cut, by reason; added to.
    """
    rows = []
    for row in pairs.to_pylist():
        fixed = sizes.fixed(row)
        budget = int(n_tokens * _FILLED) - fixed
        prompt = _cut(row["prompt"], budget, sizes) if budget > 0 else None
        if prompt is None:
            not_cut[_reason(row, budget, sizes)] += 1
            continue
        size = fixed + sum(map(sizes.of, prompt))
        rows.append({**row, "prompt": prompt, "n_tokens": size})
    return pa.Table.from_pylist(rows, schema=layout.PAIRS)


def _cut(prompt: Sequence[Message], budget: int, sizes: TokenSizes) -> Sequence[Message] | None:
    """Give as much of a prompt as fits into a budget of tokens; `None` if too little does."""
    for max_chars in (None, budget, budget // 2, budget // 4):
        shown = list(prompt) if max_chars is None else [_shortened(m, max_chars) for m in prompt]
        tokens = [sizes.of(message) for message in shown]
        note = sizes.of({"role": "user", "content": OMITTED})
        kept = shown
        if sum(tokens) > budget:
            kept = cut_steps(shown, tokens, budget=max(budget - note, 0))
        if sum(map(sizes.of, kept)) <= budget:
            return kept
    return None


def _shortened(message: Message, max_chars: int) -> Message:
    content, half = message["content"], max_chars // 2
    if len(content) <= max_chars:
        return message
    n_left_out = len(content) - 2 * half
    text = f"{content[:half]}\n[{n_left_out} characters left out]\n{content[-half:]}"
    return {**message, "content": text}


def _reason(row: Mapping[str, Any], budget: int, sizes: TokenSizes) -> str:
    if budget <= 0:
        return "the tools and a side alone"
    first = row["prompt"][: n_pinned(row["prompt"])]
    if sum(map(sizes.of, first)) > budget:
        return "the first request alone"
    return "the last step alone"


def _chatml(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n'
            "</tool_call>"
        )
    if message["role"] == "tool":
        parts = ["<tool_response>", *parts, "</tool_response>"]
    text = "\n".join(parts)
    return f"<|im_start|>{message['role']}\n{text}<|im_end|>\n"


def _estimated(text: str) -> int:
    return -int(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)


def _counting(file: Path) -> Callable[[str], int]:
    if not file.is_file():
        raise ConfigError(f"{file}: no such tokenizer; name a tokenizer.json, or a folder with one")
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only who names a tokenizer needs it
    except ImportError as error:
        raise MissingDependencyError(
            f"the tokenizer cannot be read ({error}): pip install 'replay-pipeline[publish]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain exceptions
        raise ConfigError(f"{file}: not a tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
