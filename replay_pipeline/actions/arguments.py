"""Command-line arguments: which order and spelling of a program's options means nothing.

For the programs of `shell_programs.toml` options may be joined, split, respelt and reordered, but
not across one that they override. A program or option that is not listed is read strictly: its
words keep their order, except long flags of an unlisted program that stand side by side.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from replay_pipeline.actions.programs import PROGRAMS, Program
from replay_pipeline.actions.shell_words import ACTIVE, QUOTED

PathReader = Callable[[str], str]
Flag = tuple[str, ...]
"""The id of an option, and its value if it has one."""

_MAX_SORTED = 64
"""More flags than these keep their order: sorting them is not linear."""
_MAX_DEPTH = 8
"""Of commands that run commands; a deeper one is compared as it is written."""


class Arguments(NamedTuple):
    """The words of one command after reading its options."""

    effect: tuple[object, ...]
    """Program, flags and operands: equal for equal meaning."""
    operands: tuple[object, ...]
    """Program, subcommand and operands without flags."""


class _Parsed(NamedTuple):
    flags: list[Flag]
    operands: list[str]


_PATH_LIKE = re.compile(r"(?:~|\.{0,2})/[\w./@+-]*|\.{1,2}")
_FILE_LIKE = re.compile(r"[\w.@+-]+/[\w./@+-]*\.[A-Za-z]\w{0,5}")
_LONG_FLAG = re.compile(r"--[A-Za-z][\w-]*(?:=.*)?", re.DOTALL)
_NAMES_START = re.compile(r"-(?:i?path|i?wholename|i?regex|f?printf?0?|fls)")
"""Parts of a `find` expression that see how the starting point is spelled."""
_FIND_START_OPTIONS = frozenset({"-H", "-L", "-P"})
_UNLISTED = PROGRAMS["unlisted"]


def arguments_of(words: Sequence[str], path: PathReader, depth: int = 0) -> Arguments:
    """Read the options of a command.

    Args:
        words: The words of the command, quoting resolved, marks of `shell_words` in place.
        path: Resolves a word that is a path.
        depth: How many commands run this one, as `timeout 5 nice` does.
    """
    for n_words in (2, 1):
        program = PROGRAMS.get(" ".join(words[:n_words]))
        if program is None:
            continue
        name, rest = tuple(words[:n_words]), words[n_words:]
        if program.options is not None and (parsed := _parsed(program, rest)):
            if program.operands == "command":
                return _of_command(program, name, parsed, path, depth)
            return _understood(program, name, parsed, path)
        return _strictly(program, name, rest, path)
    name = path(words[0]) if "/" in words[0] else words[0]
    return _strictly(_UNLISTED, (name,), words[1:], path)


def _parsed(program: Program, words: Sequence[str]) -> _Parsed | None:
    """Tell flags from operands; `None` when one of the options is not known."""
    flags: list[Flag] = []
    operands: list[str] = []
    ends = program.ends or program.operands in ("script", "command")
    at = 0
    may_hide_flags = False
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" and program.spellings:
            operands += words[at - 1 if program.operands == "git" else at :]
            break
        option = program.spellings.get(word)
        is_operand = option is not None and option.value == "[operand]"
        if word == "-" or not word.startswith("-") or is_operand:
            if ends:
                operands += words[at - 1 :]
                break
            operands.append(word)
            may_hide_flags |= _may_be_flags(word)
            continue
        if may_hide_flags:
            return None
        read = _long if word.startswith("--") else _short
        taken = read(program, word, words[at] if at < len(words) else None, at, flags)
        if taken is None:
            return None
        at += taken
    if program.number == "alone" and len(words) > 2 and re.match(r"-\d", words[0]):
        return None
    if program.once and len({flag[0] for flag in flags}) < len(flags):
        return None
    return _Parsed(flags, operands)


def _may_be_flags(word: str) -> bool:
    """Whether the shell may turn the word into others, flags among them."""
    if word.startswith(ACTIVE):
        return not word.startswith(f"{ACTIVE}~")
    return f"{ACTIVE}$" in word or f"{ACTIVE}`" in word


def _short(
    program: Program, word: str, following: str | None, at: int, flags: list[Flag]
) -> int | None:
    """Read a cluster such as `-rn5`; how many further words it takes, `None` if it is not known."""
    if word[1:].isascii() and word[1:].isdigit() and program.number:
        if program.number != "anywhere" and at > 1:
            return None
        flags.append((program.spellings["-NUM"].id, word[1:]))
        return 0
    for place, letter in enumerate(word[1:], start=2):
        option = program.spellings.get(f"-{letter}")
        if option is None or (program.apart and place > 2):
            return None
        if not option.value:
            flags.append((option.id,))
            continue
        if value := word[place:]:
            flags.append((option.id, value))
            return None if option.value == "[word]" else 0
        if following is not None and _is_value(option.value, following):
            flags.append((option.id, following))
            return 1
        flags.append((option.id,))
        return None if option.value in _NEEDED else 0
    return 0


_NEEDED = frozenset({"=", "[word]"})
"""Kinds of options that are nothing without a value."""


def _is_value(kind: str, word: str) -> bool:
    if kind in _NEEDED:
        return True
    return word.isdigit() if kind == "[#]" else kind == "[+]" and not word.startswith("-")


def _long(
    program: Program, word: str, following: str | None, _at: int, flags: list[Flag]
) -> int | None:
    """Read `--name`, `--name=value` or `--name value`, as `_short` does."""
    name, has_value, value = word.partition("=")
    option = program.spellings.get(name)
    if option is None or (has_value and option.value in ("", "[operand]")):
        return None
    if has_value:
        flags.append((option.id, value))
    elif option.value != "=":
        flags.append((option.id,))
    elif following is None:
        return None
    else:
        flags.append((option.id, following))
        return 1
    return 0


def _understood(
    program: Program, name: tuple[str, ...], parsed: _Parsed, path: PathReader
) -> Arguments:
    flags, operands = parsed
    objects_of = program.objects.split()
    named = [flag for flag in flags if flag[0] in objects_of]
    ordered = _in_one_order(flags, program.groups)
    objects = _objects(program, operands, path, has_pattern=bool(named))
    acted_on = objects
    if program.operands in ("script", "git"):
        acted_on = tuple(word for word in objects if word == "--" or not word.startswith("-"))
    return Arguments((*name, ordered, *objects), (*name, *named, *acted_on))


def _of_command(
    program: Program, name: tuple[str, ...], parsed: _Parsed, path: PathReader, depth: int
) -> Arguments:
    """Give the options of a program that runs another command, and that command's own."""
    own, rest = parsed.operands[: program.lead], parsed.operands[program.lead :]
    inner = Arguments(tuple(rest), tuple(rest))
    if rest and depth < _MAX_DEPTH:
        inner = arguments_of(rest, path, depth + 1)
    ordered = _in_one_order(parsed.flags, program.groups)
    return Arguments((*name, ordered, *own, *inner.effect), (*name, *inner.operands))


