"""A harness: the constant part of a client's requests, with slots for what the client fills in."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import msgspec

from replay_pipeline.harness.reminders import ListReminder, PlanReminder
from replay_pipeline.types import Message, Tool

SLOT = re.compile(r"⟦([a-z_]+)⟧")
_EVERY_LINE_END = re.compile(r"(?<=\n)")
_HOME = re.compile(r"(?:/(?:home|Users)/[^/]+|/root)(?=/|$)")
_MODEL = re.compile(
    r"claude-(?P<family>[a-z]+)-(?P<major>\d+)(?:-(?P<minor>\d{1,2}))?(?:-\d{8})?(?P<long>\[1m\])?$"
)
_YES_NO = (("Yes", "No"), ("yes", "no"), ("true", "false"))
_NO_BRANCH = "HEAD"
"""What a client logs outside of a repository, and in one without a branch."""
OF_THE_MODEL = ("model", "model_name", "knowledge")
"""Slots whose values depend on the model."""

Kind = Literal["main", "subagent"]
"""Whether requests belong to the conversation with the user, or to a helper that it starts."""


class Framing(msgspec.Struct, frozen=True, kw_only=True):
    """The text around the conversation in one kind of request. The text may have slots."""

    system: list[str]
    tools: list[Tool] = []
    before: list[str] = []
    """Texts in the user's first message, before the user's own words."""
    after: list[Message] = []
    """Messages after it, mostly with the system role."""
    params: dict[str, Any] = {}
    """The other parameters of the request."""
    git: str = ""
    """The beginning of what it says of a git repository, behind the system prompt."""
    learned: dict[str, str] = {}
    """Values of the slots that depend on the model, for the model that was used, and of `is_git`."""
    left_out: list[str] = []
    """The beginnings of texts that were left out, because the client filled in values that are unknown."""
    reminders: dict[str, ListReminder] = {}
    """Reminders of an unused task list, by the type of the attachment that logs them."""
    plan: PlanReminder | None = None
    """What it says in plan mode, if it was started in it."""


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """The harness of one version of a client."""

    agent: str
    version: str
    how: str
    """`asked` if the client was started, `request` if it was read from a recorded request."""
    framings: dict[Kind, Framing]

    @property
    def sha(self) -> str:
        """Hash of the content: equal harnesses have equal hashes."""
        told = msgspec.to_builtins(self)
        for framing in told["framings"].values():
            # Harnesses from before these were learned keep their name.
            for name in ("git", "plan", "reminders"):
                if not framing[name]:
                    del framing[name]
        data = msgspec.json.encode(told, order="sorted")
        return hashlib.sha256(data).hexdigest()[:16]

    def framing(self, *, is_subagent: bool = False) -> tuple[Framing, bool]:
        """Return the framing for a kind of conversation, and whether it was learned from this kind."""
        if is_subagent and (found := self.framings.get("subagent")) is not None:
            return found, True
        return self.framings["main"], not is_subagent


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The time and place of a request by the log, to fill slots with."""

    cwd: str | None = None
    model: str | None = None
    at: datetime | None = None
    branch: str | None = None
    """The git branch; empty outside of a repository."""

    def values(self, learned: Mapping[str, str]) -> dict[str, str]:
        """Return the known values of slots.

        Args:
            learned: values for the model that was used when the harness was learned, which apply
                only to the same model, and the client's word for it that a folder is a repository.
        """
        found: dict[str, str] = {}
        if self.cwd:
            found |= {"cwd": self.cwd, "cwd_slug": slug_of(self.cwd)}
            if home := _HOME.match(self.cwd):
                found["home"] = home[0]
                found["platform"] = "darwin" if home[0].startswith("/Users/") else "linux"
        if self.at:
            found |= {**words_of_day(self.at), "year": f"{self.at:%Y}"}
        if self.branch and self.branch != _NO_BRANCH:
            found["git_branch"] = self.branch
        words = next((each for each in _YES_NO if learned.get("is_git") in each), None)
        if words is not None and self.branch != _NO_BRANCH and self.branch is not None:
            found["is_git"] = words[0] if self.branch else words[1]
        if self.model and bare_model(self.model) == bare_model(learned.get("model", "")):
            found |= {name: learned[name] for name in OF_THE_MODEL if name in learned}
        elif self.model and (name := name_of_model(self.model)):
            found |= {"model": self.model, "model_name": name}
        return found


