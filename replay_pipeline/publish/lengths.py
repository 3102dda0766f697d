"""Count the tokens of pairs, and cut their prompts to a length.

Trainers truncate or drop pairs that are longer than their `max_length`, mostly without a message.
So every pair has its length, and the dataset has pairs that fit.

If a cut removed the text that an edit replaces, the model would learn to invent it. So the messages
that a side needs stay: those that show the text, later changes of the same file, and the request
behind a consequence. The system message, the first request, the user's last request, and the last
step always stay.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import xxhash

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.windows import OMITTED, merged_users, n_pinned
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.judge.known_files import replacements
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

    The number is estimated from words and punctuation, on the high side.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, message: Message) -> int:
        """Count the tokens of one message in its published form."""
        return self._of_text(_chatml(message))

    def fixed(self, row: Mapping[str, Any]) -> int:
        """Count the tokens that no cut of the prompt removes: the tools, and the longer side."""
        sides = (sum(map(self.of, row[side])) for side in ("chosen", "rejected"))
        tools = self._of_text(row["tools"]) + _TOOL_FORM_TOKENS if row["tools"] else 0
        return tools + max(sides) + _GENERATION_TOKENS

    def whole(self, row: Mapping[str, Any]) -> int:
        """Count all tokens of a row: the prompt, the tools, and the longer side."""
        return self.fixed(row) + sum(map(self.of, row["prompt"]))

    def _of_text(self, text: str) -> int:
        # States of one session share most of their messages, and counting is slow.
        sha = xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))
        if sha not in self._known:
            self._known[sha] = _estimated(text)
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


Row = Mapping[str, Any]

_SHORTENED = (4_000, 1_000, 300)
"""Characters that are left of a long message that no side needs, tried one after the other."""
_AROUND = 12
"""Lines that stay on either side of a line that a side needs."""
_ANCHOR = 8
"""Characters of a line that is no mere bracket."""


def measured(pairs: pa.Table, sizes: TokenSizes) -> pa.Table:
    """Fill the columns `n_tokens` and `needs` of `pairs` rows: the length, and the messages that a cut must keep."""
    rows = pairs.select(["prompt", "chosen", "rejected", "tools", "cwd"]).to_pylist()
    needs = [sorted(_Sides(row).needs(row["prompt"])) for row in rows]
    for name, values in (("n_tokens", map(sizes.whole, rows)), ("needs", needs)):
        column = layout.PAIRS.get_field_index(name)
        field = layout.PAIRS.field(column)
        pairs = pairs.set_column(column, field, pa.array(values, field.type))
    return pairs


def cut_pairs(pairs: pa.Table, n_tokens: int, sizes: TokenSizes, not_cut: Counter[str]) -> pa.Table:
    """Return the pairs whose prompts fit, or can be cut to fit with both sides still possible.

    First the definitions of unused tools go, then whole steps, the oldest first. At last, long
    messages lose their middle, and long results lose the lines that are far from those that a side
    needs.

    A cut prompt stays neutral, because the texts of its client would make it too long.

    Args:
        pairs: rows of the config `pairs`, with their `needs`.
        n_tokens: length of the prompt, the tools, and the longer side together.
        sizes: the token counter.
        not_cut: counts of pairs that could not be cut, by reason. The function adds to it.
    """
    rows = []
    for row in pairs.to_pylist():
        cut = _cut_row(row | {"client_texts": None}, int(n_tokens * FILLED), sizes)
        if isinstance(cut, str):
            not_cut[cut] += 1
        else:
            rows.append(cut)
    return pa.Table.from_pylist(rows, schema=layout.PAIRS)


class _Sides:
    """The two sides of a row, and what they need of a prompt."""

    def __init__(self, row: Row) -> None:
        self._cwd = row.get("cwd")
        self.chosen, self.rejected = (self._action(row[side]) for side in ("chosen", "rejected"))

    def _action(self, side: Sequence[Message]) -> Action:
        return canonical_action(side[0] if side else None, cwd=self._cwd)

    def possible(self, prompt: Sequence[Message]) -> list[Action]:
        """Return the sides that could be carried out at a prompt."""
        state = PromptState(prompt, self.rejected, cwd=self._cwd)
        sides = [side for side in (self.chosen, self.rejected) if side.is_valid]
        return [side for side in sides if state.impossible(side) is None]

    def objection(self, prompt: Sequence[Message]) -> str | None:
        """Return what speaks against the chosen side at a prompt, though it could be carried out."""
        if not self.chosen.is_valid:
            return None
        found = PromptState(prompt, self.rejected, cwd=self._cwd).obstacle(self.chosen)
        return found.kind if found is not None else None

    def anchors(self) -> set[str]:
        """Return what must be left of a result that a side needs: lines that are replaced, names of files."""
        calls = [call for side in (self.chosen, self.rejected) for call in side.calls]
        paths = (call.values().get("file_path") for call in calls)
        names = {path.rpartition("/")[2] for path in paths if isinstance(path, str)}
        old = (edit.old for _, edits in replacements(calls) for edit in edits)
        lines = {line.strip() for text in old for line in text.splitlines()}
        return names | {line for line in lines if len(line) >= _ANCHOR}

    def needs(self, prompt: Sequence[Message]) -> set[int]:
        """Return the places of the messages that the sides need; a side that is not possible needs none."""
        state = PromptState(prompt, self.rejected, cwd=self._cwd)
        return {place for side in self.possible(prompt) for place in state.needed(side)}


def _cut_row(row: dict[str, Any], budget: int, sizes: TokenSizes) -> dict[str, Any] | str:
    """Return a row that fits into a budget of tokens, or the reason why there is none."""
    if sizes.whole(row) <= budget:
        return row | {"n_tokens": sizes.whole(row)}
    used = row | {"tools": _used_tools(row, row["prompt"])}
    left = budget - sizes.fixed(used)
    if left <= 0:
        return "the tools and a side alone"
    sides = _Sides(row)
    prompt = _cut(row["prompt"], set(row["needs"] or ()), sides.anchors(), left, sizes)
    if isinstance(prompt, str):
        return prompt
    if sides.possible(row["prompt"]) != sides.possible(prompt):
        return "a side is not possible in what is left"
    if (now := sides.objection(prompt)) and now != sides.objection(row["prompt"]):
        return "what is left speaks against the chosen side"
    found = row | {"prompt": prompt, "tools": _used_tools(row, prompt)}
    return found | {"n_tokens": sizes.whole(found), "needs": sorted(sides.needs(prompt))}


def _used_tools(row: Row, prompt: Sequence[Message]) -> str | None:
    """Return the definitions of the tools that a side or a step of the prompt uses."""
    if not row["tools"]:
        return row["tools"]
    messages: Iterable[Message] = [*prompt, *row["chosen"], *row["rejected"]]
    names = {call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
    tools = [tool for tool in json.loads(row["tools"]) if layout.tool_name(tool) in names]
    return layout.published_tools(json.dumps(tools))


def _cut(
    prompt: Sequence[Message], needs: set[int], anchors: set[str], budget: int, sizes: TokenSizes
) -> list[Message] | str:
    """Return as much of a prompt as fits into a budget, or why not even what must stay does."""
    users = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    fixed = needs | set(users[-1:])
    for max_chars in (None, *_SHORTENED):
        shown = list(prompt)
        for place, message in enumerate(prompt):
            if max_chars is not None and place not in fixed:
                shown[place] = _shortened(message, max_chars)
            elif max_chars is not None and message["role"] == "tool":
                shown[place] = _around(message, anchors)
        kept = _kept(shown, fixed, budget, sizes)
        if kept is not None:
            return kept
    first = range(n_pinned(list(prompt)))
    if sum(sizes.of(prompt[place]) for place in first) > budget:
        return "the first request alone"
    if sum(sizes.of(prompt[place]) for place in fixed | set(first)) > budget:
        return "what the sides need alone"
    return "the last step alone"


def _kept(
    prompt: list[Message], fixed: set[int], budget: int, sizes: TokenSizes
) -> list[Message] | None:
    """Return the steps that must stay, and of the others the newest that fit, with notes in the gaps."""
    first = n_pinned(prompt)
    starts = [i for i in range(first, len(prompt)) if prompt[i]["role"] != "tool"]
    steps = [range(*ends) for ends in pairwise([*starts, len(prompt)])]
    note: Message = {"role": "user", "content": OMITTED}
    tokens = [sum(sizes.of(prompt[place]) for place in step) for step in steps]
    stays = [n == len(steps) - 1 or not fixed.isdisjoint(step) for n, step in enumerate(steps)]
    # A note for every gap that there can be; leaving them out of account would be a token too few.
    left = budget - sum(sizes.of(message) for message in prompt[:first])
    left -= sum(n for n, must in zip(tokens, stays, strict=True) if must)
    left -= sizes.of(note) * (1 + sum(stays))
    if left < 0:
        return None
    for n in range(len(steps) - 1, -1, -1):
        if not stays[n]:
            if tokens[n] > left:
                break
            stays[n], left = True, left - tokens[n]
    kept, is_gap = prompt[:first], False
    for step, must in zip(steps, stays, strict=True):
        if must:
            kept += [note] * is_gap + [prompt[place] for place in step]
        is_gap = not must
    return [layout.message_of(message) for message in merged_users(kept)]


def _around(message: Message, anchors: set[str]) -> Message:
    """Leave of a message the lines around those that hold an anchor."""
    lines = message["content"].split("\n")
    held = [n for n, line in enumerate(lines) if any(anchor in line for anchor in anchors)]
    stays = {n for at in held for n in range(at - _AROUND, at + _AROUND + 1)}
    kept: list[str] = []
    n_left_out = 0
    for n, line in enumerate([*lines, ""]):
        is_end = n == len(lines)
        if n_left_out and (is_end or n in stays):
            kept.append(f"[{n_left_out} lines left out]")
            n_left_out = 0
        if not is_end and n in stays:
            kept.append(line)
        elif not is_end:
            n_left_out += 1
    return {**message, "content": "\n".join(kept)} if held else message


def _shortened(message: Message, max_chars: int) -> Message:
    content, half = message["content"], max_chars // 2
    if len(content) <= max_chars:
        return message
    n_left_out = len(content) - 2 * half
    text = f"{content[:half]}\n[{n_left_out} characters left out]\n{content[-half:]}"
    return {**message, "content": text}
