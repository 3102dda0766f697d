"""Shell words as plain strings, with quoting resolved and active characters marked."""

import re

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
