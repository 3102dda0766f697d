"""Count the tokens of pairs.

Trainers truncate or drop pairs that are longer than their `max_length`, mostly without a message.
So every pair has its length, and the dataset has pairs that fit (`cuts.py`).
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from replay_pipeline.errors import ConfigError, MissingDependencyError
from replay_pipeline.publish import layout
from replay_pipeline.types import Message

_PIECES: tuple[tuple[re.Pattern[str], float, float], ...] = (
    (re.compile(r"[A-Za-z]+"), 1.0, 0.0),
    (re.compile(r"(?<![A-Za-z])[A-Za-z]{6}([A-Za-z]+)"), 0.0, 0.19),
    (re.compile(r"[0-9]"), 1.03, 0.0),
    (re.compile(r"[^\S\n]{2,}"), 1.33, 0.0),
    (re.compile(r"\n+"), 1.07, 0.0),
    (re.compile(r"[^\x00-\x7f]+"), 0.0, 1.9),
    (re.compile(r"[^\w\s]+"), 1.31, 0.12),
)
"""Pieces of text, and the tokens that one of them and each of its characters take: the larger of two
figures, fitted to 6,000 messages of real sessions with the tokenizers of SmolLM2 (49,152 tokens) and of
DeepSeek (128,000), each within 12 % of nearly every message; what is not ASCII is counted by Japanese,
of which there was too little. Of 800 prompts none took more tokens than this says, with either of the
two; SmolLM2's took 6 to 18 % fewer."""
_TOOL_FORM_TOKENS = 160
"""What templates write around a list of tools to say how they are called."""
_GENERATION_TOKENS = 8
FILLED = 0.96
"""Fraction of a length to fill, by our own count. Chat templates differ, and two versions of one
tokenizer differed by 2 % on the same text. A trainer drops a row that is one token too long, or
cuts its end."""


class TokenSizes:
    """The token counter for messages in ChatML, with tools and calls in the form of Hermes and Qwen.

    Args:
        tokenizer: a `tokenizer.json`, or the folder of a model with one. Without it, tokens are
            estimated from words and punctuation, on the high side.

    Raises:
        ConfigError: the tokenizer doesn't exist.
        MissingDependencyError: the package that reads the tokenizer isn't installed.
    """

    def __init__(self, tokenizer: Path | None = None) -> None:
        self.name = "estimated by words and signs"
        self._count: Callable[[str], int] = _estimated
        if tokenizer is not None:
            file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
            self._count = _counting(file)
            self.name = f"by the tokenizer of {file.parent.name or file.name}"
        self._known: dict[int, int] = {}

    def of(self, message: Message) -> int:
        """Count the tokens of one message in its published form."""
        return self._of_text(_chatml(message))

    def of_tools(self, tools: str | None) -> int:
        """Count the tokens of a list of tools in JSON text."""
        return self._of_text(tools) + _TOOL_FORM_TOKENS if tools else 0

    def fixed(self, row: Mapping[str, Any]) -> int:
        """Count the tokens that no cut of the prompt removes: the tools, and the longer side."""
        sides = (sum(map(self.of, row[side])) for side in ("chosen", "rejected"))
        return self.of_tools(row["tools"]) + max(sides) + _GENERATION_TOKENS

    def whole(self, row: Mapping[str, Any]) -> int:
        """Count all tokens of a row: the prompt, the tools, and the longer side."""
        return self.fixed(row) + sum(map(self.of, row["prompt"]))

    def counted(self, pairs: pa.Table) -> pa.Table:
        """Fill the column `n_tokens` of rows of the config `pairs`."""
        rows = pairs.select(["prompt", "chosen", "rejected", "tools"]).to_pylist()
        column = layout.PAIRS.get_field_index("n_tokens")
        sizes = pa.array(map(self.whole, rows), pa.int32())
        return pairs.set_column(column, layout.PAIRS.field(column), sizes)

    def _of_text(self, text: str) -> int:
        # States of one session share most of their messages, and counting is slow.
        sha = xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))
        if sha not in self._known:
            self._known[sha] = self._count(text)
        return self._known[sha]


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
    n_tokens = 0.0
    for pattern, by_piece, by_character in _PIECES:
        pieces = pattern.findall(text)
        n_tokens += by_piece * len(pieces)
        if by_character:
            n_tokens += by_character * sum(map(len, pieces))
    return math.ceil(n_tokens)


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