@dataclass(slots=True)
class Filled:
    """The framing of one state."""

    system: list[str]
    tools: list[Tool]
    before: list[str]
    after: list[Message]
    reminders: dict[str, ListReminder] = field(default_factory=dict)
    plan: PlanReminder | None = None
    unfilled: set[str] = field(default_factory=set)
    """Slots without a value in the log. Lines with such slots are left out."""


def fill(framing: Framing, moment: Moment) -> Filled:
    """Fill the slots from the log. Lines with a slot that has no value are left out."""
    values = moment.values(framing.learned)
    unfilled: set[str] = set()

    def put(value: Any) -> Any:
        if isinstance(value, str):
            return filled_text(value, values, unfilled)
        if isinstance(value, dict):
            return {key: put(each) for key, each in value.items()}
        return [put(each) for each in value] if isinstance(value, list) else value

    system = [text for text in put(framing.system) if text]
    if framing.git and "git_branch" in values:
        system[-1:] = ["\n\n".join([*system[-1:], put(framing.git)])]
    elif framing.git:
        unfilled.add("git_branch")
    return Filled(
        system=system,
        tools=put(framing.tools),
        before=[text for text in put(framing.before) if text],
        after=put(framing.after),
        reminders=framing.reminders,
        plan=framing.plan,
        unfilled=unfilled,
    )


def filled_text(text: str, values: Mapping[str, str], unfilled: set[str]) -> str:
    """Fill the slots of a text. A line with an unfilled slot is left out, and the slot is recorded."""
    if "⟦" not in text:
        return text
    kept = []
    for line in _EVERY_LINE_END.split(text):
        names = set(SLOT.findall(line))
        if missing := names - values.keys():
            unfilled |= missing
        else:
            kept.append(SLOT.sub(lambda match: values[match[1]], line))
    return "".join(kept)


def leaves_of(value: Any) -> Iterator[str]:
    """Yield every text inside a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from leaves_of(each)


def slots_of(framing: Framing) -> list[str]:
    """Return the names of a framing's slots."""
    texts: Iterable[Any] = [
        framing.system,
        framing.git,
        framing.tools,
        framing.before,
        framing.after,
    ]
    return sorted({name for text in leaves_of(list(texts)) for name in SLOT.findall(text)})


def words_of_day(day: datetime) -> dict[str, str]:
    """Return the forms in which clients write a day, by slot, such as `November 2026`."""
    return {
        "date": f"{day:%Y-%m-%d}",
        "month": f"{day:%B %Y}",
        "long_date": f"{day:%A, %B} {day.day}, {day.year}",
    }


def slug_of(folder: str) -> str:
    """Return a folder's path in the form that Claude Code uses for the names of its own folders."""
    return re.sub(r"[^A-Za-z0-9]", "-", folder)


def bare_model(model: str) -> str:
    """Return the id of a model without vendor, date, and the mark for a long context."""
    return re.sub(r"-\d{8}$", "", model.rpartition("/")[2].removesuffix("[1m]"))


def name_of_model(model: str) -> str | None:
    """Return the client's name for a model: `Opus 4.5` for `claude-opus-4-5-20251101`."""
    match = _MODEL.match(model.rpartition("/")[2])
    if match is None:
        return None
    number = ".".join(filter(None, (match["major"], match["minor"])))
    return f"{match['family'].title()} {number}{' (1M context)' if match['long'] else ''}"
