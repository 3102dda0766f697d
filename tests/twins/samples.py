"""What each program is given to work on, from `samples.toml`."""

import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPERANDS = (
    ("a.txt",),
    ("b.txt",),
    ("a.txt", "b.txt"),
    ("d/x.txt",),
    ("long.txt", "numbers.txt"),
    ("with space.txt", "a.txt"),
    ("missing.txt", "a.txt"),
    ("-",),
    (),
)
VALUES = ("1", "2", "3", "10")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one program is given."""

    operands: tuple[tuple[str, ...], ...] = OPERANDS
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By option id."""
    stdin: str = "apple 3\nfig 2\n\napple 3\nBanana\n"
    kind: str = "plain"
    always: tuple[str, ...] = ()
    """Words right behind the program's name in every command."""
    without: dict[str, str] = field(default_factory=dict)
    """Options that are left out, and why."""
    echoes: str = "$^"
    """Pattern of lines that repeat the command as it was spelled, or tell the time it took."""
    commands: tuple[str, ...] = ()
    """Whole commands, whose words change places, for a program that has no table of options."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _sample(told: dict[str, Any]) -> Sample:
    if "operands" in told:
        told["operands"] = tuple(map(_words, told["operands"]))
    if "values" in told:
        told["values"] = {name: _words(values) for name, values in told["values"].items()}
    told["always"] = _words(told.get("always", ""))
    told["commands"] = tuple(told.get("commands", ()))
    return Sample(**told)


_TOLD = tomllib.loads((Path(__file__).parent / "samples.toml").read_text("utf-8"))
NOT_RUN: dict[str, str] = _TOLD["not_run"]
"""Tables of the data file that are not executed, and why."""
SAMPLES = {name: _sample(told) for name, told in _TOLD["samples"].items()}
