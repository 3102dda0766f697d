"""Compare two requests of one client that was started with different values, and find the slots.

Text that both requests have is constant. A difference in a known value (folder, home, date, model)
becomes a slot. Other differences (git status, memory files, ids of a run) are left out and listed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from replay_pipeline.harness.harness import OF_THE_MODEL, Framing, leaves_of, slug_of
from replay_pipeline.types import Message, Tool

_BILLING = "x-anthropic-billing-header:"
_FIELDS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), names)
    for pattern, names in (
        (
            r"model named (.+?)\. The exact model ID is ([^\s]+?)(?=\.?\s|\.?$)",
            ("model_name", "model"),
        ),
        (r"powered by the model (claude-[^\s]+?)(?=\.?\s|\.?$)", ("model",)),
        (r"Co-Authored-By: Claude ([^<\n]+?) <", ("model_name",)),
        (r"knowledge cutoff is ([^.\n]+)\.", ("knowledge",)),
        (r"(?:Platform|My operating system is): (\S+)", ("platform",)),
        (r"OS Version: ([^\n]+)", ("os_version",)),
        (r"Shell: ([^\n]+)", ("shell",)),
        (r"[Ii]s (?:directory )?a git repo(?:sitory)?: (Yes|No|yes|no|true|false)", ("is_git",)),
        (r"Today's date(?: is|:) (\d{4}[-/]\d\d[-/]\d\d)", ("date",)),
        (r"Today's date is ([A-Z][a-z]+, [A-Z][a-z]+ \d+, \d{4})", ("long_date",)),
    )
)
"""Lines in which clients tell what they find where they are started, and the names of the values."""
_GIT = re.compile(
    r"(?:\A|\n\n)(?P<said>gitStatus: [^\n]*\n+Current branch: )(?P<branch>\S+)(?P<rest>.*)\Z",
    re.DOTALL,
)
"""What Claude Code says at the end of the system prompt in a repository; a log has only the branch."""
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRequest:
    """One request of a client in OpenAI's form, and the values with which the client was started."""

    system: list[str]
    tools: list[Tool]
    messages: list[tuple[str, list[str]]]
    """Role and texts of each."""
    params: dict[str, Any]
    words: str
    """The user's words, to find the text around them."""
    values: Mapping[str, str]
    """Values by slot. Each occurrence of a value in the request becomes its slot."""


def framing_of(first: AskedRequest, second: AskedRequest | None = None) -> Framing:
    """Return the framing that two requests share, or that of a single request.

    Args:
        first: a request.
        second: the same request with other values.
    """
    learned: dict[str, str] = {}
    one = _marked(first, learned)
    other = _marked(second, {}) if second is not None else one
    left_out: list[str] = []
    git = _without_git(one, left_out)
    _without_git(other, [])
    tools = {tool["function"]["name"]: tool for tool in other.tools}
    before, after = _around(one)
    before_other, after_other = _around(other)
    missing = [
        each["function"]["name"] for each in one.tools if each["function"]["name"] not in tools
    ]
    left_out += [f"tool {name}" for name in missing]
    system = [text for text in one.system if not text.startswith(_BILLING)]
    system_other = [text for text in other.system if not text.startswith(_BILLING)]
    return Framing(
        system=_common_texts(system, system_other, left_out),
        tools=[
            _common(tool, tools[name], left_out)
            for tool in one.tools
            if (name := tool["function"]["name"]) in tools
        ],
        before=_common_texts(before, before_other, left_out),
        after=_common_messages(after, after_other, left_out),
        params={key: value for key, value in one.params.items() if other.params.get(key) == value},
        git=git,
        learned=learned,
        left_out=list(dict.fromkeys(left_out)),
    )


def _without_git(request: AskedRequest, left_out: list[str]) -> str:
    """Cut what is said of the repository off the system prompt; returns it up to the branch."""
    match = _GIT.search(request.system[-1]) if request.system else None
    if match is None:
        return ""
    request.system[-1] = request.system[-1][: match.start()]
    left_out += [_beginning(line) for line in match["rest"].split("\n") if line.strip()]
    return f"{match['said']}⟦git_branch⟧"


