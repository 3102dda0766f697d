"""Hold the documentation to plain American technical English.

The rules follow the Google developer documentation style guide as far as a program can check them: short
sentences, the active voice, ordinary words. They need no network and no package:

    python tools/prose.py            # every page, worst first, and how many words there are
    python tools/prose.py README.md  # each finding of one page
"""

import argparse
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

RULES = tomllib.loads(Path(__file__).with_name("prose.toml").read_text())
ROOT = Path(__file__).parent.parent

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_IMAGE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"``?[^`\n]+``?")
_BULLET = re.compile(r"^ *(?:[-*+]|\d+\.) +")
_END = re.compile(r"(?<=[.!?])[)\"'*_]* +(?=[(\"'*_]*[A-Z0-9])|(?<=:)\s*$")
_WORD = re.compile(r"[A-Za-z0-9$%][\w.,$%'/-]*")
_PARTICIPLE = "|".join(RULES["passive"]["participles"])
_PASSIVE = re.compile(
    rf"\b(?:is|are|was|were|be|been|being|gets?|got)\s+(?:\w+ly\s+|not\s+|never\s+|also\s+|then\s+)*"
    rf"(?:\w+ed|{_PARTICIPLE})\b",
    re.IGNORECASE,
)
_BANNED = {
    re.compile(rf"\b{words}\b", re.IGNORECASE): instead for words, instead in RULES["words"].items()
}


@dataclass(frozen=True)
class Page:
    """One page of documentation, as sentences."""

    path: Path

    @cached_property
    def sentences(self) -> list[str]:
        """Return the sentences of the page, without code, tables, and headings."""
        return [
            sentence.strip()
            for paragraph in _paragraphs(self.path.read_text())
            for sentence in _END.split(paragraph)
            if len(_WORD.findall(sentence)) > 2
        ]

    @property
    def n_words(self) -> int:
        """Return how many words the page has, with its tables and code, as `wc -w` counts them."""
        return len(self.path.read_text().split())

    @property
    def is_generated(self) -> bool:
        """Return whether `tools/reference.py` writes the page from the code."""
        return self.path.name in {"cli.md", "settings.md", "tables.md"}

    @property
    def p90_words(self) -> float:
        """Return the number of words that nine sentences of ten do not exceed."""
        lengths = sorted(len(_WORD.findall(sentence)) for sentence in self.sentences)
        return statistics.quantiles(lengths, n=10)[-1] if len(lengths) > 1 else sum(lengths)

    @property
    def passive_share(self) -> float:
        """Return the share of sentences in the passive voice, from 0 to 1."""
        return sum(bool(_PASSIVE.search(s)) for s in self.sentences) / max(len(self.sentences), 1)

    @property
    def banned(self) -> list[str]:
        """Return the words on the word list that the page uses, each with what to write instead."""
        return [
            f"{match[0]!r}: {instead} ({sentence[:70]})"
            for sentence in self.sentences
            for words, instead in _BANNED.items()
            if (match := words.search(sentence))
        ]

    def findings(self) -> Iterator[str]:
        """Yield one line for each rule that the page breaks."""
        name = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        limits = RULES["limits"]
        is_long = len(self.sentences) >= limits["least_sentences"]
        if is_long and self.p90_words > limits["p90_words"]:
            yield f"{name}: nine sentences of ten have up to {self.p90_words:.0f} words (limit {limits['p90_words']})"
        if is_long and self.passive_share > limits["passive_share"]:
            yield f"{name}: {self.passive_share:.0%} of sentences are passive (limit {limits['passive_share']:.0%})"
        yield from (f"{name}: {finding}" for finding in self.banned)


def pages() -> list[Page]:
    """Return every page that a reader meets: the README, the contributor's guide, and the docs."""
    return [
        Page(path)
        for path in (
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            *sorted((ROOT / "docs").rglob("*.md")),
        )
    ]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the running text of each paragraph and list item, on one line."""
    text = _COMMENT.sub("", _FENCE.sub("\n\n", text))
    for block in re.split(r"\n\s*\n", text):
        lines: list[str] = []
        for line in block.splitlines():
            if line.lstrip().startswith(("|", "#", ">", "!!!")):
                continue
            if _BULLET.match(line) and lines:
                yield _plain(lines)
                lines = []
            lines.append(_BULLET.sub("", line))
        if lines:
            yield _plain(lines)


def _plain(lines: list[str]) -> str:
    text = " ".join(line.strip() for line in lines)
    return _CODE.sub("CODE", _LINK.sub(r"\1", _IMAGE.sub("", text)))


def main() -> int:
    """Print what breaks a rule and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Hold the documentation to plain American technical English."
    )
    parser.add_argument("paths", nargs="*", type=Path)
    chosen = [Page(path.resolve()) for path in parser.parse_args().paths]
    findings = [finding for page in chosen or pages() for finding in page.findings()]
    if chosen:
        for page in chosen:
            for sentence in page.sentences:
                n_words, is_passive = len(_WORD.findall(sentence)), bool(_PASSIVE.search(sentence))
                if n_words > RULES["limits"]["p90_words"] or is_passive:
                    print(f"{n_words:3} {'passive' if is_passive else '':7} {sentence}")
    else:
        for page in sorted(pages(), key=lambda page: -page.p90_words):
            print(
                f"{page.n_words:5} words, {page.p90_words:4.1f} a sentence, {page.passive_share:4.0%} passive, "
                f"{len(page.banned)} banned  {page.path.relative_to(ROOT)}"
            )
        by_hand = sum(page.n_words for page in pages() if not page.is_generated)
        recipes = sum(Page(path).n_words for path in (ROOT / "recipes").glob("*/README.md"))
        generated = sum(page.n_words for page in pages() if page.is_generated)
        print(f"{by_hand} words by hand, {recipes} in recipes, {generated} made from the code")
    print(*findings, sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
