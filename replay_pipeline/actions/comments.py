"""Read what a piece of code says without its comments and empty lines."""

import keyword
import re
from functools import lru_cache
from pathlib import PurePosixPath

_TEXT = (
    r"""\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
)
_REST = r"|(?P<odd>[\"'`]|/\*)|(?P<word>[^\W\d]\w*)|\\.|."
_BRACES = rf"(?P<text>{_TEXT}|`(?:[^`\\]|\\.)*`)|(?P<comment>//[^\n]*|/\*.*?\*/){_REST}"
_LIFETIMES = rf"(?P<text>'(?:\\.[^'\n]*|[^\\'\n])'|\"(?:[^\"\\]|\\.)*\")|'(?=[^\W\d])|(?P<comment>//[^\n]*|/\*.*?\*/){_REST}"
_PYTHON, _C, _RUST = (
    re.compile(each, re.DOTALL)
    for each in (rf"(?P<text>{_TEXT})|(?P<comment>\#[^\n]*){_REST}", _BRACES, _LIFETIMES)
)
_LANGUAGES = {
    **dict.fromkeys((".py", ".pyi"), _PYTHON),
    **dict.fromkeys((".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".mts", ".cts"), _C),
    **dict.fromkeys((".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".go", ".java", ".kt"), _C),
    ".swift": _C,
    ".rs": _RUST,
}
"""Without shell, YAML, and their like, where a heading inside a text looks like a comment."""
_ODD = re.compile(r"[\0\1\r]")
_KEYWORDS = frozenset(
    f"""{" ".join(keyword.kwlist)} abstract async bool boolean case catch chan char const data declare default defer delete
    do double enum export extends extern final float fn for fun func function get go if impl implements in inline int
    interface internal let long map mut namespace new of open override package private protected pub public range
    readonly return sealed set static string struct suspend switch throw throws type typedef typeof unsigned using val
    var virtual void where""".split()
)
_TOLD = (
    "eslint|exported|fall|fallthrough|flow|globals?|istanbul|js[hl]int|noinspection|nolint|nopmd|nosec|nosonar|noqa"
    "|pragma|prettier|resharper"
)
_FOR_PEOPLE = re.compile(
    rf"(?:\#|//|/\*\*?)\s+(?!(?i:{_TOLD})\b)(?:[^\W\d_][^\W\dA-Z_]*|[A-Z]{{2,4}})(?=[\s,.;!?]|$)"
    r"(?:(?!\s//)[^#@<])*"
)
"""A comment that begins with a word. Some tools read other ones: `# type: ignore`, `//go:build`, `/* @flow */`."""


@lru_cache(maxsize=1_024)
def code_of(text: str, path: str) -> str | None:
    """Return a piece of a file without comments for people, or None where it may be no code.

    The piece may begin inside a longer text, in which nothing is a comment. Quotation marks
    without a partner tell that, and words side by side of which none is a keyword.
    """
    language = _LANGUAGES.get(PurePosixPath(path).suffix.lower())
    if language is None or _ODD.search(text):
        return None
    most_words, n_words = (1 if language is _PYTHON else 2), 0
    parts: list[str] = []
    for found in language.finditer(text):
        kind, part = found.lastgroup, found[0]
        is_nested = kind == "text" and part[0] == "`" and part.count("${") > part.count("}")
        if kind == "odd" or is_nested:
            return None
        if kind == "word" and part not in _KEYWORDS:
            n_words += 1
        elif part not in " \t":
            n_words = 0
        if n_words > most_words:
            return None
        if kind == "comment" and _FOR_PEOPLE.fullmatch(part):
            part = "\1"
        elif kind in ("comment", "text"):
            part = part.replace("\n", "\0")  # an empty line of a text is no empty line of code
        parts.append(part)
    lines = "".join(parts).split("\n")
    # An empty line at an end says whether the piece begins or ends with a line.
    kept = [line for n, line in enumerate(lines) if line.strip() or n in (0, len(lines) - 1)]
    bare = [line.replace("\1", "").rstrip() if "\1" in line else line for line in kept]
    return "\n".join(line for line, before in zip(bare, kept, strict=True) if line or not before)
