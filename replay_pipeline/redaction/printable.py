"""Text of strangers, made harmless to look at.

Sessions, answers, names and provider errors may hold terminal escapes, which move the cursor, set
the clipboard or hide what was printed, and marks that turn the direction of text around.
"""

_KEPT = frozenset("\n\t\u200d")
"""Line ends, tabs, and the joiner inside emoji."""


def printable(text: str) -> str:
    """`text` with a mark in place of each control character; other blanks become spaces."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in _KEPT else " " if c in "\u00a0\u3000\u202f\u2007" else "�"
        for c in text.replace("\r\n", "\n")
    )
