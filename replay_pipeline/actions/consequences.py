"""What a command leaves behind: nothing, a change, or what only a person should decide.

The facts stand in `shell_consequences.toml`. In doubt a command changes something, and has no
consequence of note: so no look is taken for another one, and no request is demanded for harmless
work.
"""

import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import msgspec

_MAX_NAME_WORDS = 3
_PRINTS_LINES = re.compile(r"[\d$,;pq{} ]+|s(\W)(?:(?!\1).)*\1(?:(?!\1).)*\1[gIip\d]*", re.DOTALL)
"""Scripts of `sed` that print; others can write files."""
_AWK_WRITES = re.compile(r">|\||system|getline|close|printf?\s*\(?.*>")
_VALUED_BY_XARGS = frozenset({"-I", "-n", "-P", "-L", "-d", "-E", "-s", "-a"})


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    looks: dict[str, str]
    acts: dict[str, str]


class Consequence(NamedTuple):
    """What a command leaves behind."""

    only_looks: bool = False
    """It changes nothing."""
    acts: frozenset[str] = frozenset()
    """Kinds of consequences that a person asks for, such as `push`."""


_FACTS = msgspec.toml.decode(
    (resources.files("replay_pipeline.actions") / "shell_consequences.toml").read_bytes(),
    type=_Facts,
)


def consequence_of(words: Sequence[str]) -> Consequence:
    """Judge one simple command by its words, quoting resolved."""
    if words and words[0] == "xargs":
        return consequence_of(_run_by_xargs(words))
    name, facts = _looked_up(words, _FACTS.looks)
    rest = list(words[len(name) :])
    only_looks = facts is not None and not _has_one_of(rest, facts) and _prints(words[0], rest)
    name, facts = _looked_up(words, _FACTS.acts)
    if facts is None:
        return Consequence(only_looks)
    acts = frozenset(
        kind.strip()
        for kind, _, needed in (fact.partition(":") for fact in facts.split(";"))
        if kind.strip() and (not needed or _has_one_of(words[len(name) :], needed))
    )
    return Consequence(only_looks and not acts, acts)


def _looked_up(words: Sequence[str], facts: dict[str, str]) -> tuple[Sequence[str], str | None]:
    for n in range(min(_MAX_NAME_WORDS, len(words)), 0, -1):
        if (found := facts.get(" ".join(words[:n]))) is not None:
            return words[:n], found
    return (), None


def _has_one_of(words: Sequence[str], options: str) -> bool:
    """Whether one of the options is among the words, alone, with a value or in a cluster."""
    for option in options.split():
        is_short = len(option) == 2 and option[0] == "-" and option != "--"
        for word in words:
            if word == option or word.startswith(f"{option}="):
                return True
            if is_short and re.match(r"-[^-]", word) and option[1] in word:
                return True
    return False


def _prints(program: str, words: list[str]) -> bool:
    """Whether `sed`, `awk` and `uniq` write no file with these words; true of all other programs."""
    operands = [word for word in words if not word.startswith("-")]
    if program == "sed":
        return all(_PRINTS_LINES.fullmatch(script) for script in operands[:1])
    if program == "uniq":
        return len(operands) < 2
    return program != "awk" or not any(map(_AWK_WRITES.search, words))


def _run_by_xargs(words: Sequence[str]) -> Sequence[str]:
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _VALUED_BY_XARGS else 1
    return words[at:]
