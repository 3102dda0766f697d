"""Commands that might mean the same: one program's options and operands, spelled in many ways."""

import random
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from replay_pipeline.actions.programs import PROGRAMS, Option, Program
from replay_pipeline.actions.shell import shell_plan
from tests.twins.samples import SAMPLES, VALUES, Sample
from tests.twins.sandbox import ENVIRONMENT

N_SPELLINGS = 8
N_MAX_OPTIONS = 4


class Command(NamedTuple):
    """One way to write a command."""

    text: str
    is_respelt: bool = False
    """A path in it is spelled another way, which may show in what the command prints."""


class Use(NamedTuple):
    """An option with a value, before it is spelled."""

    option: Option
    spellings: tuple[str, ...]
    value: str | None


def tables() -> dict[str, tuple[str, ...]]:
    """The tables of the data file: title and names of programs."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, program in PROGRAMS.items():
        found[id(program)].append(name)
    return {", ".join(names): tuple(names) for names in found.values()}


def installed(names: tuple[str, ...], sample: Sample) -> list[str]:
    """Those of `names` that this machine has; whole commands of a sample go by their first word."""
    if sample.commands:
        names = (sample.commands[0].split()[0],)
    path = ENVIRONMENT["PATH"]
    first = {name: name.split()[0] for name in names}
    return [n for n in names if first[n] in _BUILTINS or shutil.which(first[n], path=path)]


_BUILTINS = frozenset({"source", ".", "time"})


def groups_of_twins(
    draw: random.Random, title: str, cwd: str, n_bases: int
) -> Iterator[list[Command]]:
    """Commands of one program that the matcher calls the same at `effect`, two or more a group."""
    sample = SAMPLES.get(title, Sample())
    program = PROGRAMS[title.split(", ")[0]]
    names = installed(tables()[title], sample)
    merged: dict[object, dict[str, Command]] = defaultdict(dict)
    for _ in range(n_bases):
        is_listed = program.options is not None and not sample.commands
        for command in (
            _spelled_ways(draw, draw.choice(names), program, sample, cwd)
            if is_listed
            else _shuffled_ways(draw, draw.choice(sample.commands), cwd)
        ):
            # The matcher as users meet it, but for its memory.
            plan = shell_plan.__wrapped__(command.text, cwd)
            merged[plan.effect].setdefault(command.text, command)
    for group in merged.values():
        if len(group) > 1:
            yield list(group.values())


def _spelled_ways(
    draw: random.Random, name: str, program: Program, sample: Sample, cwd: str
) -> Iterator[Command]:
    uses = _some_uses(draw, program, sample)
    operands = list(draw.choice(sample.operands))
    for _ in range(N_SPELLINGS):
        shuffled = list(uses)
        if draw.random() < 0.75:
            draw.shuffle(shuffled)
        respelt = [_respelt(draw, word, cwd) for word in operands]
        is_respelt = draw.random() < 0.2
        words = _placed(draw, program, shuffled, respelt if is_respelt else operands)
        text = " ".join([name, *sample.always, *(_quoted(draw, word) for word in words)])
        yield Command(text, is_respelt)


def _some_uses(draw: random.Random, program: Program, sample: Sample) -> list[Use]:
    """A few options, often of those that act on each other, sometimes one twice."""
    by_option: dict[Option, list[str]] = defaultdict(list)
    for spelling, option in program.spellings.items():
        if option.id not in sample.without:
            by_option[option].append(spelling)
    options = list(by_option)
    if not options:
        return []
    chosen = draw.choices(options, k=draw.randint(1, N_MAX_OPTIONS))
    if program.override and draw.random() < 0.5:
        group = draw.choice(program.override).split()
        rivals = [option for option in options if option.id in group]
        chosen += draw.choices(rivals, k=2) if rivals else []
    if draw.random() < 0.1:
        chosen.append(chosen[0])
    return [
        Use(option, tuple(by_option[option]), _some_value(draw, option, sample))
        for option in chosen[: N_MAX_OPTIONS + 1]
    ]


def _some_value(draw: random.Random, option: Option, sample: Sample) -> str | None:
    values = sample.values.get(option.id)
    if not option.value or (option.value != "=" and (not values or draw.random() < 0.4)):
        return None
    return draw.choice(values or VALUES)


def _placed(
    draw: random.Random, program: Program, uses: list[Use], operands: list[str]
) -> list[str]:
    """Spell the options, some in one cluster, and put them before, behind or among the operands."""
    flags: list[list[str]] = []
    cluster = ""
    for use in uses:
        spelling = draw.choice(use.spellings)
        if spelling == "-NUM":
            flags.append([f"-{use.value}"])
            continue
        if spelling.startswith("--"):
            if use.value is None:
                flags.append([spelling])
            elif use.option.value == "=" and draw.random() < 0.5:
                flags.append([spelling, use.value])
            else:
                flags.append([f"{spelling}={use.value}"])
        elif use.value is not None:
            is_joined = use.option.value != "=" or draw.random() < 0.5
            joined = f"{spelling}{use.value}" if is_joined and use.value else spelling
            flags.append([joined] if joined != spelling else [spelling, use.value])
        elif cluster and draw.random() < 0.6:
            flags[-1] = [flags[-1][0] + spelling[1:]] if flags[-1] == [cluster] else flags[-1]
            if flags[-1] != [cluster + spelling[1:]]:
                flags.append([spelling])
        else:
            flags.append([spelling])
        cluster = flags[-1][0] if _is_cluster(use, flags[-1]) else ""
    cut = draw.randint(0, len(flags)) if draw.random() < 0.3 else len(flags)
    before, behind = [*chain(*flags[:cut])], [*chain(*flags[cut:])]
    if draw.random() < 0.15:
        return [*before, *behind, "--", *operands]
    place = draw.randint(0, len(operands)) if draw.random() < 0.3 else len(operands)
    return [*before, *operands[:place], *behind, *operands[place:]]


def _is_cluster(use: Use, words: list[str]) -> bool:
    return use.value is None and not use.option.value and not words[0].startswith("--")


def _shuffled_ways(draw: random.Random, template: str, cwd: str) -> Iterator[Command]:
    words = shlex.split(template)
    for _ in range(N_SPELLINGS):
        shuffled = words[1:]
        if draw.random() < 0.5 and len(shuffled) > 1:
            # Two neighbours change places: with more, hardly two commands would be merged.
            at = draw.randrange(len(shuffled) - 1)
            shuffled[at : at + 2] = shuffled[at + 1], shuffled[at]
        is_respelt = draw.random() < 0.4
        if is_respelt:
            shuffled = [_respelt(draw, word, cwd) for word in shuffled]
        yield Command(" ".join([words[0], *(_quoted(draw, w) for w in shuffled)]), is_respelt)


def _respelt(draw: random.Random, word: str, cwd: str) -> str:
    """Another way to say the same path: only of a word that names something in the folder."""
    if word not in _NAMES:
        return word
    ways = [f"./{word}", f"{cwd}/{word}", f"aside/../{word}", f".//{word}", word]
    return draw.choice([*ways, f"{word}/"] if word in ("d", "e2", "empty") else ways)


_NAMES = frozenset(
    word.removeprefix("./")
    for sample in [Sample(), *SAMPLES.values()]
    for words in (*sample.operands, *map(str.split, sample.commands))
    for word in words
    if word.startswith("./") or word in ("d", "e2", "empty", "d/sub", "link") or "." in word[1:]
) - {"s/a.p", "a.p", "1.2", "."}


def _quoted(draw: random.Random, word: str) -> str:
    quoted = shlex.quote(word)
    if quoted == word and draw.random() < 0.05:
        return draw.choice([f"'{word}'", f'"{word}"'])
    return quoted
