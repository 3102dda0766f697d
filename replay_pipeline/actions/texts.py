"""Decide whether two final texts say the same: equal except for typography, or the same choice.

For texts in free form, you can pass a judge (`same_text`). In doubt, texts differ, as actions do.
"""

import re

_MAX_CHOICE_CHARS = 600
"""A longer text says more than which option it takes."""
_EMPHASIS = re.compile(r"[*_`]+")
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-"})
_QUOTED = re.compile("[\u2018\u2019\u201c\u201d\u2013]")
_LETTER = r"([A-Ha-h1-9])"
_ALONE = re.compile(rf"(?:the )?(?:answer|option|choice)?(?: is|:)? ?\(?{_LETTER}[.):]?\.?", re.I)
_TAKEN = re.compile(
    rf"(?:so |then )?(?:my |the )?(?:answer|choice)(?: is|:) ?(?:option )?\(?{_LETTER}\b"
    rf"|i(?:['’]d| would|['’]ll| will)? (?:choose|pick|take|select|recommend|suggest|go (?:with|for)) "
    rf"(?:option \(?{_LETTER}\b|\({_LETTER}\))"
    rf"|(?:option \(?{_LETTER}\b|\({_LETTER}\)|{_LETTER}\))",
    re.IGNORECASE,
)
_MENTIONED = re.compile(rf"\({_LETTER}\)|\boption \(?{_LETTER}\b", re.IGNORECASE)
_HEDGED = re.compile(
    r"\b(?:but|however|except|unless|instead|not|neither|nor|first|then|after|also|either|or|both|n't)\b"
    r"|n['’]t\b|\?",
    re.IGNORECASE,
)


def say_the_same(one: str, other: str) -> bool:
    """Return whether two texts differ only in typography, or choose the same option."""
    one, other = _normal(one), _normal(other)
    if one == other:
        return True
    choice = _choice_of(one)
    return choice is not None and choice == _choice_of(other)


def choice_of(text: str) -> str | None:
    """Return the option that a text chooses, such as `c`, or None if it may mean anything else.

    The text must begin with the option or consist of it, name no other option, and express no
    doubt.
    """
    return _choice_of(_normal(text))


def _choice_of(plain: str) -> str | None:
    """Return the option that a text in normal form takes."""
    if len(plain) > _MAX_CHOICE_CHARS:
        return None
    found = _ALONE.fullmatch(plain)
    if found is None:
        found = _TAKEN.match(plain)
        if found is None or _HEDGED.search(plain):
            return None
    letter = next(group for group in found.groups() if group).lower()
    mentioned = {(m[1] or m[2]).lower() for m in _MENTIONED.finditer(plain)}
    return letter if mentioned <= {letter} else None


def _normal(text: str) -> str:
    """Return a text without emphasis, in plain quotes and single blanks, without a full stop at the end."""
    plain = _EMPHASIS.sub("", text)
    if _QUOTED.search(plain):  # translating a long text takes ten times as long as looking
        plain = plain.translate(_QUOTES)
    return " ".join(plain.split()).rstrip(" .")
