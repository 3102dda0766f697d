"""Command-line options: which order and spelling of a program's arguments means nothing.

For the programs listed here every option is known, so flags may be joined, split and reordered.
A program or option that is not listed is read strictly: only flags that stand side by side may
change places, and not the last one before an operand, whose value that may be.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from replay_pipeline.actions.words import ACTIVE, QUOTED

PathReader = Callable[[str], str]
Flag = tuple[str, ...]


class Arguments(NamedTuple):
    """The words of one command after reading its options."""

    effect: tuple[object, ...]
    """Program, flags and operands: equal for equal meaning."""
    operands: tuple[object, ...]
    """Program, subcommand and operands without flags."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The options of one program (or of one subcommand)."""

    flags: str = ""
    """Short options without a value."""
    values: str = ""
    """Short options with a value."""
    objects: str = ""
    """Those of `values` whose value names what is acted on."""
    long: frozenset[str] = frozenset()
    """Long options without a value, or with one behind `=` only."""
    long_values: frozenset[str] = frozenset()
    """Long options with a value, behind `=` or a blank."""
    groups: tuple[str, ...] = ()
    """Short options that override each other: the last one wins, so their order stays."""
    operands: Literal["paths", "words", "pattern", "git"] = "paths"
    """What stands behind the options: paths; words; a pattern and paths; words, `--`, paths."""
    keeps_slash: bool = False
    """Whether a trailing slash of a path means something."""
    has_numbers: bool = False
    """Whether `-5` is an option."""


def _program(
    flags: str = "",
    values: str = "",
    long: str = "",
    long_values: str = "",
    **more: object,
) -> Program:
    return Program(
        flags=flags,
        values=values,
        long=frozenset(long.split()),
        long_values=frozenset(long_values.split()),
        **more,  # type: ignore[arg-type]
    )


_GREP = _program(
    "EFGPivwxclLqsohHnbruzIRaUZT",
    "efmABCdD",
    "color colour extended-regexp fixed-strings perl-regexp ignore-case invert-match word-regexp "
    "line-regexp count files-with-matches files-without-match quiet silent no-messages "
    "only-matching no-filename with-filename line-number recursive dereference-recursive text",
    "include exclude exclude-dir regexp file max-count after-context before-context context",
    objects="ef",
    groups=("EFGP", "hH", "lLcq", "rR", "ABC"),
    operands="pattern",
    has_numbers=True,
)
_RG = _program(
    "inlcwvFoUPLSsNHIxqp0zhu",
    "efgtTABCmMjrdE",
    "ignore-case line-number files-with-matches count word-regexp invert-match fixed-strings "
    "only-matching multiline hidden no-ignore no-heading files json stats multiline-dotall "
    "smart-case case-sensitive no-line-number no-filename with-filename",
    "regexp file glob iglob type type-not after-context before-context context max-count "
    "max-columns threads replace max-depth sort color",
    objects="ef",
    groups=("iSs", "nN", "HI", "ABC", "lc"),
    operands="pattern",
)
_PYTEST = _program(
    "vqxslh",
    "kmnpcoWr",
    "verbose quiet exitfirst lf last-failed ff failed-first nf new-first sw stepwise collect-only "
    "co no-header no-summary showlocals strict-markers strict-config full-trace pdb setup-show "
    "no-cov disable-warnings disable-pytest-warnings cache-clear trace",
    "tb maxfail durations ignore deselect rootdir cov cov-report timeout junitxml junit-xml "
    "capture import-mode color basetemp confcutdir log-cli-level override-ini numprocesses dist "
    "randomly-seed hypothesis-seed",
    objects="km",
    groups=("vq",),
)

PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "ls": _program(
            "aAbBcCdfFgGhHiklLmnNopqQrRsStuUvxX1",
            "IwT",
            "all almost-all human-readable recursive reverse directory size color "
            "group-directories-first classify",
            "ignore hide",
            groups=("aAf", "l1Cmxgno", "tSUvXcu", "hk", "HL", "bNqQ"),
        ),
        "cat": _program(
            "AbeEnstTuv", "", "show-all number number-nonblank squeeze-blank", groups=("bn",)
        ),
        "head": _program(
            "qvz",
            "nc",
            "quiet silent verbose",
            "lines bytes",
            groups=("qv", "nc"),
            has_numbers=True,
        ),
        "tail": _program(
            "qvzfFr",
            "ncs",
            "quiet silent verbose follow retry",
            "lines bytes pid sleep-interval",
            groups=("qv", "nc", "fF"),
            has_numbers=True,
        ),
        "wc": _program("clLmw", "", "bytes chars lines words max-line-length"),
        "sort": _program(
            "bcCdfgiMhnRrVmsuz",
            "kotTS",
            "reverse unique numeric-sort human-numeric-sort version-sort stable ignore-case",
            "key field-separator output",
            objects="o",
            groups=("gMhnRV",),
        ),
        "uniq": _program("cdDiuz", "fsw", "count repeated unique ignore-case"),
        "cut": _program("snz", "bcdf", "complement only-delimited", "delimiter fields bytes"),
        "diff": _program(
            "abBcdeEinNqrstTuwy",
            "UCIxXFW",
            "brief unified recursive new-file ignore-all-space ignore-blank-lines color "
            "side-by-side",
            "exclude label width",
            groups=("cuyenq",),
        ),
        "stat": _program("LftxFnqrs", "c", "dereference file-system terse", "format printf"),
        "du": _program(
            "abcDhHklLmPsSx0",
            "dBt",
            "all summarize human-readable apparent-size total",
            "max-depth exclude",
            groups=("hkm",),
        ),
        "df": _program("ahHiklmPT", "Btx", "human-readable inodes total", groups=("hHkm",)),
        "tree": _program("adfilpsughDFqNQrtJX", "LPIo", "dirsfirst noreport prune gitignore"),
        "file": _program("bhikLNnprsz0", "Ffm", "brief mime mime-type mime-encoding dereference"),
        "mkdir": _program("pv", "m", "parents verbose", "mode"),
        "rmdir": _program("pv", "", "parents verbose ignore-fail-on-non-empty"),
        "touch": _program("acfhm", "drt", "no-create", "date reference"),
        "rm": _program(
            "fiIrRdv",
            "",
            "force recursive verbose dir one-file-system",
            groups=("fiI",),
            keeps_slash=True,
        ),
        "cp": _program(
            "abdfHilLnpPrRsuvxT",
            "tS",
            "archive force interactive link no-clobber recursive update verbose parents",
            "target-directory suffix",
            objects="t",
            groups=("fin", "HLP"),
            keeps_slash=True,
        ),
        "mv": _program(
            "bfinuvT",
            "tS",
            "force interactive no-clobber update verbose",
            "target-directory suffix",
            objects="t",
            groups=("fin",),
            keeps_slash=True,
        ),
        "chmod": _program(
            "cfvR", "", "recursive verbose changes quiet", "reference", operands="pattern"
        ),
        "grep": _GREP,
        "egrep": _GREP,
        "fgrep": _GREP,
        "rg": _RG,
        "sed": _program(
            "nErsuz",
            "ef",
            "quiet silent regexp-extended separate",
            "expression file",
            objects="ef",
            operands="pattern",
        ),
        "pytest": _PYTEST,
        "py.test": _PYTEST,
        "ruff check": _program(
            "qsvneh",
            "",
            "fix unsafe-fixes diff show-fixes no-fix preview no-cache quiet verbose statistics "
            "exit-zero watch",
            "select ignore extend-select config output-format line-length target-version exclude",
        ),
        "ruff format": _program(
            "qsv",
            "",
            "check diff preview no-cache quiet verbose",
            "config line-length target-version exclude",
        ),
        "black": _program(
            "qvlhSC",
            "",
            "check diff quiet verbose fast safe preview color no-color",
            "line-length target-version config exclude include",
        ),
        "mypy": _program(
            "vh",
            "pmc",
            "strict verbose ignore-missing-imports show-error-codes no-incremental pretty "
            "no-error-summary namespace-packages explicit-package-bases",
            "config-file python-version cache-dir exclude follow-imports",
            objects="pmc",
        ),
        "make": _program(
            "BdeikLnpqrRsStvw",
            "CfIjloW",
            "always-make dry-run just-print keep-going silent quiet no-print-directory",
            "directory file jobs",
            objects="Cf",
            operands="words",
        ),
        "git status": _program(
            "sbvz", "", "short branch porcelain long verbose ignored show-stash", operands="git"
        ),
        "git diff": _program(
            "puswbzRa",
            "UMCSGO",
            "stat shortstat numstat name-only name-status cached staged color no-color patch "
            "no-patch word-diff ignore-all-space ignore-space-change check summary no-ext-diff "
            "merge-base",
            "unified diff-filter",
            objects="SG",
            operands="git",
        ),
        "git log": _program(
            "pusizq",
            "nSGL",
            "oneline stat graph all decorate no-decorate name-only name-status patch no-patch "
            "reverse follow shortstat numstat merges no-merges first-parent abbrev-commit "
            "no-color color format pretty",
            "max-count since until after before author grep date skip",
            objects="SGL",
            operands="git",
            has_numbers=True,
        ),
        "git show": _program(
            "puszq",
            "U",
            "stat name-only name-status oneline patch no-patch shortstat numstat no-color color "
            "format pretty",
            operands="git",
        ),
        "git add": _program(
            "nvfipeuAN", "", "all update force dry-run verbose patch intent-to-add"
        ),
        "git commit": _program(
            "apvqnsi",
            "mFCct",
            "all amend no-edit no-verify quiet verbose allow-empty signoff allow-empty-message",
            "message file author date",
            operands="git",
        ),
        "git branch": _program(
            "avrdDmMcCfliq",
            "u",
            "all list remotes delete force merged no-merged show-current verbose contains",
            operands="git",
        ),
        "git stash": _program("qupka", "m", "include-untracked keep-index", operands="git"),
        "git ls-files": _program(
            "cdmoiskuztv",
            "xX",
            "cached deleted modified others ignored stage exclude-standard",
            "exclude",
            operands="git",
        ),
    }
)
"""Known programs and subcommands by name."""

_PREFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "uv": ("uv", "run"),
        "poetry": ("poetry", "run"),
        "pdm": ("pdm", "run"),
        "hatch": ("hatch", "run"),
        "npx": ("npx",),
        "bunx": ("bunx",),
        "python": ("python", "-m"),
        "python3": ("python3", "-m"),
        "time": ("time",),
        "sudo": ("sudo",),
        "nohup": ("nohup",),
    }
)
"""Words that run the command behind them, whose options are read on their own."""

_LITERAL = frozenset(
    [
        "echo",
        "printf",
        "go",
        "npm",
        "pnpm",
        "yarn",
        "bun",
        "pip",
        "pip3",
        "docker",
        "podman",
        "kubectl",
        "cargo",
        "jq",
        "awk",
        "perl",
        "ln",
        "rsync",
        "sed",
        "git",
        "gh",
        "curl",
        "wget",
        "test",
        "[",
        "export",
        "find",
        "expr",
        "basename",
        "dirname",
        "xargs",
        "node",
        "ssh",
        "scp",
    ]
)
"""Programs that are not in `PROGRAMS` and to which `./x`, `x` and `/here/x` differ."""

_PATH_LIKE = re.compile(r"(?:~|\.{0,2})/[\w./@+-]*|\.{1,2}")
_FILE_LIKE = re.compile(r"[\w.@+-]+/[\w./@+-]*\.[A-Za-z]\w{0,5}")
_NEGATION = re.compile(r"-+(?:no-?)?")
_FILTER = re.compile(r"--?(?:in|ex)clude|--?i?glob|--?filter|--?(?:not|and|or)$")
"""Options whose order among each other means something in most programs that have them."""
_SORTABLE = re.compile(r"--[A-Za-z][\w-]*(?:=.*)?|-[A-Za-z0-9]", re.DOTALL)
_ORDERED = frozenset(
    [
        "find",
        "test",
        "[",
        "expr",
        "rsync",
        "ffmpeg",
        "convert",
        "magick",
        "gcc",
        "g++",
        "cc",
        "c++",
        "clang",
        "clang++",
        "ld",
        "git",
        "curl",
        "jq",
    ]
)
"""Programs that read their options one after the other; of git only what is in `PROGRAMS`."""


def arguments_of(words: Sequence[str], path: PathReader) -> Arguments:
    """Read the options of a command.

    Args:
        words: The words of the command, quoting resolved, marks of `words` in place.
        path: Resolves a word that is a path.
    """
    if prefix := _PREFIXES.get(words[0]):
        n = len(prefix)
        if tuple(words[:n]) == prefix and len(words) > n and not words[n].startswith("-"):
            inner = arguments_of(words[n:], path)
            return Arguments((*prefix, *inner.effect), (*prefix, *inner.operands))
    name = path(words[0]) if "/" in words[0] else words[0]
    for n_words in (2, 1):
        known = PROGRAMS.get(" ".join(words[:n_words]))
        if known is not None and (read := _read(known, words, n_words, path)) is not None:
            return read
    return _read_strictly(name, words[1:], path)


