"""Name what two actions differ in, from the actions, the schemas of their tools, and the prompt.

Whether an action that differs from a right one is wrong depends on what it differs in. Among real models, of
two answers that differ in an argument that spells out its documented default both are right as a rule, and of
two that call different functions hardly ever (`judge/belief.toml`).
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from replay_pipeline.actions.canonical import Action, Call
from replay_pipeline.actions.edits import perfect_matching
from replay_pipeline.actions.keys import purpose_of
from replay_pipeline.actions.tools import SPECS, is_default
from replay_pipeline.types import Message, Tool

Fact = Literal[
    "default",
    "form",
    "wraps",
    "unwraps",
    "idle",
    "abbreviates",
    "qualifies",
    "longer",
    "shorter",
    "adds",
    "omits",
    "list",
    "text",
    "empty",
    "code",
    "value",
    "scale",
    "number",
    "fewer",
    "more",
    "tool",
    "words",
    "turn",
    "missing",
    "made_up",
    "makes_up",
    "looks",
    "coding",
]
"""One thing in which a side differs from the other one, from a small difference to a large one."""
FACTS: tuple[Fact, ...] = get_args(Fact)
IN_WORDS: Mapping[Fact, str] = {
    "default": "an argument that is the default",
    "form": "how a value is written",
    "wraps": "quotation marks or brackets around a text of the chosen side alone",
    "unwraps": "quotation marks or brackets around a text of the rejected side alone",
    "idle": "an optional argument that is false, zero, or empty",
    "abbreviates": "a text that is short for the other",
    "qualifies": "a part after a comma, such as a state after its city",
    "longer": "a text that contains the other side's",
    "shorter": "a text that the other side's contains",
    "adds": "an optional argument that only the chosen side gives",
    "omits": "an optional argument that only the rejected side gives",
    "list": "the items of a list",
    "text": "a text",
    "empty": "a value that is empty on one side",
    "code": "code or markup on one side",
    "value": "another value",
    "scale": "a number times a power of ten, such as 4 and .04",
    "number": "a number",
    "fewer": "fewer calls",
    "more": "more calls",
    "tool": "the tool",
    "words": "the words of an answer",
    "turn": "words instead of a call",
    "missing": "a required argument that is missing",
    "made_up": "a value of the rejected side that the prompt doesn't have",
    "makes_up": "a value of the chosen side that the prompt doesn't have",
    "looks": "where one of them only looks around",
    "coding": "in a tool of coding agents, whose answers nobody has scored",
}
_RANK = {fact: rank for rank, fact in enumerate(FACTS)}
_MOST_CALLS = 32
_MOST_CHARS = 200_000
"""Of a prompt, the last so many characters are searched for values."""
_LONGEST_VALUE = 200
"""A longer text is written and not taken from the prompt."""
_DIGITS = re.compile(r"\d+")
_CODE = re.compile(r"[{}<>$\\]|=>|\w\(")
_WRAPPING = re.compile(r"""['"`{}\[\]()<>$]""")
_ONLY_WRITTEN = frozenset({"default", "form", "wraps", "unwraps"})


@dataclass(frozen=True, slots=True)
class ActionDifference:
    """What the chosen side of a pair differs in from the rejected one."""

    facts: frozenset[Fact]
    n_calls: int = 1
    """Number of calls of the chosen side."""

    @property
    def largest(self) -> Fact | None:
        """Return the largest difference, or None if the sides are the same."""
        kinds = self.facts - {"made_up", "makes_up", "looks", "coding"}
        return max(kinds, key=_RANK.__getitem__, default=None)

    def names(self) -> list[Fact]:
        """Return the facts, the largest difference last."""
        return [fact for fact in FACTS if fact in self.facts]


def words_of(facts: Iterable[str]) -> str:
    """Describe what two sides differ in, or return nothing if it isn't known."""
    named = [IN_WORDS[fact] for fact in FACTS if fact in set(facts)]
    return "the sides differ in " + ", ".join(named) if named else ""


def difference(
    chosen: Action,
    rejected: Action,
    tools: Sequence[Tool] = (),
    messages: Sequence[Message] = (),
) -> ActionDifference:
    """Return what two valid actions differ in.

    Args:
        chosen: one side.
        rejected: the other one.
        tools: the tools of the state, whose schemas tell defaults and what is required.
        messages: the prompt, which tells where values come from.
    """
    apart: set[Fact] = {"looks"} if purpose_of(chosen) or purpose_of(rejected) else set()
    if any(call.name in SPECS for call in (*chosen.calls, *rejected.calls)):
        apart.add("coding")
    if not chosen.calls or not rejected.calls:
        if chosen.calls or rejected.calls:
            return ActionDifference(frozenset({"turn"}))
        return ActionDifference(
            frozenset() if chosen.text == rejected.text else frozenset({"words"})
        )
    n_calls = len(chosen.calls)
    if max(n_calls, len(rejected.calls)) > _MOST_CALLS:
        return ActionDifference(frozenset({"value", *apart}), n_calls)
    about = dict(map(_schema_of, tools))
    asked = _plain(_text_of(messages)) if messages else None
    if n_calls != len(rejected.calls):
        few, many = sorted((chosen.calls, rejected.calls), key=len)
        counts: Fact = "fewer" if n_calls < len(rejected.calls) else "more"
        sides = [[(a, b) if few is chosen.calls else (b, a) for b in many] for a in few]
        nearest = [min((_of_calls(a, b, about, asked) for a, b in row), key=_size) for row in sides]
        return ActionDifference(frozenset({counts, *apart}).union(*nearest), n_calls)
    table = [[_of_calls(a, b, about, asked) for b in rejected.calls] for a in chosen.calls]
    ranks = [[_size(facts) for facts in row] for row in table]
    # Calls may stand in another order: the matching whose largest difference is least.
    matching: list[int] | None = None
    for most in sorted({rank for row in ranks for rank in row}):
        near = [[n for n, rank in enumerate(row) if rank <= most] for row in ranks]
        if (matching := perfect_matching(near, n_calls)) is not None:
            break
    facts = frozenset().union(*(table[i][n] for i, n in enumerate(matching or ())))
    return ActionDifference(facts | apart if facts else facts, n_calls)


def _size(facts: Iterable[Fact]) -> int:
    """Return the rank of the largest of some facts, -1 for none."""
    return max((_RANK[fact] for fact in facts), default=-1)


def _schema_of(tool: Tool) -> tuple[str, Any]:
    function = tool.get("function", tool)
    return str(function.get("name")), function.get("parameters") or function.get("input_schema")


def _text_of(messages: Sequence[Message]) -> str:
    """Return what the user and the tools said, from the end on."""
    texts = [
        content if isinstance(content, str) else json.dumps(content)
        for message in messages
        if message.get("role") != "assistant" and (content := message.get("content"))
    ]
    return " ".join(texts)[-_MOST_CHARS:]


def _of_calls(a: Call, b: Call, about: Mapping[str, Any], asked: str | None) -> frozenset[Fact]:
    if a.name != b.name:
        return frozenset({"tool"})
    return frozenset(_of_objects(a.values(), b.values(), about.get(a.name) or {}, asked))


def _of_objects(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], schema: Mapping[str, Any], asked: str | None
) -> set[Fact]:
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    found: set[Fact] = set()
    for name in ours.keys() | theirs.keys():
        told = properties.get(name)
        told = told if isinstance(told, dict) else {}
        if name in ours and name in theirs:
            one, other = ours[name], theirs[name]
            if isinstance(one, dict) and isinstance(other, dict):
                found |= _of_objects(one, other, told, asked)
                continue
            if (fact := _of_values(one, other, told)) is None:
                continue
            found.add(fact)
            if asked is not None and fact not in _ONLY_WRITTEN:
                is_ours, is_theirs = _stands(one, asked), _stands(other, asked)
                if is_ours != is_theirs:
                    found.add("made_up" if is_ours else "makes_up")
        elif is_default(ours.get(name, theirs.get(name)), told):
            found.add("default")
        elif name in required:
            found.add("missing")
        elif not (value := ours.get(name, theirs.get(name))):
            found.add("idle")
        else:
            found.add("adds" if name in ours else "omits")
            if asked is not None and not _stands(value, asked):
                found.add("makes_up" if name in ours else "made_up")
    return found


