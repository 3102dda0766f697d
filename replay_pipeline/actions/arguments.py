"""Read command-line arguments, and ignore differences in the order and spelling of options.

For programs in `shell_programs.toml`, options may be joined, split, respelled, and reordered, but
not across an option that they override. The words of an unlisted program or option count exactly as
written, in their order. Their meaning is unknown: a word may be a local path, a path in a
container, or a key of a store, and flags may override each other.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from replay_pipeline.actions.consequences import Consequence, consequence_of
from replay_pipeline.actions.programs import PROGRAMS, Program

ACTIVE = "\x01"
"""Marks an unquoted glob, brace, tilde, or expansion."""
QUOTED = "\x02"
"""Marks an expansion inside double quotes."""

_SPECIAL = re.compile(r"\\\n|\\(.)|(\{\})|([*?\[\]{}!])|\A(~)", re.DOTALL)
_NEEDS_WORK = re.compile(r"[\\*?\[\]{}!~]")


def unquoted(text: str) -> str:
    """Return a bare word with escapes resolved and active characters marked."""
    if not _NEEDS_WORK.search(text):
        return text
    return _SPECIAL.sub(_resolved, text)


def _resolved(match: re.Match[str]) -> str:
    # An empty pair of braces means nothing to the shell: `find -exec` takes it as a place.
    if (plain := match[1] or match[2]) is not None:
        return plain
    active = match[3] or match[4]
    return ACTIVE + active if active else ""


def plain_text(word: str) -> str | None:
    """Return a word that the shell doesn't expand, or None if the shell expands it."""
    return None if ACTIVE in word or QUOTED in word else word


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
    """Program, flags, and operands. Equal for equal meaning."""
    operands: tuple[object, ...]
    """Program, subcommand, and operands, without flags."""
    consequence: Consequence = Consequence()


class _Parsed(NamedTuple):
    flags: list[Flag]
    operands: list[str]


_NAMES_START = re.compile(r"-(?:i?path|i?wholename|i?regex|f?printf?0?|fls)")
"""Parts of a `find` expression that see how the starting point is spelled."""
_FIND_START_OPTIONS = frozenset({"-H", "-L", "-P"})
_FIND_CHANGES = frozenset({"-delete", "-exec", "-execdir", "-ok", "-okdir"})
_FIND = PROGRAMS["find"]


def arguments_of(words: Sequence[str], path: PathReader, depth: int = 0) -> Arguments:
    """Read the options of a command.

    Args:
        words: The words of the command, with quoting resolved and the marks `ACTIVE` and `QUOTED`.
        path: Resolves a word if it is a path.
        depth: How many commands wrap this one, as in `timeout 5 nice`.
    """
    consequence = consequence_of(words)
    if words[:2] == ["git", "-C"] and len(words) > 3:
        found = _of_git_in(words[2], ["git", *words[3:]], path, depth)
        return found._replace(consequence=consequence)
    if (found := _with_options_ahead(words, path, depth)) is not None:
        return found._replace(consequence=consequence)
    for n_words in (3, 2, 1):
        program = PROGRAMS.get(" ".join(words[:n_words]))
        if program is None:
            continue
        if program.alias:
            return arguments_of([*program.alias.split(), *words[n_words:]], path, depth)
        name, rest = tuple(words[:n_words]), words[n_words:]
        if program.options is not None and (parsed := _parsed(program, rest)):
            if program.operands == "command":
                return _of_command(program, name, parsed, path, depth)
            found = _understood(program, name, parsed, path, consequence)
        else:
            found = _strictly(program, name, rest, path)
        return found._replace(consequence=consequence)
    name = path(words[0]) if "/" in words[0] else words[0]
    return _strictly(None, (name,), words[1:], path)._replace(consequence=consequence)


def _with_options_ahead(words: Sequence[str], path: PathReader, depth: int) -> Arguments | None:
    """Read a command with options ahead of its subcommand, such as `kubectl -n shop get pods`."""
    n_words = 2 if words[:2] == ["docker", "compose"] else 1
    name, rest = list(words[:n_words]), words[n_words:]
    ahead = PROGRAMS.get(f"{' '.join(name)} ahead")
    if ahead is None or not rest or not rest[0].startswith("-"):
        return None
    parsed = _parsed(ahead, rest)
    if parsed is None or not parsed.operands or depth >= _MAX_DEPTH:
        return None
    flags, [subcommand, *more] = parsed
    if ahead.moves:
        moved = [f"--{flag[0]}={flag[1]}" for flag in flags]
        return arguments_of([*name, subcommand, *moved, *more], path, depth + 1)
    files = ahead.files.split()
    flags = [(f[0], path(f[1])) if f[0] in files else f for f in flags]
    ordered = _in_one_order(flags, ahead.groups)
    inner = arguments_of([*name, subcommand, *more], path, depth + 1)
    return inner._replace(
        effect=(*name, ordered, *inner.effect), operands=(*name, *ordered, *inner.operands)
    )


