"""The facts about each shell program: its options, and which of them affect each other.

The facts are in `shell_programs.toml`, whose head explains every key. `arguments.py` uses them.
"""

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Literal, NamedTuple

import msgspec


class Option(NamedTuple):
    """One option of a program."""

    id: str
    """The same id for all spellings of the option."""
    value: str
    """How it takes a value: `=`, `[=]`, … as in the data file. Empty if it takes none."""


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of a program in the data file."""

    options: str | None = None
    override: list[str] = []
    files: str = ""
    alias: str = ""
    objects: str = ""
    operands: Literal["paths", "words", "pattern", "git", "passed", "find", "script", "command"] = (
        "paths"
    )
    lead: int = 0
    number: Literal["anywhere", "ahead", "first", "alone"] | None = None
    ordered: bool = False
    ends: bool = False
    apart: bool = False
    once: bool = False
    folders: bool = False
    odd_dashes: bool = False
    odd_words: str = ""
    searches_path: bool = False
    display: bool = False
    is_interpreter: bool = False
    single: bool = False
    moves: bool = False
    spellings: dict[str, Option] = {}
    """Each spelling of each option, derived from `options`."""
    groups: dict[str, frozenset[str]] = {}
    """The options that each option affects, itself included, derived from `override`."""


_OPTION = re.compile(
    r"(-[^\s,=\[]+(?:,-[^\s,=\[]+)*)(=|\[(?:(?:long)?=|[+#]|(?:long)?word|operand)\])?"
)
_SPELLING = re.compile(r"-[^-]|--[\w-]+|-NUM")


_SHORT_KIND = {"[long=]": "", "[longword]": "="}
"""How short spellings take a value whose kind is said of the long ones."""


def programs_from(text: str) -> Mapping[str, Program]:
    """Read the data file, and return the facts about each program by name.

    Args:
        text: The file, in TOML.

    Raises:
        ValueError: It has an unknown key, a misspelt option, or something listed twice.
    """
    found: dict[str, Program] = {}
    for names, table in tomllib.loads(text).items():
        try:
            program = _completed(msgspec.convert(table, Program))
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f"[{names}]: {error}") from error
        for name in names.split(", "):
            if name in found:
                raise ValueError(f"[{name}] is listed twice")
            found[name] = program
    return found


def _completed(program: Program) -> Program:
    spellings: dict[str, Option] = {}
    for word in (program.options or "").split():
        match = _OPTION.fullmatch(word)
        names = match[1].split(",") if match else []
        if match is None or not all(map(_SPELLING.fullmatch, names)):
            raise ValueError(f"{word} is misspelt")
        if not spellings.keys().isdisjoint(names):
            raise ValueError(f"{word} is listed twice")
        kind = (match[2] or "").replace("long", "")
        for name in names:
            short = _SHORT_KIND.get(match[2] or "", kind)
            value = kind if name.startswith("--") else short
            spellings[name] = Option(names[-1].lstrip("-"), value)
    overriding = [group.split() for group in program.override]
    ids = {option.id for option in spellings.values()}
    if program.options is None:
        ids.update(*overriding)
    # An option and its negation act on each other: they share the group that bears their name.
    groups = {i: {i.removeprefix("no-")} for i in sorted(ids)}
    for number, group in enumerate(overriding):
        for i in group:
            if i not in groups:
                raise ValueError(f"{i} is listed as overriding others, but not under options")
            for one in {i, f"no-{i}", i.removeprefix("no-")} & groups.keys():
                groups[one].add(f"{number}")
    if missing := {*program.objects.split(), *program.files.split()} - ids:
        raise ValueError(
            f"{', '.join(missing)} is listed under objects or files, but not under options"
        )
    if (program.number is None) == ("-NUM" in spellings):
        raise ValueError("`number` needs the option -NUM, and -NUM needs `number`")
    return msgspec.structs.replace(
        program,
        spellings=spellings,
        groups={i: frozenset(names) for i, names in groups.items()},
    )


PROGRAMS = programs_from(
    (resources.files("replay_pipeline.actions") / "shell_programs.toml").read_text("utf-8")
)
"""The facts about each program, by name. A subcommand has a name of two words."""
