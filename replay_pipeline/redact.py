"""Secrets and personal data: found offline, replaced by stable typed placeholders.

Equal secrets become equal placeholders, so that actions stay comparable after redaction. The
scanner of kingfisher runs in this process and never opens a connection; its validators, which
do, are not used. What its rules miss is found by the rules below.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from kingfisher_sdk import Scanner

logger = logging.getLogger(__name__)

_MIN_CHARS = 6
_MEMO_LIMIT = 400_000

_PLACEHOLDER = re.compile(r"<(?:SECRET:[a-z0-9_-]+|EMAIL|HOST):[0-9a-f]{8}>")
_EMAIL = re.compile(
    r"(?<![\w.+%/:-])[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}(?![\w@])"
)
_PUBLIC_EMAIL = re.compile(
    r"^(?:no-?reply|git|user|you|me|test|foo|bar|alice|bob|admin|info|support|example)@"
    r"|@(?:[\w-]+\.)*(?:example\.(?:com|org|net)|test|local|invalid|localhost)$"
    r"|@(?:github\.com|gitlab\.com|bitbucket\.org)$",
    re.IGNORECASE,
)
_HOME = re.compile(
    r"(?P<root>/Users/|/home/|/mnt/c/Users/|[A-Za-z]:(?:\\\\?|/)Users(?:\\\\?|/))"
    r"(?P<name>[A-Za-z0-9][\w.-]{0,63}|[A-Za-z0-9][\w.-]{0,31} [A-Z][\w.-]{0,31}(?=[\\/]))"
)
_SLUG_HOME = re.compile(r"(?P<root>-(?:Users|home)-)(?P<name>[A-Za-z0-9]+)(?=-|\b)")
_COMMON_NAMES = frozenset(
    [
        "user",
        "users",
        "root",
        "admin",
        "administrator",
        "ubuntu",
        "debian",
        "runner",
        "vscode",
        "node",
        "app",
        "home",
        "dev",
        "shared",
        "public",
        "default",
        "work",
        "workspace",
        "claude",
        "agent",
        "coder",
        "test",
        "tester",
        "build",
        "builder",
        "docker",
        "guest",
        "git",
        "github",
        "gitlab",
        "jenkins",
        "postgres",
        "code",
        "src",
        "project",
        "projects",
        "repo",
        "repos",
        "data",
    ]
)


@dataclass(frozen=True, slots=True, order=True)
class SecretHit:
    """A secret at `text[start:end]`."""

    start: int
    end: int
    kind: str


@cache
def _scanner() -> Scanner:
    return Scanner()


def find_secrets(text: str) -> list[SecretHit]:
    """Every secret in `text`, in order, without overlaps; placeholders are no secrets."""
    if len(text) < _MIN_CHARS:
        return []
    hits = [*_kingfisher_hits(text), *_own_hits(text)]
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


def _kingfisher_hits(text: str) -> Iterator[SecretHit]:
    data = text.encode("utf-8", "replace")
    findings = _scanner().scan(data)
    if not findings:
        return
    is_ascii = len(data) == len(text)
    for finding in findings:
        if not finding.visible:
            continue
        where = finding.location
        start, end = where["start_offset"], where["end_offset"]
        if not is_ascii:
            start = len(data[:start].decode("utf-8", "replace"))
            end = start + len(data[where["start_offset"] : end].decode("utf-8", "replace"))
        yield SecretHit(start, end, _kind_of(finding.rule_id))


def _kind_of(rule_id: str) -> str:
    name = rule_id.lower().rsplit(".", 1)
    head = name[0].rsplit(".", 1)[-1] if name[-1].isdigit() else name[-1]
    return re.sub(r"[^a-z0-9]+", "-", head).strip("-") or "secret"


_OWN_RULES: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    (
        "aws-access-key-id",
        ("AKIA", "ASIA"),
        re.compile(r"(?<![A-Za-z0-9])(?P<secret>(?:AKIA|ASIA)[A-Z0-9]{16})(?![A-Za-z0-9])"),
    ),
    (
        "private-key",
        ("PRIVATE KEY",),
        re.compile(
            r"(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.{40,}?-----END [A-Z ]*KEY-----)", re.S
        ),
    ),
)
"""Kind, literals of which one must occur, and the rule with a group `secret`."""


def _own_hits(text: str) -> Iterator[SecretHit]:
    for kind, literals, rule in _OWN_RULES:
        if any(literal in text for literal in literals):
            for match in rule.finditer(text):
                yield SecretHit(*match.span("secret"), kind)


class Redactor:
    """Replaces secrets, e-mail addresses and home folders in text.

    `salt` makes the placeholders of one installation unlike those of another: without it, a
    guessed secret could be confirmed by its placeholder.
    """

    def __init__(self, *, salt: str = "") -> None:
        self.counts: Counter[str] = Counter()
        """Replacements by kind; values are never kept."""
        self._key = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._memo: dict[tuple[frozenset[str], int, int], tuple[str, Counter[str]] | None] = {}
        self._user_rules: dict[frozenset[str], re.Pattern[str] | None] = {}

    def text(self, text: str, *, users: frozenset[str] = frozenset()) -> str:
        """`text` with placeholders.

        `users` are login names, replaced where they stand as an account, a folder or the head
        of a branch name.
        """
        if len(text) < _MIN_CHARS:
            return text
        key = (users, hash(text), len(text))
        try:
            known = self._memo[key]
        except KeyError:
            counts: Counter[str] = Counter()
            redacted = self._replaced(text, users, counts)
            known = None if redacted == text else (redacted, counts)
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            self._memo[key] = known
        if known is None:
            return text
        self.counts.update(known[1])
        return known[0]

    def _replaced(self, text: str, users: frozenset[str], counts: Counter[str]) -> str:
        hits = find_secrets(text)
        if hits:
            parts: list[str] = []
            position = 0
            for hit in hits:
                counts[hit.kind] += 1
                parts += (text[position : hit.start], self._placeholder(hit.kind, text, hit))
                position = hit.end
            text = "".join([*parts, text[position:]])
        if "@" in text:
            text = _EMAIL.sub(lambda m: self._email(m, counts), text)
        if "sers" in text or "home" in text:
            text = _HOME.sub(lambda m: _home(m, counts), text)
            text = _SLUG_HOME.sub(lambda m: _home(m, counts), text)
        rule = self._rule_for(users)
        if rule is not None:
            text, n_names = rule.subn("user", text)
            if n_names:
                counts["user_name"] += n_names
        return text

    def _placeholder(self, kind: str, text: str, hit: SecretHit) -> str:
        return f"<SECRET:{kind}:{self._h8(text[hit.start : hit.end])}>"

    def _h8(self, value: str) -> str:
        data = value.encode("utf-8", "replace")
        return hashlib.blake2b(data, digest_size=4, key=self._key).hexdigest()

    def _email(self, match: re.Match[str], counts: Counter[str]) -> str:
        address = match.group()
        if _PUBLIC_EMAIL.search(address):
            return address
        counts["email"] += 1
        return f"<EMAIL:{self._h8(address.lower())}>"

    def _rule_for(self, users: frozenset[str]) -> re.Pattern[str] | None:
        if users not in self._user_rules:
            names = [re.escape(n) for n in sorted(users) if _is_private_name(n)]
            pattern = None
            if names:
                one = f"(?:{'|'.join(names)})"
                pattern = re.compile(
                    rf"(?<![\w.-]){one}(?=[@/\\])|(?<=[/\\~@]){one}(?![\w.-])"
                    rf"|(?<=[\w-] ){one}(?= +\w+ +\d)"
                )
            self._user_rules[users] = pattern
        return self._user_rules[users]


def _is_private_name(name: str) -> bool:
    return len(name) >= 3 and name.lower() not in _COMMON_NAMES


def _home(match: re.Match[str], counts: Counter[str]) -> str:
    name = match["name"]
    if name.lower() in _COMMON_NAMES:
        return match.group()
    counts["home"] += 1
    return f"{match['root']}user"


def user_of(cwd: str | None) -> str | None:
    """The login name in a home folder path, if there is one."""
    match = _HOME.match(cwd or "")
    return match["name"] if match and _is_private_name(match["name"]) else None
