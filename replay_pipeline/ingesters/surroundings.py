"""Add a client's learned reminders and lists to a prompt."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from replay_pipeline.harness.harness import Filled
from replay_pipeline.harness.reminders import N_UNUSED, ListReminder, PlanReminder, Task
from replay_pipeline.ingesters.attachments import PLAN_BEGINS, UNUSED
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


_CONTEXT = re.compile(r"\A<system-reminder>\nAs you answer the user's questions")
"""The reminder that stands between that of plan mode and the user's words."""


def surrounded(
    messages: list[Message], filled: Filled, plan: PlanReminder | None = None
) -> list[Message]:
    """Put a client's reminders into the user's first message, and its other texts after it.

    If the log lists skills, kinds of agents, and instructions of servers, these are used, at the
    place and with the surrounding words of the client.

    Args:
        messages: a prompt without its system prompt.
        filled: the client's texts.
        plan: the client's words for plan mode; without them, ours stay.
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
    if plan is not None and (found := PLAN_BEGINS.search(words)) is not None:
        said, words = _plan_said(plan, found), _without(words, found)
        if not plan.is_system:
            spot = _found_in(before, _CONTEXT)
            number = spot[0] if spot else len(before)
            if number:
                before[number - 1] = before[number - 1].rstrip("\n")
            before.insert(number, said)
        elif not _told_before(said, before, after, is_first=False):
            after.append({"role": "system", "content": said})
    shown = {**messages[place], "content": "\n\n".join([*before, words])}
    return [*messages[:place], shown, *after, *_planned(messages[place + 1 :], plan)]


def _planned(messages: list[Message], plan: PlanReminder | None) -> list[Message]:
    """Put the client's words in the place of ours where plan mode begins in mid-conversation."""
    shown: list[Message] = []
    for message in messages:
        text = message.get("content")
        is_users = plan is not None and message["role"] == "user" and isinstance(text, str)
        found = PLAN_BEGINS.search(text) if is_users else None
        if plan is None or found is None:
            shown.append(message)
            continue
        said, words = _plan_said(plan, found), _without(str(text), found)
        if plan.is_system:
            shown += [{**message, "content": words}] if words else []
            shown.append({"role": "system", "content": said})
        else:
            shown.append({**message, "content": "\n\n".join(filter(None, (said, words)))})
    return shown


def _plan_said(plan: PlanReminder, found: re.Match[str]) -> str:
    return plan.said(found["path"], found["file"] if found["begun"] else None)


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


_OUR_WORDS = {
    kind: re.compile(
        rf"<system-reminder>\n{re.escape(head)}(?P<tasks>(?:(?!</system-reminder>).)*?)\n</system-reminder>",
        re.DOTALL,
    )
    for kind, head in UNUSED.items()
}
_TASK_LINE = re.compile(r"^(?:#(\S+)\. )?\[(\w+)\] (.*)$", re.MULTILINE)
_REMINDERS_ALONE = re.compile(r"(?:<system-reminder>\n.*?\n</system-reminder>\s*)+", re.DOTALL)


def reminded(
    messages: list[Message], reminders: Mapping[str, ListReminder], *, is_logged: bool
) -> list[Message]:
    """Insert a client's reminders of an unused task list where the client puts them.

    Args:
        messages: a prompt without its system prompt.
        reminders: the client's words, by the type of the attachment that logs them.
        is_logged: whether the log notes each reminder. If not, they are inserted by the client's
            rule: after a number of answer blocks without use of the list, and again after as many.
    """
    shown: list[Message] = []
    for message in messages:
        text = message.get("content")
        said = _in_its_words(text, reminders) if message["role"] == "user" else text
        if said == text or not isinstance(said, str):
            shown.append(message)
        elif any(
            each.is_system and _OUR_WORDS[kind].fullmatch(str(text))
            for kind, each in reminders.items()
        ):
            shown.append({"role": "system", "content": said})
        elif shown and shown[-1]["role"] == "tool" and _REMINDERS_ALONE.fullmatch(said):
            shown[-1] = _with_end(shown[-1], said)
        else:
            shown.append({**message, "content": said})
    for reminder in [] if is_logged else list(reminders.values())[:1]:
        _remind_by_rule(shown, reminder)
    return shown


def _remind_by_rule(shown: list[Message], reminder: ListReminder) -> None:
    tasks, n_unused, n_since = _Tasks(), 0, 0
    for number, message in enumerate(shown):
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            n_blocks = bool(message.get("content")) + len(calls)
            uses = [n for n, call in enumerate(calls, 1) if tasks.take(call["function"])]
            n_unused = len(calls) - uses[-1] if uses else n_unused + n_blocks
            n_since += n_blocks
            continue
        is_last = number + 1 == len(shown) or shown[number + 1]["role"] == "assistant"
        if is_last and min(n_unused, n_since) >= N_UNUSED:
            n_since = 0
            said = reminder.said(tasks.listed())
            if message["role"] == "tool":
                shown[number] = _with_end(message, said)
            else:
                shown[number] = {**message, "content": f"{said}\n\n{message.get('content') or ''}"}


def _in_its_words(text: Any, reminders: Mapping[str, ListReminder]) -> Any:
    for kind, reminder in reminders.items() if isinstance(text, str) else ():
        if reminder.is_system and not _OUR_WORDS[kind].fullmatch(text):
            continue  # it would be a message of its own
        text = _OUR_WORDS[kind].sub(
            lambda match, said=reminder.said: said(
                [
                    (number or str(n), status, words)
                    for n, (number, status, words) in enumerate(
                        _TASK_LINE.findall(match["tasks"]), 1
                    )
                ]
            ),
            text,
        )
    return text


def _with_end(message: Message, said: str) -> Message:
    """Put words behind a tool's result, as a client does: without the blanks around the result."""
    content = message.get("content")
    return {**message, "content": f"{content.strip()}\n\n{said}" if content else said}


class _Tasks:
    """The list of tasks of a conversation, as its calls leave it."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[str, str]] = {}

    def take(self, function: Mapping[str, Any]) -> bool:
        """Follow a call; returns whether it is one that writes the list."""
        name = function["name"]
        if name not in ("TodoWrite", "TaskCreate", "TaskUpdate"):
            return False
        with suppress(msgspec.DecodeError, msgspec.ValidationError):
            given = msgspec.json.decode(function["arguments"], type=dict[str, Any])
            if name == "TodoWrite":
                todos = [each for each in given.get("todos") or () if isinstance(each, dict)]
                self._tasks = {
                    str(n): (str(each.get("status")), str(each.get("content")))
                    for n, each in enumerate(todos, 1)
                }
            elif name == "TaskCreate":
                self._tasks[str(len(self._tasks) + 1)] = ("pending", str(given.get("subject")))
            elif (number := str(given.get("taskId"))) in self._tasks and given.get("status"):
                self._tasks[number] = (str(given["status"]), self._tasks[number][1])
        return True

    def listed(self) -> list[Task]:
        """Return what a client lists; it clears a list of which everything is done."""
        tasks = [(n, *task) for n, task in self._tasks.items() if task[0] != "deleted"]
        is_done = all(status == "completed" for _, status, _ in tasks)
        return [] if is_done else tasks