def _in_one_order(flags: list[Flag], groups: Mapping[str, frozenset[str]]) -> tuple[Flag, ...]:
    """One order for all sequences of flags that mean the same.

    Flags that share a group keep their order, all others may change places. Taking the smallest
    flag that nothing before it acts on gives one and the same sequence for all of these.
    """
    if len(flags) < 2 or len(flags) > _MAX_SORTED:
        return tuple(flags)
    waiting = [(flag, groups.get(flag[0]) or frozenset(flag[:1])) for flag in flags]
    if len(frozenset().union(*(own for _, own in waiting))) == sum(len(o) for _, o in waiting):
        return tuple(sorted(flags))
    found: list[Flag] = []
    while waiting:
        seen: set[str] = set()
        first = 0
        for place, (flag, own) in enumerate(waiting):
            if flag < waiting[first][0] and seen.isdisjoint(own):
                first = place
            seen |= own
        found.append(waiting.pop(first)[0])
    return tuple(found)


def _objects(
    program: Program, operands: list[str], path: PathReader, *, has_pattern: bool
) -> tuple[str, ...]:
    """Give the operands, those that are paths resolved."""

    def read(word: str) -> str:
        # `-` is the standard input; a glob could match a name that reads as an option.
        if word == "-" or (word.startswith(ACTIVE) and not word.startswith(f"{ACTIVE}~")):
            return word
        file, colons, part = word.partition("::")
        resolved = path(file)
        is_folder = program.keeps_slash and file.endswith("/") and not resolved.endswith("/")
        return f"{resolved}{'/' if is_folder else ''}{colons}{part}"

    kind = program.operands
    if kind == "words":
        cut = len(operands)
    elif kind == "git":
        cut = operands.index("--") + 1 if "--" in operands else len(operands)
    elif kind == "pattern":
        cut = 0 if has_pattern else 1
    elif kind == "script":
        is_searched = program.searches_path and "/" not in (operands or ("",))[0]
        return (*(operands[:1] if is_searched else map(read, operands[:1])), *operands[1:])
    else:
        cut = 0
    return (*operands[:cut], *map(read, operands[cut:]))


