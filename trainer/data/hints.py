"""Make the hint about a failed step for the teacher: from a template, the raw error, or a judge.

The hint goes to the end of the teacher's context, and never into the student's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

MAX_HINT_CHARS = 600
"""Longer error texts keep their beginning and end."""


HintFunction = Callable[[Mapping[str, Any]], str | None]
"""A function that returns the hint for a row's state. `None` leaves the row out of channel 2."""


def without_hint(row: Mapping[str, Any]) -> None:
    """Return no hint, for runs without channel 2."""


_TEMPLATES = {
    r"has not been read yet": "A file must be read before it is edited or written. Read it first.",
    r"modified since (it was )?(last )?read|file has changed": (
        "The file changed after it was read. Read it again before the edit."
    ),
    r"string to replace not found|old_string.*not found": (
        "The text to replace does not occur in the file as given. Read the file and copy the "
        "exact text, white space included."
    ),
    r"found \d+ matches|multiple matches|not unique": (
        "The text to replace occurs more than once. Give more of the surrounding lines."
    ),
    r"no such tool|unknown tool|tool .{0,60}not (found|available)": (
        "That tool does not exist here. Available: {tools}."
    ),
    r"no such file|does not exist|file not found|cannot find the (file|path)": (
        "That path does not exist. List or search for the file first."
    ),
    r"json.{0,30}(decode|parse)|InputValidationError|invalid (json|arguments)": (
        "The arguments of the call are not valid for the tool. Check names and types against its "
        "schema."
    ),
    r"command not found": (
        "That program is not installed. Use one that is, or another way to the same end."
    ),
    r"timed? ?out": "The command ran out of time. Run a smaller part, or run it in the background.",
    r"permission denied|not permitted|blocked by": (
        "That action is not permitted here. Find a way that needs no such permission."
    ),
}
"""The hint by the pattern of an error, in any case."""


def template_hint(row: Mapping[str, Any]) -> str | None:
    """Return the fixed sentence for a known kind of error, or None."""
    error_text = row["hint"]
    if row.get("outcome") == "user_rejected":
        return f"The user rejected this step: {shortened_hint(error_text)}"
    for pattern, sentence in _TEMPLATES.items():
        if re.search(pattern, error_text, re.IGNORECASE):
            names = [
                tool["function"]["name"] for tool in row.get("tools") or () if "function" in tool
            ]
            return sentence.format(tools=", ".join(names) or "see the list of tools")
    return None


def raw_error_hint(row: Mapping[str, Any]) -> str:
    """Return the recorded error, shortened."""
    return f"The next attempt failed with: {shortened_hint(row['hint'])}"


class JudgeHints:
    """A judge: a language model that writes at most two sentences. It is used only if you add it to the layers.

    Answers are cached by error, so a process pays for it only once.

    Args:
        complete: Returns the judge's answer to a prompt.
    """

    def __init__(self, complete: Callable[[str], str]) -> None:
        self._answer = cache(complete)

    def __call__(self, row: Mapping[str, Any]) -> str | None:
        """Return the judge's hint, None when it answered nothing."""
        answer = self._answer(
            "A coding agent's step failed. In at most two sentences, say what to do differently, "
            f"without giving the answer away.\nResult: {shortened_hint(row['hint'])}"
        )
        return shortened_hint(answer) or None


def hint_for_row(
    row: Mapping[str, Any], layers: Sequence[HintFunction] = (template_hint, raw_error_hint)
) -> str | None:
    """Return the first hint of the layers from a row's `hint` column (the recorded error or feedback)."""
    error_text = (row.get("hint") or "").strip()
    if not error_text:
        return None
    found = (layer({**row, "hint": error_text}) for layer in layers)
    return next((hint for hint in found if hint), None)


def shortened_hint(text: str) -> str:
    """Remove outer white space, and the middle of a text longer than `MAX_HINT_CHARS`."""
    text = text.strip()
    if len(text) <= MAX_HINT_CHARS:
        return text
    half = MAX_HINT_CHARS // 2 - 2
    return f"{text[:half]} … {text[-half:]}"
