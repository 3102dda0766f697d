"""Secrets and personal data: found offline, replaced by stable typed placeholders.

Equal secrets become equal placeholders, so that actions stay comparable after redaction. The
scanner of kingfisher runs in this process and never opens a connection; its validators, which
do, are not used. What its rules miss is found by the rules below.
"""

import hashlib
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

from kingfisher_sdk import Scanner

from replay_pipeline.redaction.people import (
    HOSTS_HEAD,
    is_private_login,
    people,
    without_hosts,
)
from replay_pipeline.redaction.secret_rules import (
    RULES,
    SecretHit,
    Suspicion,
    matching,
    own_hits,
    suspicious,
)

logger = logging.getLogger(__name__)

_MIN_CHARS = 6
_MEMO_ENTRIES = 200_000
_MEMO_CHARS = 4_000_000
_CHUNK_CHARS = 2_000_000
"""Held at once while many texts are prepared: compiling the rules takes as long as a megabyte."""

_PLACEHOLDER = re.compile(r"<(?:SECRET:[a-z0-9_-]+|EMAIL|HOST|NAME|ADDRESS):[0-9a-f]{8}>")
_EMAIL_NAME = re.compile(r"(?<![\w.+%/:-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}\Z")
_EMAIL_HOST = re.compile(r"@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])")
"""Looked for first: a search for a literal is many times faster than one for a class."""
_PUBLIC_EMAIL = re.compile(
    r"^(?:no-?reply|git|user|you|me|test|foo|bar|alice|bob|admin|info|support|example)@"
    r"|@(?:[\w-]+\.)*(?:example\.(?:com|org|net)|test|local|invalid|localhost)$"
    r"|@(?:github\.com|gitlab\.com|bitbucket\.org)$",
    re.IGNORECASE,
)
_LOGIN = r"(?P<name>[A-Za-z0-9][\w.-]{0,63})"
_HOMES: dict[str, tuple[tuple[str, re.Pattern[str]], ...]] = {
    "Users": (
        ("/Users/", re.compile(rf"(?P<root>/Users/){_LOGIN}")),
        ("Users\\", re.compile(rf"(?P<root>Users\\{{1,4}}){_LOGIN}")),
        ("-Users-", re.compile(r"(?P<root>-Users-)(?P<name>[A-Za-z0-9]+)")),
    ),
    "home": (
        ("/home/", re.compile(rf"(?P<root>/home/){_LOGIN}")),
        ("-home-", re.compile(r"(?P<root>-home-)(?P<name>[A-Za-z0-9]+)")),
    ),
}
"""By a word that must occur: literals of which one must, and the rule for a login name after it."""


@cache
def _scanner() -> Scanner:
    return Scanner()


def find_secrets(text: str) -> list[SecretHit]:
    """Give every secret in `text`, in order, without overlaps; placeholders are no secrets."""
    if len(text) < _MIN_CHARS:
        return []
    return _find(text, Suspicion(), _scanned([text])[0])


def find_secrets_in(texts: Sequence[str]) -> list[list[SecretHit]]:
    """Tell what `find_secrets` finds in each text, several times faster than one by one."""
    return [
        _find(text, suspicion, scanned) if len(text) >= _MIN_CHARS else []
        for text, suspicion, scanned in zip(texts, suspicious(texts), _scanned(texts), strict=True)
    ]


def _find(text: str, suspicion: Suspicion | None, scanned: list[SecretHit]) -> list[SecretHit]:
    hits = list(scanned)
    if suspicion is not None:
        hits.extend(own_hits(text, suspicion=suspicion))
    if not hits:
        return []
    placeholders = [m.span() for m in _PLACEHOLDER.finditer(text)]
    return _merged(
        hit for hit in hits if not any(a < hit.end and hit.start < b for a, b in placeholders)
    )


def _merged(hits: Iterable[SecretHit]) -> list[SecretHit]:
    """Overlapping hits become one, of the kind that begins first and reaches furthest."""
    merged: list[SecretHit] = []
    for hit in sorted(hits, key=lambda h: (h.start, -h.end, h.kind)):
        if merged and hit.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = SecretHit(last.start, max(last.end, hit.end), last.kind)
        else:
            merged.append(hit)
    return merged


