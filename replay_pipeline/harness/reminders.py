"""Learn a client's reminders: of an unused task list from its later requests, and of plan mode."""

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import msgspec

from replay_pipeline.harness.listener import ToolReply

LIST_TOOLS = {"todo_reminder": "TodoWrite", "task_reminder": "TaskCreate"}
"""The tool that writes the task list, by the type of the attachment that logs the reminder."""
N_UNUSED = 10
"""After this many answer blocks without use of the list comes a reminder, and again after as many more."""
_FIRST, _SECOND = "Look around", "Write it down"
_TAGGED = re.compile(r"<system-reminder>(?:(?!<system-reminder>).)*</system-reminder>", re.DOTALL)
_END = re.compile(r"\s*</system-reminder>\Z")

_PLANNING = "Plan mode is active"
_PLAN_FILE = re.compile(r"/\S+/plans/\S+\.md")

Said = list[tuple[str, list[str]]]
"""The messages of a request: role and texts of each."""
Task = tuple[str, str, str]
"""Number, status and words."""


class ListReminder(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a reminder of the task list."""

    text: str
    """The reminder for an empty list."""
    listing: str = ""
    """The reminder with `⟦items⟧` in place of the tasks; empty if it wasn't learned."""
    item: str = ""
    """The form of one task, with `⟦number⟧`, `⟦status⟧`, and `⟦words⟧`."""
    between: str = "\n"
    """The text between two tasks."""
    is_system: bool = False
    """Whether it is a system message, and not at the end of a tool's result."""

    def said(self, tasks: Sequence[Task] = ()) -> str:
        """Return the reminder with these tasks."""
        if not (tasks and self.listing):
            return self.text
        names = ("⟦number⟧", "⟦status⟧", "⟦words⟧")
        items = []
        for task in tasks:
            values = dict(zip(names, task, strict=True))
            items.append(re.sub(r"⟦\w+⟧", lambda slot, values=values: values[slot[0]], self.item))
        return self.listing.replace("⟦items⟧", self.between.join(items))


class PlanReminder(msgspec.Struct, frozen=True, kw_only=True):
    """The words with which a client says that plan mode is on."""

    text: str
    """With `⟦plan⟧` in place of the file for the plan."""
    is_system: bool = False
    """Whether it is a system message, and not in the user's message."""

    def said(self, path: str | None, instead: str | None = None) -> str:
        """Return the reminder for a file. Without one, the line about the file is left out.

        Args:
            path: the file.
            instead: what is said of the file in place of the client's words.
        """
        lines = []
        for line in self.text.split("\n"):
            if "⟦plan⟧" not in line:
                lines.append(line)
            elif instead or path:
                lines.append(instead or line.replace("⟦plan⟧", path or ""))
        return "\n".join(lines)


def without_plan(planning: Said, other: Said) -> tuple[Said, PlanReminder | None]:
    """Return the messages of a request in plan mode without its reminder, and the reminder.

    Args:
        planning: the messages of a client that was started in plan mode.
        other: those of one that was not.
    """
    kept: Said = []
    found: PlanReminder | None = None
    for number, (role, texts) in enumerate(planning):
        rest = []
        for text in texts:
            if text.startswith(f"<system-reminder>\n{_PLANNING}"):
                found = _plan_reminder(text)
                if rest:  # the line break that stands before the next text was behind this one
                    rest[-1] = rest[-1].rstrip("\n") + text[len(text.rstrip("\n")) :]
            elif role == "system" and _PLANNING in text and number < len(other):
                own, text = _inserted(text, "\n\n".join(other[number][1]))
                found = _plan_reminder(own, is_system=True)
                rest.append(text)
            else:
                rest.append(text)
        if rest or not texts:
            kept.append((role, rest))
    return kept, found


def _inserted(text: str, other: str) -> tuple[str, str]:
    """Return what a text says of plan mode beyond another, and the rest."""
    lines, lines_other = text.split("\n"), other.split("\n")
    matcher = SequenceMatcher(None, lines_other, lines, autojunk=False)
    for _, _, _, start, end in matcher.get_opcodes():
        own = "\n".join(lines[start:end]).strip("\n")
        if own.startswith(_PLANNING):
            return own, "\n".join(lines[:start] + lines[end:])
    return text, ""


def _plan_reminder(text: str, *, is_system: bool = False) -> PlanReminder:
    return PlanReminder(text=_PLAN_FILE.sub("⟦plan⟧", text), is_system=is_system)


def idle_calls(names: set[str]) -> tuple[ToolReply, ...]:
    """Return enough calls without effect to cause the reminder."""
    # Both need no leave in the client's own folder.
    if "Glob" in names:
        return (ToolReply("Glob", {"pattern": "*"}),) * N_UNUSED
    return (ToolReply("Bash", {"command": "pwd"}),) * N_UNUSED


def listing_calls(names: set[str]) -> tuple[ToolReply, ...]:
    """Return calls that add two tasks to the client's list."""
    if "TodoWrite" in names:
        todos = [
            {"content": words, "status": "pending", "activeForm": words}
            for words in (_FIRST, _SECOND)
        ]
        return (ToolReply("TodoWrite", {"todos": todos}),)
    if "TaskCreate" in names:
        return tuple(
            ToolReply("TaskCreate", {"subject": words, "description": words})
            for words in (_FIRST, _SECOND)
        )
    return ()


def reminders_in(bodies: Sequence[Mapping[str, Any]]) -> dict[str, ListReminder]:
    """Return the reminders in the requests of one conversation, by attachment type.

    Only reminders at the end of a tool's result, or in a system message after it, count.
    """
    found: dict[tuple[str, bool], list[str]] = {}
    for body in bodies[1:]:
        *_, before, last = [{}, *body["messages"]]
        is_system = last["role"] == "system"
        texts = _texts_of_results(before if is_system else last)
        texts = _texts_of(last["content"]) if is_system and texts else texts
        for text in texts if is_system else (t for each in texts for t in _TAGGED.findall(each)):
            for kind in (kind for kind, tool in LIST_TOOLS.items() if tool in text):
                if text not in found.setdefault((kind, is_system), []):
                    found[kind, is_system].append(text)
    return {
        kind: _reminder(*texts[:2], is_system=is_system)
        for (kind, is_system), texts in found.items()
    }


def _texts_of_results(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    results = [
        block.get("content")
        for block in (content if isinstance(content, list) else ())
        if block.get("type") == "tool_result"
    ]
    return [text for text in results if isinstance(text, str)]


def _texts_of(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [each.get("text", "") for each in content]


def _reminder(text: str, with_tasks: str = "", *, is_system: bool) -> ListReminder:
    said = _END.sub("", text)
    marks = [
        re.search(rf"(?P<before>\S*?){n}(?P<then>\W+)pending(?P<last>\W+){words}", with_tasks)
        for n, words in ((1, _FIRST), (2, _SECOND))
    ]
    one, two = marks
    if not (one and two and with_tasks.startswith(said)):
        return ListReminder(text=text, is_system=is_system)
    before = one["before"].removeprefix("[") if not two["before"] else one["before"]
    start = one.end() - len(one[0]) + len(one["before"]) - len(before)
    return ListReminder(
        text=text,
        listing=f"{with_tasks[:start]}⟦items⟧{with_tasks[two.end() :]}",
        item=f"{before}⟦number⟧{one['then']}⟦status⟧{one['last']}⟦words⟧",
        between=with_tasks[one.end() : two.start()],
        is_system=is_system,
    )