def _strictly(
    program: Program, name: tuple[str, ...], words: Sequence[str], path: PathReader
) -> Arguments:
    """Give the words of a command in their order."""
    spelled = list(words)
    if program.operands == "find":
        spelled = _from_start(words, path)
    elif program.operands == "paths" and program.options is None:
        end = words.index("--") if "--" in words else len(words)
        spelled = [
            word if word.startswith("-") and n < end else _spelled_path(word, path)
            for n, word in enumerate(words)
        ]
    operands = [word for word in spelled if not word.startswith("-") or word == "-"]
    if program.options is None and not program.ordered:
        spelled = _with_flags_sorted(spelled)
    return Arguments((*name, *spelled), (*name, *operands))


def _from_start(words: Sequence[str], path: PathReader) -> list[str]:
    """Give the words of `find`: the starting points resolved where nothing sees their spelling."""
    if any(_NAMES_START.match(word) for word in words):
        return list(words)
    n = 0
    while n < len(words) and (words[n] in _FIND_START_OPTIONS or words[n][:1] not in "-(!,\\"):
        n += 1
    return [w if w.startswith("-") else path(w) for w in words[:n]] + list(words[n:])


def _with_flags_sorted(words: list[str]) -> list[str]:
    """Long flags side by side in one order, but for the last before what may be its value."""
    found: list[str] = []
    run: list[Flag] = []
    is_open = True
    for number, word in enumerate(words):
        is_open = is_open and word != "--"
        following = words[number + 1] if number + 1 < len(words) else "-"
        is_alone = "=" in word or following.startswith("-")
        if is_open and is_alone and _LONG_FLAG.fullmatch(word) and ACTIVE not in word:
            name, has_value, value = word.partition("=")
            run.append((name.removeprefix("--").removeprefix("no-"), name, has_value + value))
            continue
        found += [flag[1] + flag[2] for flag in _in_one_order(run, _UNLISTED.groups)]
        run = []
        found.append(word)
    return found + [flag[1] + flag[2] for flag in _in_one_order(run, _UNLISTED.groups)]


def _spelled_path(word: str, path: PathReader) -> str:
    """Give a word that can only be a path, resolved; any other word as it is."""
    if QUOTED in word or "//" in word:
        return word
    if not _PATH_LIKE.fullmatch(word.replace(ACTIVE + "~", "~")) and not _FILE_LIKE.fullmatch(word):
        return word
    inner = word.lstrip("./").split("/")
    if "." in inner or ".." in inner:
        return word
    return path(word) + ("/" if word.endswith("/") and len(word) > 1 else "")