def _of_git_in(folder: str, words: list[str], path: PathReader, depth: int) -> Arguments:
    """Return what git does in a folder that is named for it, which may be where it is run anyway."""
    place = folder if ACTIVE in folder else path(folder)
    if place == path("."):
        return arguments_of(words, path, depth)
    inner = arguments_of(words, lambda word: word, depth)
    return inner._replace(
        effect=("git", "-C", place, *inner.effect), operands=(*inner.operands, "-C", place)
    )


def _parsed(program: Program, words: Sequence[str]) -> _Parsed | None:
    """Return separate flags from operands; `None` when one of the options is not known."""
    flags: list[Flag] = []
    operands: list[str] = []
    ends = program.ends or program.operands in ("script", "command")
    at = 0
    may_hide_flags = False
    places: list[int] = []
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" and program.odd_dashes:
            return None
        if word == "--" and program.spellings:
            operands += words[at - 1 if program.operands in ("git", "passed") else at :]
            break
        option = program.spellings.get(word)
        is_operand = option is not None and option.value == "[operand]"
        if word == "-" or not word.startswith("-") or is_operand:
            if ends:
                operands += words[at - 1 :]
                break
            operands.append(word)
            places.append(at)
            may_hide_flags |= _may_be_flags(word)
            continue
        if may_hide_flags:
            return None
        read = _single if program.single else _long if word.startswith("--") else _short
        taken = read(program, word, words[at] if at < len(words) else None, at, flags)
        if taken is None:
            return None
        at += taken
    return None if _is_odd(program, words, flags, places) else _Parsed(flags, operands)


def _is_odd(
    program: Program, words: Sequence[str], flags: Sequence[Flag], places: Sequence[int]
) -> bool:
    """Return whether options or operands (their `places`) stand as the program reads in a way of its own."""
    if program.number == "alone" and len(words) > 2 and re.match(r"-\d", words[0]):
        return True
    if (
        program.number == "ahead"
        and places
        and any(re.fullmatch(r"-\d\d+", word) for word in words[places[0] :])
    ):
        return True
    if program.odd_words and not set(program.odd_words.split()).isdisjoint(words):
        return True
    if program.once and len({flag[0] for flag in flags}) < len(flags):
        return True
    # An operand behind an option behind an operand is none of the program's own any more.
    is_parted = bool(places) and places[-1] - places[0] >= len(places)
    return program.single and is_parted


def _may_be_flags(word: str) -> bool:
    """Return whether the shell may turn the word into others, flags among them."""
    if word.startswith(ACTIVE):
        return not word.startswith(f"{ACTIVE}~")
    return f"{ACTIVE}$" in word or f"{ACTIVE}`" in word


def _short(
    program: Program, word: str, following: str | None, at: int, flags: list[Flag]
) -> int | None:
    """Read a cluster such as `-rn5`; how many further words it takes, `None` if it is not known."""
    if word[1:].isascii() and word[1:].isdigit() and program.number:
        if program.number in ("first", "alone") and at > 1:
            return None
        flags.append((program.spellings["-NUM"].id, word[1:]))
        return 0
    for place, letter in enumerate(word[1:], start=2):
        option = program.spellings.get(f"-{letter}")
        if option is None or option.value == "[operand]" or (program.apart and place > 2):
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
    if option is None or (has_value and option.value in ("", "[operand]", "[word]")):
        return None
    if has_value:
        flags.append((option.id, value))
    elif option.value not in _NEEDED:
        flags.append((option.id,))
    elif following is None:
        return None
    else:
        flags.append((option.id, following))
        return 1
    return 0


def _single(
    program: Program, word: str, following: str | None, at: int, flags: list[Flag]
) -> int | None:
    """Read an option with one dash or two, as Go's flag package does."""
    bare = word.removeprefix("-").removeprefix("-")
    return None if bare.startswith("-") else _long(program, f"--{bare}", following, at, flags)


