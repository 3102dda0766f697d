"""Find secrets and personal data offline, and replace them by stable typed placeholders.

Equal secrets become equal placeholders, so actions stay comparable after redaction. The kingfisher
scanner runs in this process and never opens a connection. Its validators, which do, aren't used.
Our own rules find what it misses.
"""

import hashlib
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from replay_pipeline.redaction.known_values import KnownValues, hashed_in
from replay_pipeline.redaction.people import homes_in, hosts_in, people
from replay_pipeline.redaction.scanning import (
    Suspect,
    people_in,
    secrets_by_kingfisher,
    suspects_in,
)
from replay_pipeline.redaction.secret_rules import (
    CUT_SIGNAL,
    ESCAPED_SIGNAL,
    SecretHit,
    own_hits,
    unescaped,
)

logger = logging.getLogger(__name__)

_MIN_CHARS = 6
_MEMO_ENTRIES = 20_000
_CHUNK_CHARS = 1_000_000
"""Redacted side by side."""
_BETWEEN = "\n\n\n"

_PLACEHOLDER = re.compile(r"<(?:SECRET:[a-z0-9_-]+|EMAIL|HOST|NAME|ADDRESS):[0-9a-f]{8}>")
_OF_SECRET = re.compile(r"<SECRET:[a-z0-9_-]+:([0-9a-f]{8})>")
_EMAIL_NAME = re.compile(r"(?<![\w.+%/:-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}\Z")
_EMAIL_HOST = re.compile(r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])")
"""Looked for first: a search for a literal is many times faster than one for a class."""
_PUBLIC_EMAIL = re.compile(
    r"^(?:no-?reply|git|user|you|me|test|foo|bar|alice|bob|admin|info|support|example)@"
    r"|@(?:[\w-]+\.)*(?:example\.(?:com|org|net)|test|local|invalid|localhost)$"
    r"|@(?:github\.com|gitlab\.com|bitbucket\.org)$",
    re.IGNORECASE,
)


def placeholders_in(texts: Iterable[str]) -> dict[str, str]:
    """Return the placeholders of secrets in texts, by the hash at their end."""
    return {m[1]: m[0] for text in texts for m in _OF_SECRET.finditer(text)}


def find_secrets(text: str) -> list[SecretHit]:
    """Return every secret in `text`, in order, without overlaps and without placeholders."""
    return find_secrets_in([text])[0]


def find_secrets_in(texts: Sequence[str]) -> list[list[SecretHit]]:
    """Return the result of `find_secrets` for each text. This is several times faster than one call per text."""
    found: list[list[SecretHit]] = [[] for _ in texts]
    for index, suspect in suspects_in(texts):
        if len(texts[index]) >= _MIN_CHARS:
            found[index] = _find(texts[index], suspect)
    return found


_CUT = str.maketrans("&<", "  ")
"""Most rules of kingfisher want a blank, a quote or the end of the line behind a token."""


def _find(text: str, suspect: Suspect) -> list[SecretHit]:
    hits = secrets_by_kingfisher(text) if suspect.is_known else []
    if CUT_SIGNAL in suspect.signals:
        hits += secrets_by_kingfisher(text.translate(_CUT))
    if suspect.signals:
        hits += own_hits(text, signals=suspect.signals, assigned=suspect.assigned)
    if ESCAPED_SIGNAL in suspect.signals:
        plain, places = unescaped(text)
        found = [*secrets_by_kingfisher(plain), *own_hits(plain)]
        hits += (SecretHit(places[hit.start], places[hit.end], hit.kind) for hit in found)
    if not hits:
        return []
    placeholders = [m.span() for m in _PLACEHOLDER.finditer(text)]
    return _merged(
        hit for hit in hits if not any(a < hit.end and hit.start < b for a, b in placeholders)
    )


def _merged(hits: Iterable[SecretHit]) -> list[SecretHit]:
    """Merge overlapping hits into one, of the kind that begins first and reaches furthest."""
    merged: list[SecretHit] = []
    for hit in sorted(hits, key=lambda h: (h.start, -h.end, h.kind)):
        if merged and hit.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = SecretHit(last.start, max(last.end, hit.end), last.kind)
        else:
            merged.append(hit)
    return merged


class _Edit(NamedTuple):
    """What is put in place of `text[start:end]`."""

    start: int
    end: int
    rank: int
    """Of edits that overlap, the longest of the lowest rank says what stands for all of them."""
    kind: str
    put: str


