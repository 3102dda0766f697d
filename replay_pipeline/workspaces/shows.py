"""Which files a shell command shows, if all that it does is to show files and commits.

Such a command prints on the rebuilt files what it printed there. One table has its programs, with the
options that change nothing about that; with any other program, option, or sign of the shell, nobody can tell.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from replay_pipeline.actions.paths import absolute

_PROGRAMS = {
    "cat": ("bn", ""),
    "head": ("qv", "nc"),
    "tail": ("qv", "nc"),
    "sed": ("nEr", "e"),
    "grep": ("EFGivwxclLnHhosrRI", "ABCme"),
    "egrep": ("ivwxclLnHhos", "ABCme"),
    "fgrep": ("ivwxclLnHhos", "ABCme"),
    "cut": ("s", "dfcb"),
    "sort": ("bdfgnruV", "kt"),
    "uniq": ("cdui", "fsw"),
    "wc": ("lwcm", ""),
    "nl": ("", "bw"),
    "tr": ("cds", ""),
    "echo": ("", ""),
    "pwd": ("", ""),
    "ls": ("1", ""),
    "cd": ("", ""),
    "git": ("ps", "nU"),
}
"""Letters of options that are known, without a value and with one."""
_WITH_SCRIPT = frozenset({"sed", "grep", "egrep", "fgrep"})
"""Programs whose first operand is no file, unless `-e` stands before it."""
_OF_GIT = frozenset({"show", "log", "diff"})
_NO_FILES = frozenset({"echo", "pwd", "tr"})
_OTHER_ON_MACS = {("nl", 0), ("nl", 1), ("uniq", 1), ("wc", 0), ("wc", 2), ("wc", 3)}
"""Programs and numbers of options with which they fill up numbers with other blanks there."""
_AS_ON_MACS = """wc() { command wc "$@" | while read -r n more; do printf '%8d%s\\n' "$n" "${more:+ $more}"; done; }; """
"""Defines a `wc` with one number that fills it up with blanks as there."""
_ALL = "head() { cat; }; tail() { cat; }; "
"""Defines them so that a pipe shows all."""
_LONG = re.compile(
    r"--(?:(?:include|exclude|exclude-dir)=.*|color=never|no-color|line-number|count|oneline|stat|name-only|"
    r"name-status|(?:format|pretty)=[^%]*(?:%[hHsTtPpBb%n][^%]*)*|no-patch|reverse|shortstat|numstat|"
    r"no-merges|first-parent|ancestry-path|follow)"
)
_COMMIT = re.compile(r"(?:HEAD|[0-9a-f]{7,40})(?:[~^]\d*)*(?::[^:]+)?")
_WORDS = re.compile(
    r"""(?P<blank>[ \t]+)|(?P<to>2>(?:&1|[ ]*/dev/null))|(?P<joint>&&|\|\|?|;)"""
    r"""|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\$`]|\\[^\n]|\$(?=["\\|) ]))*)"|\\(?P<sign>[^\n])"""
    r"""|(?P<bare>[^\s'"\\$`;&|<>(){}!#~]+|(?<=[\w\])^])~)"""
)
_ESCAPED = re.compile(r'\\([$`"\\])')
_GLOB = re.compile(r"[*?\[]")


class Shown(NamedTuple):
    """What a command shows."""

    files: frozenset[str]
    """Files that it names."""
    folders: frozenset[str]
    """Folders any of whose files it may show."""
    commits: frozenset[str]
    """Commits: `HEAD` or the beginning of an id, some with a file in them behind a `:`."""
    can_find_nothing: bool
    """Whether it ends with status 1 if it finds nothing."""
    lists: bool
    """Whether it lists folders."""
    run: str
    """The command, with what it needs to print the same in the sandbox."""
    uncut: str | None
    """The same without `head` and `tail` where these cut what is found in folders: which come first, nobody knows."""


class _UnknownError(ValueError):
    """Raised for what the table doesn't have."""


class _Word(NamedTuple):
    text: str
    has_glob: bool