def _scanned(texts: Sequence[str]) -> list[list[SecretHit]]:
    """What kingfisher finds in each text.

    Many texts are scanned as one, since most of a scan is the same for a word and a page. Only
    those in which something was found are then scanned by themselves: a rule may look for its
    keyword at some distance, and must not find it in the text before.
    """
    found: list[list[SecretHit]] = [[] for _ in texts]
    blob, ends, members = bytearray(), list[int](), list[int]()

    def scan() -> None:
        spans = _spans(bytes(blob)) if blob else []
        suspects = {bisect_right(ends, at) for start, end, _ in spans for at in (start, end - 1)}
        for index in sorted(suspects):
            found[members[index]] = _kingfisher_hits(texts[members[index]])
        blob.clear()
        ends.clear()
        members.clear()

    for number, text in enumerate(texts):
        data = text.encode("utf-8", "replace")
        if len(data) > _BLOB_BYTES:
            found[number] = _kingfisher_hits(text)
            continue
        blob += data
        blob += _BETWEEN
        ends.append(len(blob))
        members.append(number)
        if len(blob) > _BLOB_BYTES:
            scan()
    scan()
    return found


_BLOB_BYTES = 1 << 18
_BETWEEN = b"\n" * 3


def _spans(data: bytes) -> list[tuple[int, int, str]]:
    """Start, end and kind of what kingfisher finds, in bytes."""
    return [
        (where["start_offset"], where["end_offset"], _kind_of(finding.rule_id))
        for finding in _scanner().scan(data)
        if finding.visible and finding.secret.lower() not in RULES.common_passwords
        if (where := finding.location)
    ]


def _kingfisher_hits(text: str) -> list[SecretHit]:
    data = text.encode("utf-8", "replace")
    is_ascii = len(data) == len(text)
    hits = []
    for first, last, kind in _spans(data):
        start, end = first, last
        if not is_ascii:
            start = len(data[:first].decode("utf-8", "replace"))
            end = start + len(data[first:last].decode("utf-8", "replace"))
        hits.append(SecretHit(start, end, kind))
    return hits


def _kind_of(rule_id: str) -> str:
    name = rule_id.lower().rsplit(".", 1)
    head = name[0].rsplit(".", 1)[-1] if name[-1].isdigit() else name[-1]
    return re.sub(r"[^a-z0-9]+", "-", head).strip("-") or "secret"


_Key = tuple[frozenset[str], int, int]
"""Names that are replaced, hash and length of a text: the text itself need not be kept."""
_Redacted = tuple[str, Counter[str]]


