"""Windowing: the part of a long prefix that a teacher sees.

Every policy keeps the first request (or the compaction summary that replaces it), and never cuts
between a call and its result. As long as possible, the shown part of a prefix stays, byte for byte,
the beginning of the next one, so that the provider's prompt cache hits. If the cut moved with every
step, the cache would never hit.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.types import Message

WindowKind = Literal["full", "clear_tool_results", "token_budget"]

CLEARED_RESULT = "[Old tool result content cleared]"
"""Replaces a result that the agent itself, or a window, removed from the prefix."""
OMITTED = "[Earlier messages were left out]"
_BLOCK = 20
BYTES_PER_TOKEN = 3.5
"""Estimate for keeping a token budget without a tokenizer."""

_POLICY = re.compile(r"full|(clear_tool_results|token_budget):(0*[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """One windowing policy. `limit` counts tool results or tokens."""

    kind: WindowKind = "full"
    limit: int = 0

    def apply(self, messages: list[Message]) -> list[Message]:
        """Return the shown messages of a prefix, without changing `messages`."""
        if self.kind == "clear_tool_results":
            return _clear_results(messages, self.limit)
        if self.kind == "token_budget":
            return _within_budget(messages, self.limit)
        return messages


def parse_window(text: str) -> WindowPolicy:
    """Return the policy of a setting: `full`, `clear_tool_results:N`, or `token_budget:N`.

    Raises:
        ConfigError: there is no such policy, or its number is missing or zero.
    """
    match = _POLICY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"window {text!r} is not one of full, clear_tool_results:N, token_budget:N (N above 0)"
        )
    kind, number = match.groups()
    return WindowPolicy(cast("WindowKind", kind or "full"), int(number or 0))


def merged_users(messages: list[Message]) -> list[Message]:
    """Join consecutive user messages, because some chat templates don't accept them.

    System messages between them are joined too.
    """
    merged: list[Message] = []
    for message in messages:
        role = message["role"]
        if merged and role in ("user", "system") and merged[-1]["role"] == role:
            both = _joined(merged[-1]["content"], message["content"])
            merged[-1] = {"role": role, "content": both}
        else:
            merged.append(message)
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Return two contents as one: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _clear_results(messages: list[Message], n_keep: int) -> list[Message]:
    """Return blank old results in blocks, so that between two blocks nothing changes.

    At least the last `n_keep` results stay. Each block writes what follows it into the prompt cache
    again: blocks of five results cost more than they save, those of twenty save most
    (`benchmarks/cost.py`).
    """
    n_block = max(n_keep, _BLOCK)
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    cleared = set(results[: max(0, len(results) - n_keep) // n_block * n_block])
    return [
        {**message, "content": CLEARED_RESULT} if i in cleared else message
        for i, message in enumerate(messages)
    ]


def _within_budget(messages: list[Message], n_tokens: int) -> list[Message]:
    sizes = [len(msgspec.json.encode(message)) for message in messages]
    return cut_steps(messages, sizes, budget=n_tokens * BYTES_PER_TOKEN)


def cut_steps(messages: list[Message], sizes: list[int], *, budget: float) -> list[Message]:
    """Remove whole steps after the first request until the rest fits.

    A step is a message with the results of its calls. The last step always stays. The cut moves by
    half the budget at a time, measured from the start, so many prefixes share the same cut.

    Args:
        messages: a prefix.
        sizes: size of each message, in the unit of the budget.
        budget: size of the kept messages, without the note that replaces the removed ones.
    """
    excess = sum(sizes) - budget
    if excess <= 0:
        return messages
    stride = max(1.0, budget / 2)
    n_cut = -(-excess // stride) * stride
    first = n_pinned(messages)
    steps = [i for i in range(first, len(messages)) if messages[i]["role"] != "tool"]
    end, n_dropped = first, 0
    for step, following in pairwise(steps):
        if n_dropped >= n_cut:
            break
        n_dropped += sum(sizes[step:following])
        end = following
    if end == first:
        return messages
    omitted: Message = {"role": "user", "content": OMITTED}
    return merged_users([*messages[:first], omitted, *messages[end:]])


def n_pinned(messages: list[Message]) -> int:
    """Count the leading messages that always stay: the system prompt, and the first request or summary."""
    for index, message in enumerate(messages):
        if message["role"] == "user":
            return index + 1
        if message["role"] != "system":
            return index
    return len(messages)
