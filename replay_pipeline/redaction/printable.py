"""Make foreign text harmless to print.

Sessions, answers, names, and provider errors may contain terminal escapes, which move the cursor,
set the clipboard, or hide output. They may also contain marks that reverse the direction of text.
"""

_KEPT = frozenset("\n\t\u200d")
"""Line ends, tabs, and the joiner inside emoji."""
_BLANKS = "\u00a0\u3000\u202f\u2007"


def printable(text: str) -> str:
    """Return `text` with each control character replaced by a mark, and unusual blanks by spaces."""
    # Whole texts at once: of almost all, nothing is replaced.
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    text = text.replace("\r\n", "\n")
    for c in set(text) - _KEPT:
        if not c.isprintable():
            text = text.replace(c, " " if c in _BLANKS else "�")
    return text
