"""What a client puts around the user's first words, where it was learned from the client: reminders and lists."""

import re

from replay_pipeline.harness.harness import Filled
from replay_pipeline.types import Message


def _listed(head: str) -> re.Pattern[str]:
    return re.compile(rf"<system-reminder>\n{head}\n+(.*?)\n</system-reminder>\n*", re.DOTALL)


_NOWHERE = re.compile(r"(?!)")
_LISTINGS = (
    (
        _listed("Skills you can use:"),
        re.compile(r"\A<system-reminder>\n[^\n]*\bskills\b[^\n]*:\n\n(?=- )"),
        re.compile(r"((?:\A|(?<=\n))[^\n]*\bskills\b[^\n]*:\n\n)(?=- ).*", re.DOTALL),
    ),
    (
        _listed("Agent types you can start:"),
        _NOWHERE,
        re.compile(
            r"((?:\A|(?<=\n))[^\n]*\bagent types\b[^\n]*:\n)(?=- ).*?(?=\n\n|\Z)", re.DOTALL
        ),
    ),
)
"""What a log lists; the head of such a list in a client's reminder, and the list in its system message."""
_TOLD_BEFORE = (
    (
        re.compile(
            r"<system-reminder>\n(# MCP Server Instructions\n.*?)\n</system-reminder>\n*", re.DOTALL
        ),
        False,
    ),
    (
        re.compile(
            r"<system-reminder>\n(SessionStart\S* hook success: .*?)\n</system-reminder>\n*",
            re.DOTALL,
        ),
        True,
    ),
)
"""What a client tells in the first message before its lists, and whether before all of them."""


def surrounded(messages: list[Message], filled: Filled) -> list[Message]:
    """Put a client's reminders into the first message of the user, and what it says behind it.

    Skills, kinds of agents and instructions of servers are those that the log lists, where it does, in the
    client's own words around them and in its place for them.
    """
    place = next((n for n, each in enumerate(messages) if each["role"] == "user"), None)
    if place is None or not isinstance(messages[place].get("content"), str):
        return messages
    words, before, after = messages[place]["content"], list(filled.before), list(filled.after)
    for listed, in_reminder, in_system in _LISTINGS:
        found = listed.search(words)
        if found is None:
            continue
        if (spot := _found_in(before, in_reminder)) is not None:
            number, match = spot
            before[number] = f"{match[0]}{found[1]}\n</system-reminder>\n"
        elif (spot := _found_in([each["content"] for each in after], in_system)) is not None:
            number, match = spot
            text = after[number]["content"]
            text = f"{text[: match.end(1)]}{found[1]}{text[match.end() :]}"
            after[number] = after[number] | {"content": text}
        else:
            continue
        words = _without(words, found)
    for told, is_first in _TOLD_BEFORE:
        found = told.search(words)
        if found is not None and _told_before(found[1], before, after, is_first=is_first):
            words = _without(words, found)
    shown = {**messages[place], "content": "\n\n".join([*before, words])}
    return [*messages[:place], shown, *after, *messages[place + 1 :]]


def _without(text: str, found: re.Match[str]) -> str:
    return (text[: found.start()] + text[found.end() :]).strip("\n")


def _told_before(text: str, before: list[str], after: list[Message], *, is_first: bool) -> bool:
    """Put what a client tells right before its skills, or before all else, there; `False` if it has no skills."""
    _, in_reminder, in_system = _LISTINGS[0]
    if (spot := _found_in(before, in_reminder)) is not None:
        before.insert(spot[0], f"<system-reminder>\n{text}\n</system-reminder>")
    elif (spot := _found_in([each["content"] for each in after], in_system)) is not None:
        number, match = spot
        behind = after[number]["content"]
        at = 0 if is_first else match.start()
        content = f"{behind[:at]}{text}\n\n{behind[at:]}"
        after[number] = after[number] | {"content": content}
    else:
        return False
    return True


def _found_in(texts: list[str], pattern: re.Pattern[str]) -> tuple[int, re.Match[str]] | None:
    """Return the first text in which a pattern is found, by its number, and where."""
    found = ((number, pattern.search(text)) for number, text in enumerate(texts))
    return next(((number, match) for number, match in found if match is not None), None)