def _read(
    program: Program, words: Sequence[str], n_words: int, path: PathReader
) -> Arguments | None:
    """The options of a known program; `None` when one of them is not known."""
    flags: list[Flag] = []
    operands: list[str] = []
    rest = list(words[n_words:])
    has_pattern_flag = False
    while rest:
        word = rest.pop(0)
        if word == "--":
            if program.operands == "git":
                operands.append(word)
            operands += rest
            break
        if word == "-" or not word.startswith("-"):
            operands.append(word)
            continue
        found = _long(program, word, rest) if word.startswith("--") else _short(program, word, rest)
        if found is None:
            return None
        flags += found
        has_pattern_flag |= any(flag[0] in _PATTERN_FLAGS for flag in found)
    kind = program.operands
    if kind == "pattern" and has_pattern_flag:
        kind = "paths"
    objects = _objects(operands, kind, path, keeps_slash=program.keeps_slash)
    flags.sort(key=lambda flag: _rank(program, flag))
    name = tuple(words[:n_words])
    named = tuple(flag for flag in flags if len(flag) == 2 and flag[0][1:] in program.objects)
    return Arguments((*name, tuple(flags), *objects), (*name, *named, *objects))


_PATTERN_FLAGS = frozenset({"-e", "-f", "--regexp", "--file", "--expression", "--reference"})


def _short(program: Program, word: str, rest: list[str]) -> list[Flag] | None:
    """A cluster such as `-rn5` as single flags."""
    if program.has_numbers and word[1:].isdigit():
        return [(word,)]
    flags: list[Flag] = []
    for place, letter in enumerate(word[1:], start=1):
        if letter in program.flags:
            flags.append((f"-{letter}",))
        elif letter in program.values:
            value = word[place + 1 :]
            if not value:
                if not rest:
                    return None
                value = rest.pop(0)
            return [*flags, (f"-{letter}", value)]
        else:
            return None
    return flags


def _long(program: Program, word: str, rest: list[str]) -> list[Flag] | None:
    name, has_value, value = word.partition("=")
    if name[2:] in program.long_values:
        if not has_value:
            if not rest:
                return None
            value = rest.pop(0)
        return [(name, value)]
    if name[2:] in program.long:
        return [(name, value) if has_value else (name,)]
    return None


def _rank(program: Program, flag: Flag) -> str:
    """Sort key of a flag; flags that override each other share one, so they keep their order."""
    name = flag[0]
    if name.startswith("--") and _FILTER.match(name):
        return "filter"
    if len(name) == 2:
        for group in program.groups:
            if name[1] in group:
                return group[0]
        return name[1]
    return _NEGATION.sub("", name) if name.startswith("--") else name


def _objects(
    operands: list[str], kind: str, path: PathReader, *, keeps_slash: bool
) -> tuple[str, ...]:
    def read(word: str) -> str:
        file, colons, part = word.partition("::")
        resolved = path(file)
        slash = "/" if keeps_slash and file.endswith("/") and not resolved.endswith("/") else ""
        return f"{resolved}{slash}{colons}{part}"

    if kind == "words":
        return tuple(operands)
    if kind == "git":
        cut = operands.index("--") + 1 if "--" in operands else len(operands)
        return (*operands[:cut], *map(read, operands[cut:]))
    if kind == "pattern":
        return (*operands[:1], *map(read, operands[1:]))
    return tuple(map(read, operands))


def _read_strictly(name: str, words: Sequence[str], path: PathReader) -> Arguments:
    """The words of an unknown program in order; only flags side by side are sorted."""
    is_literal = name in _LITERAL
    effect: list[object] = [name]
    operands: list[object] = [name]
    run: list[str] = []
    is_open = True
    for number, word in enumerate(words):
        if is_open and word.startswith("-") and word not in ("-", "--") and ACTIVE not in word:
            following = words[number + 1] if number + 1 < len(words) else "-"
            if not following.startswith("-") and "=" not in word:
                effect += [*_sorted(name, run), word]
                run = []
            else:
                run.append(word)
            continue
        effect += _sorted(name, run)
        run = []
        is_open = is_open and word != "--"
        spelled = word if is_literal else _spelled_path(word, path)
        effect.append(spelled)
        operands.append(spelled)
    return Arguments((*effect, *_sorted(name, run)), tuple(operands))


def _sorted(name: str, flags: list[str]) -> list[str]:
    """Flags in one order; `--x` and `--no-x`, or one flag twice, keep theirs."""
    if name in _ORDERED or not all(_SORTABLE.fullmatch(f) and not _FILTER.match(f) for f in flags):
        return flags
    return sorted(flags, key=lambda flag: _NEGATION.sub("", flag.partition("=")[0]))


def _spelled_path(word: str, path: PathReader) -> str:
    """A word that can only be a path, resolved; any other word as it is."""
    if QUOTED in word or "//" in word:
        return word
    if not _PATH_LIKE.fullmatch(word.replace(ACTIVE + "~", "~")) and not _FILE_LIKE.fullmatch(word):
        return word
    inner = word.lstrip("./").split("/")
    if "." in inner or ".." in inner:
        return word
    return path(word) + ("/" if word.endswith("/") and len(word) > 1 else "")