def _marked(request: AskedRequest, learned: dict[str, str]) -> AskedRequest:
    """Put slots in the place of known values; what goes with the model is noted."""
    known = dict(request.values)
    if folder := known.get("cwd"):
        known.setdefault("cwd_slug", slug_of(folder))
    # The longest first: a folder lies in the home, and its name may hold the home's.
    spelled = sorted(((v, k) for k, v in known.items() if v), key=lambda each: -len(each[0]))

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: mark(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(mark(each) for each in value)
        if not isinstance(value, str):
            return value
        for pattern, names in _FIELDS:
            value = pattern.sub(
                lambda match, names=names: _with_slots(match, names, learned), value
            )
        for text, name in spelled:
            value = value.replace(text, f"⟦{name}⟧")
        return value

    return AskedRequest(
        system=mark(request.system),
        tools=mark(request.tools),
        messages=mark(request.messages),
        params=request.params,
        words=request.words,
        values=request.values,
    )


def _with_slots(match: re.Match[str], names: Sequence[str], learned: dict[str, str]) -> str:
    text, shift = match[0], match.start()
    for number in range(len(names), 0, -1):
        start, end = match.span(number)
        if names[number - 1] in (*OF_THE_MODEL, "is_git"):
            learned.setdefault(names[number - 1], match[number])
        text = f"{text[: start - shift]}⟦{names[number - 1]}⟧{text[end - shift :]}"
    return text


def _around(request: AskedRequest) -> tuple[list[str], list[Message]]:
    """Return the texts before the user's words, and the messages behind them."""
    for place, (role, texts) in enumerate(request.messages):
        if role == "user" and any(request.words in text for text in texts):
            first = next(n for n, text in enumerate(texts) if request.words in text)
            behind = [
                {"role": role, "content": "\n\n".join(texts)}
                for role, texts in request.messages[place + 1 :]
                if role in ("system", "user", "developer")
            ]
            earlier = [text for _, texts in request.messages[:place] for text in texts]
            return [*earlier, *texts[:first]], behind
    return [], []


def _common_texts(one: list[str], other: list[str], left_out: list[str]) -> list[str]:
    """Return what two lists of texts share: texts by their beginnings, and of these the lines."""
    heads = [[text[:_SHOWN_CHARS] for text in texts] for texts in (one, other)]
    matcher = SequenceMatcher(None, *heads, autojunk=False)
    pairs = {
        start + n: other[there + n]
        for start, there, size in matcher.get_matching_blocks()
        for n in range(size)
    }
    if len(one) == len(other):  # a text may begin with what differs
        pairs = {n: pairs.get(n, other[n]) for n in range(len(one))}
    left_out += [_beginning(text) for n, text in enumerate(one) if n not in pairs]
    common = (_common(text, pairs[n], left_out) for n, text in enumerate(one) if n in pairs)
    return [text for text in common if text.strip()]


def _common_messages(
    one: list[Message], other: list[Message], left_out: list[str]
) -> list[Message]:
    if [each["role"] for each in one] != [each["role"] for each in other]:
        left_out += [_beginning(str(each["content"])) for each in one]
        return []
    common = [_common(each, there, left_out) for each, there in zip(one, other, strict=True)]
    return [each for each in common if each["content"].strip()]


def _common(one: Any, other: Any, left_out: list[str]) -> Any:
    """Return a value with only the lines of its texts that another has as well."""
    if one == other:
        return one
    if isinstance(one, str) and isinstance(other, str):
        lines, lines_other = one.split("\n"), other.split("\n")
        matcher = SequenceMatcher(None, lines, lines_other, autojunk=False)
        kept = []
        for code, start, end, _, _ in matcher.get_opcodes():
            if code == "equal":
                kept += lines[start:end]
            else:
                left_out += [_beginning(line) for line in lines[start:end] if line.strip()]
        return "\n".join(kept)
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _common(each, other[key], left_out) for key, each in one.items() if key in other
        }
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_common(each, there, left_out) for each, there in zip(one, other, strict=True)]
    return one


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…"


def values_in(request: AskedRequest) -> dict[str, str]:
    """Return the folder that a recorded request names."""
    pattern = re.compile(r"orking directory: (/[^\n]*)")
    said = [text for _, texts in request.messages for text in texts]
    found = next(filter(None, map(pattern.search, leaves_of([request.system, said]))), None)
    return {"cwd": found[1].strip()} if found else {}
