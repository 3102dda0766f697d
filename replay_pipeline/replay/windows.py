"""Shorter prefixes for less money, cut so that the provider's prompt cache still hits.

A cut that moves with every step changes the prefix at every step, and nothing is ever read from
the cache. These cuts are anchored: they move in blocks, and between two moves the prefix of one
step is, byte for byte, the beginning of the next.
"""

from typing import Any

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.types import Message

CLEARED = "[Old tool result cleared]"
"""Takes the place of a tool result that was cut."""

_BYTES_PER_TOKEN = 3.7


def window_messages(messages: list[Message], policy: str) -> list[Message]:
    """The messages that a teacher sees of a prefix, under a policy by name.

    `full` keeps everything. `clear_tool_results:N` blanks old tool results and keeps the last N
    to 2N of them. `token_budget:T` also drops the oldest messages after the first request once
    the prefix is longer than about T tokens, T/2 tokens at a time.

    Raises:
        ConfigError: the policy is unknown or its number is not positive.
    """
    name, _, number = policy.partition(":")
    if name == "full" and not number:
        return messages
    if name not in ("clear_tool_results", "token_budget") or not number.isdigit() or number == "0":
        raise ConfigError(
            f"window {policy!r} is not one of full, clear_tool_results:N, token_budget:T"
        )
    if name == "clear_tool_results":
        return _clear_tool_results(messages, int(number))
    return _within_budget(messages, int(number))


def _clear_tool_results(messages: list[Message], n_kept: int) -> list[Message]:
    results = [i for i, message in enumerate(messages) if message.get("role") == "tool"]
    n_cleared = max(0, len(results) - n_kept) // n_kept * n_kept
    cleared = set(results[:n_cleared])
    return [{**m, "content": CLEARED} if i in cleared else m for i, m in enumerate(messages)]


def _within_budget(messages: list[Message], n_tokens: int) -> list[Message]:
    sizes = [len(msgspec.json.encode(message)) for message in messages]
    budget = round(n_tokens * _BYTES_PER_TOKEN)
    excess = sum(sizes) - budget
    if excess <= 0:
        return messages
    step = max(1, budget // 2)
    to_drop = -(-excess // step) * step
    first = _n_pinned(messages)
    end, dropped = first, 0
    # The last message, and the call that a kept tool result answers, are never cut.
    while end < len(messages) - 1 and dropped < to_drop:
        dropped += sizes[end]
        end += 1
    while end < len(messages) - 1 and messages[end].get("role") == "tool":
        end += 1
    if end < len(messages) and messages[end].get("role") == "tool":
        end = _call_of(messages, end, first)
    return [*messages[:first], *messages[end:]]


def _n_pinned(messages: list[Message]) -> int:
    """Messages at the front that stay: the system prompt, the first request or summary."""
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            return index + 1
    return 0


def _call_of(messages: list[Message], index: int, first: int) -> int:
    """Where the assistant message that asked for the tool result at `index` stands."""
    while index > first and messages[index].get("role") == "tool":
        index -= 1
    return index


def shared_prefix_bytes(before: list[Any], after: list[Any]) -> int:
    """Bytes of the messages that two prefixes have in common at their front."""
    total = 0
    for one, other in zip(before, after, strict=False):
        if one is not other and one != other:
            break
        total += len(msgspec.json.encode(other))
    return total
