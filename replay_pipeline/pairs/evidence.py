"""What speaks against a pair although the teachers agree: rules that look at prompt and record.

Agreement alone makes pairs that teach nothing or the wrong thing: a refusal that two teachers
share, an edit of text that nobody had seen, a step that the student takes a moment later.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import msgspec

from replay_pipeline.actions import Action
from replay_pipeline.types import Message

_REFUSAL = re.compile(
    r"(?:i[’']?m |i am )?(?:very |so |deeply )?(?:sorry|afraid)\b"
    r"|(?:but |unfortunately,? )?i (?:can[’']?t|cannot|can not|won[’']?t|will not"
    r"|am (?:not able|unable|not permitted) to|[’']?m (?:not able|unable) to|must decline)\b"
    r"|as an ai\b|unable to (?:help|assist|comply)",
    re.IGNORECASE,
)
_NEED_A_FILE = {
    "Read": "file_path",
    "Edit": "file_path",
    "MultiEdit": "file_path",
    "NotebookEdit": "notebook_path",
}
"""Tools that act on a file that is there already, and the argument that names it."""


def is_refusal(action: Action) -> bool:
    """Tell whether an action is words of refusal instead of work."""
    return not action.calls and _REFUSAL.match(action.text.strip()) is not None


def is_early_stop(chosen: Action, student: Action) -> bool:
    """Tell whether the teachers stop with a text where the student goes on with a tool."""
    return bool(student.calls) and not chosen.calls


class Prompt:
    """What a state had shown, as text to look things up in; it is put together when asked for."""

    def __init__(self, messages: list[Message], student: Action) -> None:
        self._messages = messages
        self._student = student

    @cached_property
    def text(self) -> str:
        """Every text of the messages, arguments of calls unescaped."""
        return "\n".join(leaf for message in self._messages for leaf in _leaves(_opened(message)))

    def obstacle(self, action: Action) -> str | None:
        """Say why an action could not be carried out here; `None` when nothing speaks against it.

        A file that is read or changed must have been named, and the text that an edit replaces
        must have been shown: each of its lines, since results number and indent them. A file that
        the student itself goes for counts as named: logs leave out the student's system prompt.

        Args:
            action: A valid one: what its calls need is there.
        """
        written: list[str] = []
        for call in action.calls:
            if (key := _NEED_A_FILE.get(call.name)) is None:
                continue
            values = call.values()
            name = PurePosixPath(values[key].replace("\\", "/")).name
            if name not in self.text and name not in self._student.render():
                return f"{name} was never named"
            for old, new in _replacements(call.name, values):
                lines = filter(None, map(str.strip, old.splitlines()))
                if any(line not in self.text and line not in written for line in lines):
                    return f"the text that is replaced in {name} was never shown"
                written += map(str.strip, new.splitlines())
        return None


def _replacements(tool: str, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Give the old and the new text of each change; a read has none."""
    if tool == "MultiEdit":
        edits = values["edits"]
    else:
        edits = [values] if tool == "Edit" else []
    for edit in edits:
        yield edit["old_string"], edit["new_string"]


def _opened(message: Message) -> list[Any]:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [message.get("content"), *(_arguments(call.get("arguments")) for call in calls)]


def _arguments(arguments: Any) -> Any:
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
