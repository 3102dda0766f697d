"""Cut the prompts of pairs to a length, so that both sides stay possible.

If a cut removed the text that an edit replaces, the model would learn to invent it. So the messages
that a side needs stay: those that show the text, later changes of the same file, and the request
behind a consequence. The system message, the first request, the user's last request, and the last
step always stay.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.windows import OMITTED, merged_users, n_pinned
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.judge.known_files import replacements
from replay_pipeline.publish import layout
from replay_pipeline.publish.lengths import FILLED, TokenSizes
from replay_pipeline.types import Message

Row = Mapping[str, Any]

_SHORTENED = (4_000, 1_000, 300)
"""Characters that are left of a long message that no side needs, tried one after the other."""
_AROUND = 12
"""Lines that stay on either side of a line that a side needs."""
_ANCHOR = 8
"""Characters of a line that is no mere bracket."""


def with_needs(pairs: pa.Table) -> pa.Table:
    """Fill the column `needs` of `pairs` rows with the messages that a cut must keep."""
    rows = pairs.select(["prompt", "chosen", "rejected", "cwd"]).to_pylist()
    needs = [sorted(_Sides(row).needs(row["prompt"])) for row in rows]
    column = layout.PAIRS.get_field_index("needs")
    field = layout.PAIRS.field(column)
    return pairs.set_column(column, field, pa.array(needs, field.type))


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
