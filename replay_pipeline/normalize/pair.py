"""One pair as operators see it: its sides as actions, and the texts of them that can be judged.

A judgment of an action's JSON would count a tool call's quotes and braces against it. So operators
choose a view of a side:

- `text`: the column as it is;
- `action`: the final text, or tool names and argument values, without keys, quotes and escapes;
- `prose`: only the final text;
- `canonical`: the action in its canonical form, without call ids, for equality.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, get_args

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.storage.pair_rows import json_value

View = Literal["text", "action", "prose", "canonical"]
SIDES = ("chosen", "rejected")
PROMPT = "state_messages_json"
READ_COLUMNS = (
    *SIDES,
    "chosen_action_json",
    "rejected_action_json",
    PROMPT,
    "tools_json",
    "state_id",
    "cwd",
    "hint",
    "conversation",
    "kind",
)
"""Columns that operators look at. A `kind` has only a lesson, both of whose sides are its action."""


class Pair:
    """A row of `dpo_pairs` with its prompt. Each side is parsed once."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def get(self, column: str) -> Any:
        """Return the value of a column, or None."""
        return self._row.get(column)

    @cached_property
    def actions(self) -> dict[str, Action]:
        """Return both sides as actions, read from their messages, or else from their texts."""
        return {side: self._action(side) for side in SIDES}

    @cached_property
    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages of the prompt."""
        return json_value(self.get(PROMPT) or "[]")

    def view(self, side: str, view: View) -> str:
        """Return the text of one side under a view."""
        if view == "text":
            return self.get(side) or ""
        action = self.actions[side]
        if view == "prose":
            return action.text
        return action.render() if view == "canonical" else text_of(action)

    def _action(self, side: str) -> Action:
        message = self.get(f"{side}_action_json")
        text = self.get(side) or ""
        return canonical_action(json_value(message) if message else text, cwd=self.get("cwd"))


def text_of(action: Action) -> str:
    """Return what an action says or does, without the JSON around it."""
    parts = [action.text] if action.text else []
    for call in action.calls:
        parts += [call.name, *string_leaves(call.shown())]
    return "\n".join(parts)


def string_leaves(value: str) -> list[str]:
    """Return every text in a JSON value. If the text isn't JSON, return only it."""
    if value[:1] not in ("{", "["):
        return [value]
    try:
        return list(_leaves(json_value(value)))
    except (ValueError, RecursionError):
        return [value]


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif value is not None:
        yield str(value)


def check_view(view: str) -> View:
    """Return the view with a name.

    Raises:
        ValueError: there is no such view.
    """
    for known in get_args(View):
        if view == known:
            return known
    raise ValueError(f"view {view!r} is not one of {', '.join(get_args(View))}")
