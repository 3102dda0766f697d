"""Actions and prefixes in a readable form, and the difference between two sides."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from replay_pipeline.actions.native import NativeForm
from replay_pipeline.judge.feasibility import cwd_of
from replay_pipeline.types import DPOPair, Message

_MAX_DIFF_LINES = 400
_MAX_LINE_CHARS = 400
_MIN_SIMILARITY = 0.4
"""Lines less alike than this are shown as one replaced by the other, without marked words."""
_MAIN_KEYS = ("command", "file_path", "pattern", "notebook_path", "url", "query", "prompt", "path")
_PLACES = {key: n for n, key in enumerate((*_MAIN_KEYS, "old_string", "new_string", "content"))}
"""Where an argument stands when people read it: first what is acted on, then how."""
_OF_CLIENT = re.compile(
    r"<((?:local-)?command-[a-z]+)>.*?</\1>\s*|\[Request interrupted by user[^\]\n]*\]\s*",
    re.DOTALL,
)
"""What Claude Code notes inside a user's message: its own commands, and interruptions."""
_TOKENS = re.compile(r"\w+|\s+|[^\w\s]")

Segment = tuple[str, bool]
"""A piece of text, and whether it differs from the other side."""


class DiffRow(NamedTuple):
    """One line of a side-by-side view; `None` for a side without this line."""

    left: list[Segment] | None
    right: list[Segment] | None


def native_sides(pair: DPOPair) -> tuple[Message | None, Message | None]:
    """Return the rejected and the chosen message in the native form, in which they are trained on."""
    messages = pair.get("state_messages", [])
    form = NativeForm(messages, pair.get("tools"), pair.get("cwd") or cwd_of(messages))
    rejected, chosen = pair.get("rejected_action"), pair.get("chosen_action")
    return rejected and form.rendered(rejected), chosen and form.rendered(chosen)


def over_lines(action: Message | None, text: str = "") -> str:
    """Format an action over several lines: one argument per line, and long texts with their line breaks.

    Without a message, the canonical `text` is returned.
    """
    if action is None:
        return text
    calls = action.get("tool_calls") or []
    if not calls:
        return str(action.get("content") or "")
    return "\n\n".join(_readable_call(call["function"]) for call in calls)


def _readable_call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return f"{function.get('name')}\n  {arguments}"
    lines = [str(function.get("name"))]
    if isinstance(arguments, dict):
        for key in sorted(arguments, key=lambda key: (_PLACES.get(key, len(_PLACES)), key)):
            lines += _readable_value(key, arguments[key])
    return "\n".join(lines)


def _readable_value(key: str, value: Any) -> list[str]:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, indent=2)
    if "\n" not in value:
        return [f"  {key}: {value}"]
    return [f"  {key}:", *(f"    {line}" for line in value.split("\n"))]


def called_tools(action: Message | None) -> list[str]:
    """Return the names of the tools that an action calls, each once; `text` for a text answer."""
    calls = (action or {}).get("tool_calls") or []
    names = [str(call["function"].get("name")) for call in calls]
    return list(dict.fromkeys(names)) or ["text"]


def headline_of(action: Message | None, text: str = "") -> str:
    """Return one line: the tools with their targets, or the beginning of the text."""
    calls = (action or {}).get("tool_calls") or []
    heads = [_head(call["function"]) for call in calls]
    return (
        " + ".join(heads)[:160]
        or " ".join(str((action or {}).get("content") or text).split())[:160]
    )


def _head(function: Mapping[str, Any]) -> str:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    named = [arguments[key] for key in _MAIN_KEYS if isinstance(arguments.get(key), str)]
    return " ".join([str(function.get("name")), *" ".join(named[:1]).split()])


def side_by_side(left: str, right: str) -> list[DiffRow]:
    """Align two texts line by line, and mark changed words."""
    ours, theirs = left.split("\n"), right.split("\n")
    if max(len(ours), len(theirs)) > _MAX_DIFF_LINES:
        # Comparing this much would take long and help nobody.
        return [
            DiffRow(_plain(ours, n), _plain(theirs, n)) for n in range(max(len(ours), len(theirs)))
        ]
    rows: list[DiffRow] = []
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        for n in range(max(i2 - i1, j2 - j1)):
            one = ours[i1 + n] if i1 + n < i2 else None
            other = theirs[j1 + n] if j1 + n < j2 else None
            rows.append(_row(kind, one, other))
    return rows


class Difference(NamedTuple):
    """The first difference between two sides, as one line for each side."""

    alike: str
    """The target of both, if it is the same."""
    rejected: str
    chosen: str