def shown_by(command: str, cwd: str) -> Shown | None:
    """Return what a command shows, or None if it may do or show anything else.

    Args:
        command: a command for `bash`.
        cwd: the folder in which it runs, absolute.
    """
    files, folders, commits, names = set[str](), set[str](), set[str](), set[str]()
    name, is_mac, run = "", cwd.startswith("/Users/"), command
    try:
        for joint, words in _commands(command):
            name = words[0].text
            if name not in _PROGRAMS:
                return None
            names.add(name)
            flags, operands = _read(name, words[1:])
            if is_mac and (name, len(flags)) in _OTHER_ON_MACS:
                return None
            if name == "cd":
                if joint == "|" or len(operands) != 1 or operands[0].has_glob:
                    return None
                cwd = absolute(operands[0].text, cwd)
            elif name == "git":
                commits |= _commits_in(operands)
            elif name not in _NO_FILES:
                if name in _WITH_SCRIPT and "e" not in flags:
                    operands = operands[1:]
                is_of_many = name == "ls" or bool(flags & {"r", "R"})
                places = operands or [_Word(".", has_glob=False)] * is_of_many
                if not places and joint != "|":
                    return None  # it would wait for what somebody types
                for word in places:
                    is_many = word.has_glob or is_of_many
                    path = absolute(_before_glob(word), cwd)
                    (folders if is_many else files).add(path)
    except _UnknownError:
        return None
    if is_mac and "wc" in names:
        run = _AS_ON_MACS + run
    if not (files or folders or commits or names == {"pwd"}):
        return None
    return Shown(
        frozenset(files),
        frozenset(folders),
        commits=frozenset(commits),
        can_find_nothing=name.endswith("grep"),
        lists="ls" in names,
        run=run,
        uncut=_ALL + run if folders and names & {"head", "tail"} else None,
    )


def _commands(text: str) -> Iterator[tuple[str, list[_Word]]]:
    """Yield each simple command, with the joint before it.

    Raises:
        _UnknownError: the shell would do more than split words, find files, and join commands.
    """
    at, joint, words = 0, "", list[_Word]()
    word: _Word | None = None
    text = text.strip()
    while at < len(text):
        found = _WORDS.match(text, at)
        if found is None:
            raise _UnknownError
        at, kind = found.end(), found.lastgroup
        if kind in ("single", "double", "sign", "bare"):
            piece = found[kind]
            if kind == "double":
                piece = _ESCAPED.sub(r"\1", piece)
            has_glob = kind == "bare" and bool(_GLOB.search(piece))
            before = word or _Word("", has_glob=False)
            word = _Word(before.text + piece, before.has_glob or has_glob)
            continue
        if word is not None:
            words.append(word)
            word = None
        if kind == "joint":
            if not words:
                raise _UnknownError
            yield joint, words
            joint, words = found[kind], []
    if word is not None:
        words.append(word)
    if not words:
        raise _UnknownError
    yield joint, words


def _read(name: str, words: Sequence[_Word]) -> tuple[set[str], list[_Word]]:
    """Return the letters of a command's options, and its operands.

    Raises:
        _UnknownError: an option is not known.
    """
    plain, valued = _PROGRAMS[name]
    flags, operands = set[str](), list[_Word]()
    rest = iter(words)
    for word in rest:
        text = word.text
        if text == "--" and name != "git":
            operands += rest
        elif name == "echo" or text in ("-", "--") or not text.startswith("-"):
            operands.append(word)
        elif _LONG.fullmatch(text) or (name in ("head", "tail", "git") and text[1:].isdigit()):
            continue
        else:
            letters = text[1:]
            while letters and letters[0] in plain:
                flags.add(letters[0])
                letters = letters[1:]
            if letters:
                if letters[0] not in valued:
                    raise _UnknownError
                flags.add(letters[0])
                if not letters[1:] and next(rest, None) is None:
                    raise _UnknownError
    return flags, operands


def _commits_in(words: Sequence[_Word]) -> set[str]:
    """Return the commits that a command of git shows.

    Raises:
        _UnknownError: it shows anything else, such as a branch, or files that are not committed.
    """
    if not words or words[0].text not in _OF_GIT or any(word.has_glob for word in words):
        raise _UnknownError
    texts = [word.text for word in words[1:]]
    named = texts[: texts.index("--")] if "--" in texts else texts
    found = {end for each in named for end in each.split("..", 1)}
    if not all(map(_COMMIT.fullmatch, found)) or (words[0].text == "diff" and len(found) < 2):
        raise _UnknownError
    return found or {"HEAD"}


def _before_glob(word: _Word) -> str:
    """Return a word up to the folder in which a pattern of names begins."""
    if not word.has_glob:
        return word.text
    fixed = _GLOB.split(word.text, maxsplit=1)[0]
    return fixed.rpartition("/")[0] or ("/" if fixed.startswith("/") else ".")