def _understood(
    program: Program,
    name: tuple[str, ...],
    parsed: _Parsed,
    path: PathReader,
    consequence: Consequence,
) -> Arguments:
    flags, operands = parsed
    if program.operands == "pattern" and operands and program.objects:
        how = program.objects.split()
        if not any(flag[0] in how for flag in flags):
            # `sed SCRIPT` is `sed -e SCRIPT`, `grep PATTERN` is `grep -e PATTERN`.
            flags, operands = [*flags, (how[0], operands[0])], operands[1:]
    files = program.files.split()
    flags = [(f[0], path(f[1])) if len(f) > 1 and f[0] in files else f for f in flags]
    objects_of = program.objects.split()
    named = [flag for flag in flags if flag[0] in objects_of]
    ordered = _in_one_order(flags, program.groups)

    def read(word: str) -> str:
        return _object(program, word, path, only_looks=consequence.only_looks)

    objects = _objects(program, operands, read, has_pattern=bool(named))
    acted_on = objects
    if program.operands in ("script", "git", "passed") or (
        program.operands == "words" and program.ends
    ):
        acted_on = tuple(word for word in objects if word == "--" or not word.startswith("-"))
    return Arguments((*name, ordered, *objects), (*name, *named, *acted_on))


def _of_command(
    program: Program, name: tuple[str, ...], parsed: _Parsed, path: PathReader, depth: int
) -> Arguments:
    """Return the options of a program that runs another command, and that command's own."""
    own, rest = parsed.operands[: program.lead], parsed.operands[program.lead :]
    inner = Arguments(tuple(rest), tuple(rest))
    if rest and depth < _MAX_DEPTH:
        inner = arguments_of(rest, path, depth + 1)
    ordered = _in_one_order(parsed.flags, program.groups)
    shown = ["" if program.display and _TIME.fullmatch(word) else word for word in own]
    return inner._replace(
        effect=(*name, ordered, *shown, *inner.effect), operands=(*name, *inner.operands)
    )


def _in_one_order(flags: list[Flag], groups: Mapping[str, frozenset[str]]) -> tuple[Flag, ...]:
    """Return one order for all sequences of flags that mean the same.

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


def _object(program: Program, word: str, path: PathReader, *, only_looks: bool) -> str:
    """Return an operand that is a path, resolved."""
    # `-` is the standard input; a glob could match a name that reads as an option.
    if word == "-" or (word.startswith(ACTIVE) and not word.startswith(f"{ACTIVE}~")):
        return word
    file, colons, part = word.partition("::")
    return f"{path(file)}{_end_of(program, file, only_looks=only_looks)}{colons}{part}"


def _objects(
    program: Program, operands: list[str], read: PathReader, *, has_pattern: bool
) -> tuple[str, ...]:
    """Return the operands, those that are paths read as such."""
    kind = program.operands
    if kind in ("words", "passed"):
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


_TIME = re.compile(r"\d+(?:\.\d+)?[smhd]?")
_NAMED_FILE = re.compile(r"[^/]\.\w{1,5}/+\Z")
_ENDS_IN_DOTS = re.compile(r"(?:^|/)(\.\.?)/*\Z")


def _end_of(program: Program, word: str, *, only_looks: bool) -> str:
    """Return what the end of a path means beyond the path: a slash, or a folder named by dots.

    Behind a glob a slash leaves the files out, behind a file's name it is an error, and with some
    programs it crosses a link. Programs that change things tell `.` from the same folder's name.
    """
    dots = _ENDS_IN_DOTS.search(word)
    if dots and not only_looks and not program.folders:
        return f"/{dots[1]}"
    if not word.endswith("/") or not word.strip("/"):
        return ""
    is_plain = ACTIVE not in word and QUOTED not in word and not _NAMED_FILE.search(word)
    return "" if program.folders and is_plain else "/"


def _strictly(
    program: Program | None, name: tuple[str, ...], words: Sequence[str], path: PathReader
) -> Arguments:
    """Return the words of a command in their order."""
    spelled = list(words)
    if program is not None and program.operands == "find" and not _FIND_CHANGES.intersection(words):
        spelled = _from_start(words, path)
    operands = [word for word in spelled if not word.startswith("-") or word == "-"]
    return Arguments((*name, *spelled), (*name, *operands))


def _from_start(words: Sequence[str], path: PathReader) -> list[str]:
    """Return the words of `find`: the starting points resolved where nothing sees their spelling."""
    if any(_NAMES_START.match(word) for word in words):
        return list(words)
    n = 0
    while n < len(words) and (words[n] in _FIND_START_OPTIONS or words[n][:1] not in "-(!,\\"):
        n += 1
    starts = [
        w if w.startswith("-") else path(w) + _end_of(_FIND, w, only_looks=True) for w in words[:n]
    ]
    return starts + list(words[n:])