def differ(rejected: tuple[Message | None, str], chosen: tuple[Message | None, str]) -> Difference:
    """Return the first difference between two sides. Long lines are cut around it.

    Each side is an action, and its text in case there is no action.
    """
    heads = [headline_of(*side) for side in (rejected, chosen)]
    is_same = heads[0] == heads[1]
    texts = [over_lines(*side) for side in (rejected, chosen)] if is_same else heads
    rows = side_by_side(*texts)
    at = next((n for n, row in enumerate(rows) if row.left != row.right), None)
    if at is None:
        return Difference(heads[0], "", "")
    told = rows[at : at + _LINES]
    sides = (_from_change([row.left for row in told]), _from_change([row.right for row in told]))
    return Difference(heads[0] if is_same else "", *sides)


_BEFORE_CHARS = 24
"""Of what is alike, so much is told before a difference."""
_LINES = 3
"""From the first that differs, so many are told."""


def _from_change(lines: Sequence[list[Segment] | None]) -> str:
    """Return lines as one, from a little before what differs in the first."""
    line = lines[0]
    if line is None:
        return "no such line"
    n_alike = len(line[0][0]) if len(line) > 1 and not line[0][1] else 0
    text = "".join(part for part, _ in line)
    at = max(0, n_alike - _BEFORE_CHARS)
    begin = ("…" if text[:at].strip() else "") + text[at:].strip()
    after = ("".join(part for part, _ in more).strip() for more in lines[1:] if more)
    return " ⏎ ".join([begin, *after])


def _plain(lines: Sequence[str], number: int) -> list[Segment] | None:
    return [(lines[number], False)] if number < len(lines) else None


def _row(kind: str, one: str | None, other: str | None) -> DiffRow:
    if kind == "equal":
        return DiffRow([(one or "", False)], [(other or "", False)])
    if one is None or other is None or max(len(one), len(other)) > _MAX_LINE_CHARS:
        return DiffRow(
            None if one is None else [(one, False)], None if other is None else [(other, False)]
        )
    ours, theirs = _TOKENS.findall(one), _TOKENS.findall(other)
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    if matcher.ratio() < _MIN_SIMILARITY:
        return DiffRow([(one, False)], [(other, False)])
    left: list[Segment] = []
    right: list[Segment] = []
    for word_kind, i1, i2, j1, j2 in matcher.get_opcodes():
        is_changed = word_kind != "equal"
        if i1 < i2:
            left.append(("".join(ours[i1:i2]), is_changed))
        if j1 < j2:
            right.append(("".join(theirs[j1:j2]), is_changed))
    return DiffRow(left or [("", False)], right or [("", False)])


def last_request(messages: Sequence[Message], *, max_chars: int = 600) -> str:
    """Return the last words of the user before the state."""
    for message in reversed(messages):
        text = _OF_CLIENT.sub("", _message_text(message)).strip()
        if message.get("role") == "user" and text:
            return _shortened(text, max_chars)
    return ""


def _shortened(text: str, n: int) -> str:
    """Return the beginning and the end of a long text, cut between words."""
    if len(text) <= n:
        return text
    begin, end = text[: n // 2 + 1], text[-(n // 2 + 1) :]
    # A word longer than half of it all is cut all the same.
    begin = begin[: begin.rindex(" ")] if " " in begin else begin[:-1]
    end = end[end.index(" ") + 1 :] if " " in end else end[1:]
    return f"{begin.rstrip()} … {end.lstrip()}"


def shown_prefix(
    messages: Sequence[Message], *, max_chars: int, max_message_chars: int = 4_000
) -> list[dict[str, str]]:
    """Return the role and text of the first message and of as many last messages as fit."""
    texts = [_cut(_message_text(message), max_message_chars) for message in messages[:1]]
    left = max_chars - sum(map(len, texts))
    shown: list[dict[str, str]] = []
    for number in range(len(messages) - 1, 0, -1):
        text = _cut(_message_text(messages[number]), max_message_chars)
        left -= len(text)
        if left < 0 and shown:
            shown.append({"role": "gap", "text": f"{number} messages are not shown"})
            break
        shown.append({"role": str(messages[number].get("role")), "text": text})
    if messages:
        shown.append({"role": str(messages[0].get("role")), "text": texts[0]})
    return shown[::-1]


def _cut(text: str, n: int) -> str:
    if len(text) <= n:
        return text
    return f"{text[: n // 2]}\n… {len(text) - n:,} characters are not shown …\n{text[-n // 2 :]}"


def _message_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            str(block.get("text") or f"[{block.get('type')}]")
            for block in content
            if isinstance(block, dict)
        )
    parts = [str(content)] if content else []
    if message.get("tool_calls"):
        parts.append(over_lines({"tool_calls": message["tool_calls"]}))
    return "\n".join(parts)
