"""The consequences of a command: none, a change, or something that a person should decide.

The facts are in `shell_consequences.toml`. In doubt, a command counts as changing something, and as
having no consequence that a person must ask for.
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


_WRAPPERS = frozenset({"command", "exec", "env", "builtin", "setsid"})
"""Programs that run another one as it is; `sudo`, `timeout` and the like are read elsewhere."""
_GIT_VALUED = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace"})
"""Options of `git` itself, before what it is to do, that take the next word."""
_BIN = re.compile(r"/(?:usr/)?(?:local/)?s?bin/(?=[\w.-]+$)")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_A_FILE = re.compile(r"\.$|.*\.[A-Za-z]\w{0,5}$|.*/$")
"""What `git checkout` takes for a file rather than a branch."""
_LOCAL = re.compile(
    r"(?:https?://)?(?:localhost|127\.|0\.0\.0\.0|\[::1?\]|[^/.:]+(?::\d+)?(?:/|$))"
)
_SENDS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    looks: dict[str, str]
    keeps: dict[str, str]
    acts: dict[str, str]


class Consequence(NamedTuple):
    """The effect of a command: whether it changes anything, and how."""

    only_looks: bool = False
    """Whether it changes nothing."""
    acts: frozenset[str] = frozenset()
    """Kinds of consequences that a person must ask for, such as `push`."""
    keeps_files: bool = False
    """Whether it leaves source files alone: it looks, builds, tests, or commits."""


_FACTS = msgspec.toml.decode(
    (resources.files("replay_pipeline.actions") / "shell_consequences.toml").read_bytes(),
    type=_Facts,
)


def consequence_of(words: Sequence[str]) -> Consequence:
    """Return the consequence of one simple command, given its words with quoting resolved."""
    words = _unwrapped(words)
    if words and words[0] == "xargs":
        return consequence_of(_run_by_xargs(words))
    name, facts = _looked_up(words, _FACTS.looks)
    rest = list(words[len(name) :])
    only_looks = facts is not None and not _has_one_of(rest, facts) and _prints(words[0], rest)
    name, facts = _looked_up(words, _FACTS.keeps)
    keeps = facts is not None and not _has_one_of(words[len(name) :], facts)
    acts = _listed_acts(words) | _other_acts(words)
    return Consequence(only_looks and not acts, acts, keeps or (only_looks and not acts))


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """Return the words of the program that is run in the end, without options of `git` itself."""
    at = 0
    if list(words[:2]) == ["command", "-v"]:
        return words
    while at < len(words) and (words[at] in _WRAPPERS or _ASSIGNED.match(words[at])):
        at += 1
        while 0 < at < len(words) - 1 and words[at].startswith("-"):
            at += 1
    words = words[at:] or words
    if words:
        words = [_BIN.sub("", words[0]), *words[1:]]
    if words[:1] != ["git"]:
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _GIT_VALUED else 1
    return ["git", *words[at:]]


def _listed_acts(words: Sequence[str]) -> frozenset[str]:
    name, facts = _looked_up(words, _FACTS.acts)
    return frozenset(
        kind.strip()
        for kind, _, needed in (fact.partition(":") for fact in (facts or "").split(";"))
        if kind.strip() and (not needed or _has_one_of(words[len(name) :], needed))
    )


def _other_acts(words: Sequence[str]) -> frozenset[str]:
    """Return the consequences that no list of options tells."""
    operands = [word for word in words if not word.startswith("-")]
    match operands[:2]:
        case ["find", *_]:
            for at, word in enumerate(words):
                if word in ("-exec", "-execdir", "-ok", "-okdir"):
                    return consequence_of(words[at + 1 :]).acts
        case ["git", "push"] if any(word[:1] in ("+", ":") for word in operands[2:]):
            return frozenset({"force"})
        case ["git", "checkout"] if any(map(_A_FILE.match, operands[2:])):
            return frozenset({"discard"})
        case ["gh", "api"]:
            sends = _sent(words, implied=_has_one_of(words, "-f --raw-field -F --field --input"))
            if "graphql" in operands:
                sends = "POST" if any("mutation" in word for word in words) else None
            return frozenset({"delete" if sends == "DELETE" else "publish"} if sends else ())
        case ["curl", *_]:
            data = "-d --data --data-raw --data-binary --json -F --form -T --upload-file"
            sends = _sent(words, implied=_has_one_of(words, data))
            far = [word for word in operands[1:] if "/" in word and not _LOCAL.match(word)]
            return frozenset({"publish"} if sends and far else ())
    return frozenset()


def _sent(words: Sequence[str], *, implied: bool) -> str | None:
    """Return the method of a request that changes something; `None` of one that only asks."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("-X", "--method", "--request"):
            method = (value or "".join(words[at + 1 : at + 2])).upper()
            return method if method in _SENDS else None
        if word.startswith("-X") and word[2:].upper() in _SENDS:
            return word[2:].upper()
    return "POST" if implied else None


def _looked_up(words: Sequence[str], facts: dict[str, str]) -> tuple[Sequence[str], str | None]:
    for n in range(min(_MAX_NAME_WORDS, len(words)), 0, -1):
        if (found := facts.get(" ".join(words[:n]))) is not None:
            return words[:n], found
    return (), None


def _has_one_of(words: Sequence[str], options: str) -> bool:
    """Return whether one of the options is among the words, alone, with a value or in a cluster."""
    for option in options.split():
        is_short = len(option) == 2 and option[0] == "-" and option != "--"
        for word in words:
            if word == option or word.startswith(f"{option}="):
                return True
            if is_short and re.match(r"-[^-]", word) and option[1] in word:
                return True
    return False


def _prints(program: str, words: list[str]) -> bool:
    """Return whether `sed`, `awk` and `uniq` write no file with these words; true of all other programs."""
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
