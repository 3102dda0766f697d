"""Find a secret again, in every form it may have, once any text of a session gave it away."""

import base64
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from urllib.parse import quote, quote_plus, unquote

from replay_pipeline.redaction.secret_rules import MIN_CHARS, SecretHit, decoded_base64, own_hits

_MIN_WORD_CHARS = 16
"""A shorter value of letters alone may be a word, and stays where only its value would tell of it."""
_MIN_APART_CHARS = 12
"""A shorter value is replaced only where no letter or digit touches it."""
_MIN_CORE_CHARS = 10
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{20,}")
_ACCOUNT = re.compile(r"(?:\A|://)[^:/@\s]*:([^@\s/][^@\s]*)(?:@|\Z)")
"""The password behind a name, as accounts and addresses have it."""
_BASE64_WORD = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
_BASE64_HEAD = re.compile(r"[A-Za-z0-9+/_-]*\Z")
_FOR_URLS = str.maketrans("+/", "-_")
_ESCAPED_LETTERS = "nrt"


class KnownValues:
    """The secrets that were found in a session, by value. Values never leave this process."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._forms: dict[str, tuple[str, bool]] = {}
        """By what stands in a text: the value, and whether it is base64."""

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, text: str, hits: Iterable[SecretHit]) -> None:
        """Add what was found in a text."""
        for hit in hits:
            for value in _values_in(text[hit.start : hit.end], hit.kind):
                if value not in self._kinds and _is_telling(value):
                    self._kinds[value] = hit.kind
                    self._forms |= dict.fromkeys(_written(value), (value, False))
                    self._forms |= dict.fromkeys(_in_base64(value), (value, True))

    def update(self, other: "KnownValues") -> None:
        """Add the values of another session, which told this one of them."""
        self._kinds = other._kinds | self._kinds
        self._forms = other._forms | self._forms

    def places(self, text: str) -> Iterator[tuple[SecretHit, str]]:
        """Find the values in a text, in any order, each with its plain form. They may overlap."""
        for form, (value, is_base64) in self._forms.items():
            start = text.find(form)
            while start >= 0:
                end = start + len(form)
                if is_base64:
                    head = _BASE64_HEAD.search(text, max(0, start - 4096), start)
                    tail = _BASE64_WORD.match(text, end)
                    first = head.start() if head else start
                    yield SecretHit(first, tail.end() if tail else end, self._kinds[value]), value
                elif len(form) >= _MIN_APART_CHARS or _is_apart(text, start, end):
                    yield SecretHit(start, end, self._kinds[value]), value
                start = text.find(form, end)


def _values_in(found: str, kind: str) -> Iterator[str]:
    """Yield a secret, and what it holds where it is a key of several lines or encoded."""
    if kind == "private-key":
        yield from _KEY_LINE.findall(found)
        return
    yield found
    plain = unquote(found) if "%" in found else found
    decoded = decoded_base64(found)
    if plain != found:
        yield plain
    for text in filter(None, (plain, decoded)):
        if account := _ACCOUNT.search(text):
            yield account[1]
        if text != found:
            yield from (text[hit.start : hit.end] for hit in own_hits(text))


def _is_telling(value: str) -> bool:
    is_word = value.isalpha() and len(value) < _MIN_WORD_CHARS
    return len(value) >= MIN_CHARS and len(set(value)) > 4 and not is_word


def _written(value: str) -> set[str]:
    """Return a value as it is, and as JSON (once and twice), HTML and addresses have it."""
    once = json.dumps(value)[1:-1]
    data = value.encode("utf-8", "replace")
    in_urls = {quote(data, safe=""), quote(data), quote_plus(data)}
    lowered = {re.sub("%..", lambda m: m[0].lower(), form) for form in in_urls}
    escaped = {once, json.dumps(once)[1:-1], once.replace("/", "\\/"), html.escape(value)}
    return {value} | escaped | in_urls | lowered


def _in_base64(value: str) -> Iterator[str]:
    """Yield what a value is in base64 behind 0, 1 and 2 other bytes, without what those change."""
    data = value.encode("utf-8", "replace")
    for n_before, first in ((0, 0), (1, 2), (2, 3)):
        n_whole = (n_before + len(data)) * 8 // 6
        core = base64.b64encode(bytes(n_before) + data).decode()[first:n_whole]
        if len(core) >= _MIN_CORE_CHARS:
            yield from {core, core.translate(_FOR_URLS)}


def _is_apart(text: str, start: int, end: int) -> bool:
    before = text[start - 1 : start] if start else ""
    is_escape = before in _ESCAPED_LETTERS and text[max(0, start - 2) : start - 1] == "\\"
    return not ((before.isalnum() and not is_escape) or text[end : end + 1].isalnum())


_RUN = re.compile(r"[^\s\"'`\\<>]{8,400}")
_BASE64_RUN = re.compile(r"[A-Za-z0-9+/_-]{16,4000}={0,2}")
_MAX_EDGES = 40


def hashed_in(text: str, is_known: Callable[[str], bool]) -> Iterator[tuple[SecretHit, str]]:
    """Find values of which only hashes are known, each with its plain form. They may overlap.

    A value is tried between any two signs of a run without blanks, and inside base64.
    """
    for run in _RUN.finditer(text):
        word = run[0]
        signs = [i for i, c in enumerate(word) if not c.isalnum()]
        edges = sorted({0, len(word), *signs, *(i + 1 for i in signs)})[:_MAX_EDGES]
        for first, last in combinations(edges, 2):
            part = word[first:last]
            for value in {part, unquote(part)} if last - first >= MIN_CHARS else ():
                if is_known(value):
                    yield SecretHit(run.start() + first, run.start() + last, "known"), value
    for run in _BASE64_RUN.finditer(text):
        for _, value in hashed_in(decoded_base64(run[0]), is_known):
            yield SecretHit(*run.span(), "known"), value
