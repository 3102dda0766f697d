"""Windowing: what of a long prefix a teacher is shown.

Every policy keeps the first request and the last compaction summary, and never cuts between a
call and its result. What is shown of a prefix stays, byte for byte, the beginning of what is
shown of the next one for as long as possible, so that a provider's prompt cache hits.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast

from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters.base import CLEARED_RESULT
from replay_pipeline.types import Message

WindowKind = Literal["full", "clear_tool_results", "token_budget"]

OMITTED = "[Earlier messages were left out]"
CHARS_PER_TOKEN = 3.5
"""Used to hold a budget in tokens without a tokenizer."""

_POLICY = re.compile(r"(full|clear_tool_results|token_budget)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """One windowing policy; `limit` counts tool results or tokens."""

    kind: WindowKind = "full"
    limit: int = 0

    def apply(self, turns: list["WindowTurn"]) -> list[Message]:
        """The messages shown of `turns`, a path from the root down."""
        if self.kind == "clear_tool_results":
            return _clear_results(turns, self.limit)
        if self.kind == "token_budget":
            turns = _within_budget(turns, self.limit)
        return [message for turn in turns for message in turn.messages]


@dataclass(frozen=True, slots=True)
class WindowTurn:
    """The messages of one turn, and what a policy must know of it."""

    kind: str
    messages: list[Message]
    n_chars: int


def parse_window(text: str) -> WindowPolicy:
    """The policy that a setting names: `full`, `clear_tool_results:N` or `token_budget:N`.

    Raises:
        ConfigError: there is no such policy, or its number is missing or zero.
    """
    match = _POLICY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"window {text!r} is unknown: use full, clear_tool_results:N or token_budget:N"
        )
    kind = cast("WindowKind", match.group(1))
    limit = int(match.group(2) or 0)
    if (kind == "full") != (match.group(2) is None) or (kind != "full" and limit < 1):
        raise ConfigError(f"window {text!r}: give `full` no number, the others one above 0")
    return WindowPolicy(kind, limit)


def _clear_results(turns: list[WindowTurn], n_keep: int) -> list[Message]:
    """Blank old results in blocks of `n_keep`, so that between two blocks nothing changes.

    At least the last `n_keep` results stay, and fewer than twice as many.
    """
    messages = [message for turn in turns for message in turn.messages]
    n_results = sum(message["role"] == "tool" for message in messages)
    n_clear = max(0, (n_results - n_keep) // n_keep * n_keep)
    for position, message in enumerate(messages):
        if n_clear == 0:
            break
        if message["role"] == "tool":
            n_clear -= 1
            messages[position] = {**message, "content": CLEARED_RESULT}
    return messages


def _within_budget(turns: list[WindowTurn], n_tokens: int) -> list[WindowTurn]:
    """Leave out whole turns after the anchor until the rest fits.

    The cut moves in steps of half the budget, measured from the root: the same cut serves all
    prefixes until the next step.
    """
    budget = n_tokens * CHARS_PER_TOKEN
    anchors = _anchors(turns)
    n_fixed = sum(turns[i].n_chars for i in anchors)
    free = [i for i in range(len(turns)) if i not in anchors]
    n_free = sum(turns[i].n_chars for i in free)
    excess = n_free - max(0.0, budget - n_fixed)
    if excess <= 0:
        return turns
    step = max(1.0, budget / 2)
    n_cut = -(-excess // step) * step
    kept = set(anchors)
    position = 0.0
    last = free[-1] if free else -1
    for i in free:
        position += turns[i].n_chars
        if position > n_cut or i == last:
            kept.add(i)
    shown: list[WindowTurn] = []
    was_cut = False
    for i, turn in enumerate(turns):
        if i in kept:
            shown.append(turn)
        elif not was_cut:
            was_cut = True
            shown.append(WindowTurn("meta", [{"role": "user", "content": OMITTED}], len(OMITTED)))
    return shown


def _anchors(turns: list[WindowTurn]) -> set[int]:
    """The first request and the last summary."""
    anchors: set[int] = set()
    for i, turn in enumerate(turns):
        if turn.kind in {"user", "summary", "queued"}:
            anchors.add(i)
            break
    for i in range(len(turns) - 1, -1, -1):
        if turns[i].kind == "summary":
            anchors.add(i)
            break
    return anchors