def _of_values(a: Any, b: Any, about: Mapping[str, Any]) -> Fact | None:
    if a == b and type(a) is type(b):
        return None
    if _plain(a) == _plain(b):
        ours, theirs = (len(_WRAPPING.findall(x)) if isinstance(x, str) else -1 for x in (a, b))
        if min(ours, theirs) < 0 or ours == theirs:
            return "form"
        return "wraps" if ours > theirs else "unwraps"
    if isinstance(a, str) and isinstance(b, str):
        if about.get("enum"):
            return "value"
        ours, theirs = _plain(a), _plain(b)
        if not (ours and theirs):
            return "empty"
        if (date := _date(a)) is not None and date == _date(b):
            return "form"
        if _is_short_for(a, b) or _is_short_for(b, a):
            return "abbreviates"
        if a.partition(",")[0].casefold() == b.partition(",")[0].casefold() and "," in a + b:
            return "qualifies"
        if _DIGITS.findall(a) != _DIGITS.findall(b):
            return "number"
        if bool(_CODE.search(a)) != bool(_CODE.search(b)):
            return "code"
        if ours in theirs or theirs in ours:
            return "longer" if theirs in ours else "shorter"
        return "text"
    if _is_number(a) and _is_number(b):
        return "scale" if a and b and _is_power_of_ten(abs(a / b)) else "number"
    if isinstance(a, list | dict) and isinstance(b, list | dict):
        return "list"
    return "value"


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE_PART = re.compile(r"(\d+)(?:st|nd|rd|th)?|([^\W\d_]+)")