class Redactor:
    """Replaces secrets, people, e-mail addresses, home folders, hosts and addresses in text.

    `salt` makes the placeholders of one installation unlike those of another: without it, a
    guessed secret could be confirmed by its placeholder.
    """

    def __init__(self, *, salt: str = "") -> None:
        self.counts: Counter[str] = Counter()
        """Replacements by kind; values are never kept."""
        self._key = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._memo: dict[_Key, _Redacted | None] = {}
        self._n_memo_chars = 0

    def text(self, text: str, *, users: frozenset[str] = frozenset()) -> str:
        """`text` with placeholders.

        `users` are the people of the session, as `people_in` finds them: login names become
        `user`, full names a placeholder.
        """
        if len(text) < _MIN_CHARS:
            return text
        key = (users, hash(text), len(text))
        try:
            known = self._memo[key]
        except KeyError:
            self._forget()
            known = self._remember(key, text, find_secrets(text), has_host=True)
        if known is None:
            return text
        self.counts.update(known[1])
        return known[0]

    def prepare(self, texts: Iterable[str], *, users: frozenset[str] = frozenset()) -> None:
        """Redact many texts at once, which is faster; `text` then answers from memory.

        What was prepared before is forgotten.
        """
        self.prepare_groups([(users, texts)])

    def prepare_groups(self, groups: Iterable[tuple[frozenset[str], Iterable[str]]]) -> None:
        """Give the same for texts of several conversations, each with its `users`."""
        self._memo.clear()
        self._n_memo_chars = 0
        new: dict[_Key, str] = {}
        n_chars = 0
        for users, texts in groups:
            for text in texts:
                key = (users, hash(text), len(text))
                if len(text) < _MIN_CHARS or key in self._memo or key in new:
                    continue
                new[key] = text
                n_chars += len(text)
                if n_chars > _CHUNK_CHARS:
                    self._prepare(new)
                    new, n_chars = {}, 0
        self._prepare(new)

    def _prepare(self, new: dict[_Key, str]) -> None:
        texts = list(new.values())
        found, hosts = find_secrets_in(texts), matching(HOSTS_HEAD, texts)
        for (key, text), hits, has_host in zip(new.items(), found, hosts, strict=True):
            self._remember(key, text, hits, has_host=has_host)

    def _remember(
        self, key: _Key, text: str, hits: list[SecretHit], *, has_host: bool
    ) -> _Redacted | None:
        counts: Counter[str] = Counter()
        redacted = self._replaced(text, key[0], counts, hits, has_host=has_host)
        known = self._memo[key] = None if redacted == text else (redacted, counts)
        self._n_memo_chars += len(redacted) if known else 0
        return known

    def _forget(self) -> None:
        if len(self._memo) > _MEMO_ENTRIES or self._n_memo_chars > _MEMO_CHARS:
            self._memo.clear()
            self._n_memo_chars = 0

    def _replaced(
        self,
        text: str,
        users: frozenset[str],
        counts: Counter[str],
        hits: list[SecretHit],
        *,
        has_host: bool,
    ) -> str:
        if hits:
            parts: list[str] = []
            position = 0
            for hit in hits:
                counts[hit.kind] += 1
                parts += (text[position : hit.start], self._placeholder(hit.kind, text, hit))
                position = hit.end
            text = "".join([*parts, text[position:]])
        if "@" in text:
            text = self._without_emails(text, counts)
        for rule in _home_rules(text):
            text = rule.sub(lambda m: _home(m, counts), text)
        if users:

            def full_name(name: str) -> str:
                counts["name"] += 1
                return f"<NAME:{self._h8(name)}>"

            text, n_found = people(users).replaced(text, full_name)
            counts["user_name"] += n_found
        if has_host:

            def hidden(kind: str, value: str) -> str:
                counts[kind.lower()] += 1
                return f"<{kind}:{self._h8(value.lower())}>"

            text = without_hosts(text, hidden)
        return text

    def _placeholder(self, kind: str, text: str, hit: SecretHit) -> str:
        return f"<SECRET:{kind}:{self._h8(text[hit.start : hit.end])}>"

    def _h8(self, value: str) -> str:
        data = value.encode("utf-8", "replace")
        return hashlib.blake2b(data, digest_size=4, key=self._key).hexdigest()

    def _without_emails(self, text: str, counts: Counter[str]) -> str:
        parts: list[str] = []
        copied = end = 0
        for host in _EMAIL_HOST.finditer(text):
            at = host.start()
            name = _EMAIL_NAME.search(text, max(end, at - 64), at)
            if name is None:
                continue
            end = host.end()
            address = text[name.start() : end]
            if not _PUBLIC_EMAIL.search(address):
                counts["email"] += 1
                parts += (text[copied : name.start()], f"<EMAIL:{self._h8(address.lower())}>")
                copied = end
        return "".join([*parts, text[copied:]]) if parts else text


def _home(match: re.Match[str], counts: Counter[str]) -> str:
    name = match["name"]
    if name.lower() in RULES.common_logins:
        return match.group()
    counts["home"] += 1
    return f"{match['root']}user"


def _home_rules(text: str) -> list[re.Pattern[str]]:
    return [
        rule
        for word, rules in _HOMES.items()
        if word in text
        for literal, rule in rules
        if literal in text
    ]


def user_of(cwd: str | None) -> str | None:
    """Give the login name in a home folder path, if there is one."""
    match = next((m for rule in _home_rules(cwd or "") if (m := rule.search(cwd or ""))), None)
    return match["name"] if match and is_private_login(match["name"]) else None