def _without_overlaps(edits: Iterable[_Edit]) -> Iterator[_Edit]:
    last: _Edit | None = None
    for edit in sorted(edits):
        if last is not None and edit.start < last.end:
            best = min(last, edit, key=lambda e: (e.rank, e.start - e.end))
            last = best._replace(start=last.start, end=max(last.end, edit.end))
            continue
        if last is not None:
            yield last
        last = edit
    if last is not None:
        yield last


_Redacted = tuple[str, Counter[str]]
"""A text with placeholders, and what was replaced by kind."""
_UNSEEN: _Redacted = "", Counter()


class FoundValues:
    """What was found in the texts of a session before any of them is redacted."""

    def __init__(self) -> None:
        self.values = KnownValues()
        self.edits: dict[int, list[_Edit]] = {}
        """By the hash of a text that was searched: the secrets and hosts in it."""


class Redactor:
    """The redactor replaces secrets, people, e-mail addresses, home folders, hosts, and addresses in text.

    A secret that one text of a session gives away goes from all of them, in every form that
    `KnownValues` knows. `salt` makes the placeholders of one installation different from those of
    another. Without it, anyone could confirm a guessed secret by its placeholder.
    """

    def __init__(self, *, salt: str = "") -> None:
        self.counts: Counter[str] = Counter()
        """Replacements by kind; values are never kept."""
        self._key = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._memo: dict[str, _Redacted | None] = {}
        self._users = frozenset[str]()
        self._known: FoundValues | None = None

    def learn(self, texts: Iterable[str]) -> tuple[frozenset[str], FoundValues]:
        """Return the people of a session, from `people_in`, and its secrets, before any text is redacted."""
        known = FoundValues()

        def searched() -> Iterator[str]:
            for together in _chunks(texts):
                found = self._search(together, known.values)
                known.edits.update(zip(map(hash, together), found, strict=True))
                yield from together

        return people_in(searched()), known

    def text(
        self, text: str, *, users: frozenset[str] = frozenset(), known: FoundValues | None = None
    ) -> str:
        """Return `text` with placeholders.

        Login names of `users` become `user`, and full names a placeholder. Both arguments come from
        `learn`; without `known`, a text's own secrets alone are known in it.
        """
        if len(text) < _MIN_CHARS:
            return text
        is_same = known is self._known and users == self._users
        if not is_same or len(self._memo) > _MEMO_ENTRIES:
            self._forget(users, known)
        redacted = self._memo.get(text, _UNSEEN)
        if redacted is _UNSEEN:
            self._prepare([text])
            redacted = self._memo[text]
        if redacted is None:
            return text
        for kind, n in redacted[1].items():  # `update` takes five times as long
            self.counts[kind] += n
        return redacted[0]

    def prepare(
        self,
        texts: Iterable[str],
        *,
        users: frozenset[str] = frozenset(),
        known: FoundValues | None = None,
    ) -> None:
        """Redact many texts at once, which is faster. `text` then returns the cached results.

        Each call clears the texts of the call before.
        """
        self._forget(users, known)
        for together in _chunks(texts):
            self._prepare(together)

    def masked(
        self,
        text: str,
        placeholders: Mapping[str, str],
        *,
        users: frozenset[str] = frozenset(),
    ) -> str:
        """Return what somebody else wrote, redacted, and without the values behind the placeholders that it was shown."""
        text, edits = self.text(text, users=users), []
        for hit, value in hashed_in(text, lambda value: self._h8(value) in placeholders):
            edits.append(_Edit(hit.start, hit.end, 0, "known", placeholders[self._h8(value)]))
        parts, end = [], 0
        for edit in _without_overlaps(edits):
            parts += (text[end : edit.start], edit.put)
            end = edit.end
        return "".join([*parts, text[end:]])

    def _forget(self, users: frozenset[str], known: FoundValues | None) -> None:
        self._memo.clear()
        self._users, self._known = users, known

    def _search(self, texts: Sequence[str], values: KnownValues | None) -> list[list[_Edit]]:
        """Find secrets and hosts in texts, and add the secrets to `values`."""
        found: list[list[_Edit]] = [[] for _ in texts]
        for index, suspect in suspects_in(texts):
            text, edits = texts[index], found[index]
            hits = _find(text, suspect)
            edits += (self._secret(hit, text[hit.start : hit.end]) for hit in hits)
            for start, end, kind in chain(*(hosts_in(text, *where) for where in suspect.hosts)):
                put = f"<{kind.upper()}:{self._h8(text[start:end].lower())}>"
                edits.append(_Edit(start, end, 2, kind, put))
            if hits and values is not None:
                values.add(text, hits)
            elif hits:
                own = KnownValues()
                own.add(text, hits)
                edits += (self._secret(hit, value) for hit, value in own.places(text))
        return found

    def _secret(self, hit: SecretHit, value: str) -> _Edit:
        return _Edit(hit.start, hit.end, 0, hit.kind, f"<SECRET:{hit.kind}:{self._h8(value)}>")

    def _prepare(self, new: Sequence[str]) -> None:
        """Redact texts side by side: most of a search is the same for a word and a page."""
        self._memo.update(dict.fromkeys(new))
        homes = people(self._users).in_homes(_BETWEEN.join(new))
        texts, counts = list(new), dict[int, Counter[str]]()
        for folder, put in homes:
            for index, text in enumerate(texts):
                if n_found := text.count(folder):
                    counts.setdefault(index, Counter())["home"] += n_found
                    texts[index] = text.replace(folder, put)
        whole = _BETWEEN.join(texts)
        starts = [0, *accumulate(len(text) + len(_BETWEEN) for text in texts)]
        edited: dict[int, list[str]] = {}
        copied: dict[int, int] = {}
        edits = chain(self._edits_known(new, texts, starts, homes), self._edits(whole))
        for edit in _without_overlaps(edits):
            index = bisect_right(starts, edit.start) - 1
            start = starts[index]
            parts = edited.setdefault(index, [])
            parts += (whole[copied.get(index, start) : edit.start], edit.put)
            copied[index] = edit.end
            counts.setdefault(index, Counter())[edit.kind] += 1
        for index, given in enumerate(new):
            if index in counts:
                text = texts[index]
                if index in edited:
                    rest = whole[copied[index] : starts[index] + len(text)]
                    text = "".join([*edited[index], rest])
                self._memo[given] = text, counts[index]

    def _edits_known(
        self,
        given: Sequence[str],
        texts: Sequence[str],
        starts: Sequence[int],
        homes: Sequence[tuple[str, str]],
    ) -> Iterator[_Edit]:
        """Yield what a search of each text finds, where it stands among the texts side by side."""
        known = self._known.edits if self._known is not None else {}
        found = [known.get(hash(text)) for text in given]
        others = [index for index, edits in enumerate(found) if edits is None]
        searched = dict(zip(others, self._search([texts[i] for i in others], None), strict=True))
        for index, edits in enumerate(found):
            for edit in searched[index] if edits is None else edits:
                text, start, end = given[index], edit.start, edit.end
                if edits is not None and text != texts[index]:
                    start = len(_with_homes(text[:start], homes))
                    end = start + len(_with_homes(text[edit.start : end], homes))
                yield edit._replace(start=starts[index] + start, end=starts[index] + end)

    def _edits(self, whole: str) -> Iterator[_Edit]:
        """Find what else has to go from texts side by side."""
        if self._known is not None:
            yield from (self._secret(*place) for place in self._known.values.places(whole))
        if "@" in whole:
            for start, end in _emails_in(whole):
                put = f"<EMAIL:{self._h8(whole[start:end].lower())}>"
                yield _Edit(start, end, 1, "email", put)
        for start, end, kind in people(self._users).mentions(whole):
            is_name = kind == "name"
            put = f"<NAME:{self._h8(whole[start:end])}>" if is_name else "user"
            yield _Edit(start, end, 3 if is_name else 4, kind, put)
        for start, end, kind in homes_in(whole):
            yield _Edit(start, end, 4, kind, "user")

    def _h8(self, value: str) -> str:
        data = value.encode("utf-8", "replace")
        return hashlib.blake2b(data, digest_size=4, key=self._key).hexdigest()


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield different texts of some length, in parts that are searched side by side."""
    seen, together, n_chars = set[int](), list[str](), 0
    for text in texts:
        if len(text) < _MIN_CHARS or (name := hash(text)) in seen:
            continue
        seen.add(name)
        together.append(text)
        n_chars += len(text)
        if n_chars > _CHUNK_CHARS:
            yield together
            together, n_chars = [], 0
    if together:
        yield together


def _with_homes(text: str, homes: Iterable[tuple[str, str]]) -> str:
    for folder, put in homes:
        text = text.replace(folder, put)
    return text


def _emails_in(text: str) -> Iterator[tuple[int, int]]:
    end = 0
    for host in _EMAIL_HOST.finditer(text):
        at = host.start()
        name = _EMAIL_NAME.search(text, max(end, at - 64), at)
        if name is not None:
            end = host.end()
            if not _PUBLIC_EMAIL.search(text[name.start() : end]):
                yield name.start(), end