def _date(text: str) -> list[int] | None:
    """Return the numbers of a date in ascending order, with the month as one, or None for any other text."""
    found: list[int] = []
    for digits, word in _DATE_PART.findall(text.casefold()):
        if digits:
            found.append(int(digits))
        elif word[:3] in _MONTHS and len(word) < 10:
            found.append(1 + _MONTHS.index(word[:3]))
        elif word not in ("of", "the"):
            return None
    return sorted(found) if len(found) > 1 else None


def _is_short_for(short: str, long: str) -> bool:
    """Return whether a word of a few letters stands for a longer text, such as `km` or `UK`."""
    letters = re.sub(r"[\W_]", "", short.casefold())
    rest = re.sub(r"[^\w]", "", long.casefold())
    if not (letters and len(letters) <= 5 and len(letters) < len(rest)) or letters[0] != rest[0]:
        return False
    if re.search(rf"\b{re.escape(short.strip())}\b", long, re.IGNORECASE):
        return False
    places = iter(rest)
    return all(letter in places for letter in letters)


def _is_power_of_ten(ratio: float) -> bool:
    exponent = math.log10(ratio)
    return abs(exponent) > 0.5 and abs(exponent - round(exponent)) < 1e-9


def _stands(value: Any, asked: str) -> bool:
    """Return whether each text and number of a value is in the prompt."""
    plain = map(_plain, _leaves(value))
    return all(each in asked for each in plain if len(each) <= _LONGEST_VALUE)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    elif not isinstance(value, bool):
        yield value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    """Return a value without what is only its form: case, punctuation, and the type of a number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    folded = unicodedata.normalize("NFKC", text).casefold()
    # A sign or a decimal point is no punctuation.
    return re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w.\-+]|_|(?<!\W)[-+]|[-+](?!\d)", "", folded)
