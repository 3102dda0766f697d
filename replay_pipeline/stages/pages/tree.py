"""The turns of a session in the form that the page's script reads, and their words. Long texts are cut."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from replay_pipeline.redaction.printable import printable
from replay_pipeline.stages.pages.costs import Row, tokens_of, turn_usd

MAX_CHARS = 2_500
"""The page has this many characters of a text, and says how many were cut."""
_WORD = re.compile(r"[^\W_]{2,80}|[^\W_a-z0-9]")
"""Words of one letter are kept where a letter may be a word."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z^_=>])")
"""What colors the text of a terminal, moves its cursor, or names its window."""


def turns_shown(turns: Sequence[Row], states: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the turns of a session, with the decision of each turn that has one."""
    decisions = {state["turn_idx"]: state for state in states}
    return [_turn(turn, decisions.get(turn["turn_idx"])) for turn in turns]


def words_of(shown: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the words of a session that the page shows, in lowercase and in compatible letters."""
    words: set[str] = set()
    for turn in shown:
        texts = [turn.get("thinking", ""), turn.get("state", {}).get("hint", "")]
        for part in turn["parts"]:
            texts += [part[1], *(value for _, value in (part[2] if part[2:] else ()))]
        text = "\n".join(texts)
        if not text.isascii():
            text = unicodedata.normalize("NFKC", text)
        words.update(_WORD.findall(text.lower()))
    return words


def _turn(turn: Row, state: Row | None) -> dict[str, Any]:
    messages = msgspec.json.decode(turn["messages_json"])
    if state is not None and not (messages and messages[0].get("role") == "assistant"):
        # Its action is in `states` alone; the turn holds the results of its calls.
        calls = msgspec.json.decode(state["action_tool_calls_json"] or "[]")
        action = {"role": "assistant", "content": state["action_text"], "tool_calls": calls}
        messages.insert(0, action)
    shown: dict[str, Any] = {
        "i": turn["turn_idx"],
        "parent": turn["parent_turn_idx"],
        "kind": turn["kind"],
        "parts": [part for message in messages for part in _parts(message)],
    }
    if turn["timestamp"]:
        shown["at"] = turn["timestamp"].isoformat(timespec="seconds")
    if turn["model"]:
        shown["model"] = printable(turn["model"])
        if state is not None and (usd := turn_usd(turn)):
            shown["usd"] = round(usd, 6)
        tokens = tokens_of([turn])
        shown["context"] = tokens.total() - tokens["output"]
    if turn["thinking"]:
        shown["thinking"] = cut(turn["thinking"])
    if state is not None:
        names = ("state_id", "outcome", "error_kind", "hint", "recovered_by")
        shown["state"] = {name: state[name] for name in names if state[name] is not None}
        if "hint" in shown["state"]:
            shown["state"]["hint"] = cut(shown["state"]["hint"])
    return shown


def _parts(message: Mapping[str, Any]) -> list[list[Any]]:
    """Return the texts of a message, each with who says it; a call has its arguments one by one."""
    parts: list[list[Any]] = []
    if content := message.get("content"):
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        parts.append([str(message.get("role")), cut(text)])
    parts += (call_shown(call.get("function", {})) for call in message.get("tool_calls") or ())
    return parts


def call_shown(function: Mapping[str, Any]) -> list[Any]:
    """Return a call as `["call", tool, [[argument, value], …]]`, with each value cut on its own."""
    name, arguments = printable(str(function.get("name"))), function.get("arguments") or "{}"
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, TypeError, RecursionError):
        values = arguments
    if not isinstance(values, dict):
        values = {"": values}
    return ["call", name, [[printable(key), cut(_text(value))] for key, value in values.items()]]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def cut(text: str) -> str:
    """Return the beginning of a text, and the number of characters left out."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    n_more = len(text) - MAX_CHARS
    if n_more > 0:
        return f"{printable(text[:MAX_CHARS])} … and {n_more:,} characters more"
    return printable(text)
