"""What the pages of `recipes/` have typed, and what they say comes of it.

A block of `bash` is a script; the words behind it on the fence say what it needs besides a CPU and a few minutes:
`gpu`, `hours`, `network`, `service`, `weights` (of `make real-model`). Behind "Expected" a block of `text` holds lines of the output, in their order.
"""

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
PAGES = sorted((REPO / "recipes").glob("*/README.md"))
NEEDS = {"gpu", "hours", "network", "service", "weights"}
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """A script of a page, what it needs, and the lines that its output has."""

    script: str
    needs: frozenset[str]
    expected: tuple[str, ...] = ()


def blocks(page: Path) -> list[Block]:
    """Return the scripts of a page, each with the lines that the page expects of it."""
    text, found = page.read_text("utf-8"), []
    end = 0
    for fence in _FENCE.finditer(text):
        language, words, body = fence.groups()
        if language == "bash":
            found.append(Block(body, frozenset(words.split())))
        elif language == "text" and found and "Expected" in _paragraph(text[end : fence.start()]):
            last = found[-1]
            found[-1] = Block(last.script, last.needs, tuple(body.strip().splitlines()))
        end = fence.end()
    return found


def _paragraph(text: str) -> str:
    """Return the last paragraph of a text: what stands right before a fence."""
    return text.strip().rpartition("\n\n")[2]


def missing(expected: tuple[str, ...], output: str) -> list[str]:
    """Return the expected lines that no line of the output has in it, in this order.

    The words are the same; a figure may differ by a tenth, a count by 1 and a share by .1.
    """
    rest, lost = output.splitlines(), []
    for wanted in expected:
        place = next((i for i, line in enumerate(rest) if _has(wanted.strip(), line)), None)
        if place is None:
            lost.append(wanted)
        else:
            rest = rest[place:]
    return lost


def _has(wanted: str, line: str) -> bool:
    form = re.compile(_NUMBER.pattern.join(map(re.escape, _NUMBER.split(wanted))))
    return any(_is_near(wanted, found[0]) for found in form.finditer(line))


def _is_near(wanted: str, found: str) -> bool:
    for one, other in zip(_NUMBER.findall(wanted), _NUMBER.findall(found), strict=True):
        least = 0.1 if "." in one else 1.0
        if abs(float(one) - float(other)) > max(0.1 * float(one), least):
            return False
    return True
