"""Our own rules for secrets that a general scanner misses in coding sessions.

The rules are data in `secret_rules.toml`, and this module applies them. Every rule starts with a
literal that a plain search finds. A regular expression runs only at such a place, so most texts
cost a few dozen searches and no expression.
"""

import base64
import binascii
import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

import msgspec

MIN_CHARS = 8
_MAX_DEPTH = 2
_MAX_HEAD_CHARS = 12


class TokenRule(msgspec.Struct, frozen=True, dict=True):
    """A token with a recognizable form."""

    kind: str
    literals: tuple[str, ...]
    body: str
    """Pattern that must follow a literal."""
    before: str | None = None
    """Pattern that must come right before a literal from the middle of a token."""
    is_wordlike: bool = False
    """Whether ordinary names also begin with a literal, so that the body must not look like words."""

    @cached_property
    def expressions(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Return the patterns after and before a literal, in ASCII mode, so that both engines agree."""
        return re.compile(self.body, re.ASCII), re.compile(rf"(?:{self.before})\Z")

    @property
    def signal(self) -> str:
        """Return an expression, without look-around, for the common beginning of such tokens."""
        body = re.sub(r"\(\?[=!][^)]*\)", "", self.body)
        if counted := re.match(r"(.*?)\{(\d+)", body):
            body = f"{counted[1]}{{{min(int(counted[2]), _MAX_HEAD_CHARS)}}}"
        return f"(?:{'|'.join(map(re.escape, self.literals))}){body}"


class LineRule(msgspec.Struct, frozen=True, dict=True):
    """A secret that is recognizable by its line."""

    kind: str
    literals: tuple[str, ...]
    pattern: str
    """Pattern that must follow a literal. Its group `secret` is the value."""
    signal: str
    """An expression, without look-around, that matches wherever the rule may."""

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """Return the pattern that must follow a literal."""
        return re.compile(self.pattern)


class Rules(msgspec.Struct, frozen=True):
    """The contents of `secret_rules.toml`."""

    names: tuple[str, ...]
    common_pairs: str
    common_passwords: frozenset[str]
    common_logins: frozenset[str]
    wordlike_logins: frozenset[str]
    branch_words: frozenset[str]
    token: tuple[TokenRule, ...]
    line: tuple[LineRule, ...]


@dataclass(frozen=True, slots=True, order=True)
class SecretHit:
    """A secret at `text[start:end]`."""

    start: int
    end: int
    kind: str


def own_hits(
    text: str,
    depth: int = 0,
    *,
    signals: Collection[str] | None = None,
    assigned: Sequence[tuple[int, int]] | None = None,
) -> Iterator[SecretHit]:
    """Find secrets by our rules, in no particular order. They may overlap.

    Args:
        text: the text to search.
        depth: number of encodings around the text.
        signals: the `SIGNALS` found in it, if known.
        assigned: start and end of places that may assign a value to a name, if known.
    """
    families = SIGNALS if signals is None else signals
    if "token" in families:
        yield from _tokens(text)
    if "assigned" in families:
        for where in [(0, len(text))] if assigned is None else assigned:
            yield from _assignments(text, *where)
    if "line" in families:
        yield from _in_lines(text)
    if "key" in families:
        for match in _PEM.finditer(text):
            yield SecretHit(*match.span(), "private-key")
    if depth < _MAX_DEPTH:
        if "base64" in families:
            yield from _in_base64(text, depth)
        if "percent" in families:
            yield from _in_urls(text, depth)


# Tokens that are known by their own look.


def _ends(text: str, literal: str, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Return where each occurrence of a literal in `text[start:end]` ends."""
    position = text.find(literal, start, end)
    while position >= 0:
        yield position + len(literal)
        position = text.find(literal, position + 1, end)


def _tokens(text: str) -> Iterator[SecretHit]:
    for rule, literal in _TOKENS:
        for end in _ends(text, literal):
            match = rule.expressions[0].match(text, end)
            if match is not None:
                start = _start_of(rule, text, end - len(literal))
                is_word = rule.is_wordlike and _is_wordy(match.group())
                if start is not None and not is_word:
                    yield SecretHit(start, match.end(), rule.kind)


def _start_of(rule: TokenRule, text: str, position: int) -> int | None:
    if rule.before is not None:
        match = rule.expressions[1].search(text[max(0, position - 16) : position])
        return position - len(match.group()) if match else None
    if position and text[position - 1].isalnum() and not _is_escape(text, position):
        return None
    return position


def _is_escape(text: str, position: int) -> bool:
    """Return whether the letter before `position` ends a backslash or percent escape."""
    return text[position - 2 : position - 1] == "\\" or text[position - 3 : position - 2] == "%"


# Values that are known by the name they are given to.

_CLOSED = r"(?:\\*[\"'`]?\]?)"
_SIGN = (
    r"\s{0,8}(?:=>|:=|=|:(?!:)|\|)\s{0,8}|[\"']?,\s?(?=[\"'])"
    r"|[\"']?\s{1,8}(?:value|content)\s?=\s?|>(?:\s{0,8}</?\w{1,8}>){0,3}\s{0,8}"
    r"|</\w{1,8}>\s{0,8}<\w{1,8}>"
)
"""An assignment, the next cell of a table, the next argument, an attribute, or an element."""
_ASSIGNED = re.compile(
    r"(?P<rest>(?:[_-]?(?:KEY(?:_BASE)?|HASH_SALT|VALUE|ID|Id|id|Key|key(?:_base)?)|s)?)"
    rf"{_CLOSED}(?P<sign>{_SIGN})"
    r"(?P<quote>(?:\\*[\"'`])?)(?P<secret>[^\s\"'`\\<]{8,400}+)"
)
_NEXT_FIELD = re.compile(r"&(?=[\w.-]+=)")
_TRAILING = ",;)]}>|&"
_DUMMY = re.compile(
    r"x{4}|\*{3}|\.{3}|your|example|changeme|placeholder|redacted|dummy|sample|insert|todo"
    r"|process\.env|os\.environ|getenv|import\.meta|secrets?\.|^\$|\$[({]",
    re.IGNORECASE,
)


_EXPRESSION = re.compile(
    r"[$%@/.<{\[(-]|[A-Za-z_][\w.]*[(\[<{]|\w+://|[A-Za-z_]+\.[A-Za-z_.]+(?!\w)"
)
_PAGE = re.compile(
    r"(?:next|page|continuation|cursor|sync|change|client[ _-]?request|idempotency)[ _-]?token\Z",
    re.IGNORECASE,
)
"""A place in a list, or the name of a request: they open nothing."""
_PLACE = re.compile(r"[\w.@~-]*(?:/[\w.@~-]+)+\.[A-Za-z]\w{0,4}(?::\d+(?:[:-]\d+)?)?")
"""A file, and a line in it."""
_HEX = re.compile(r"[0-9a-fA-F]{8,}(?:[-:][0-9a-fA-F]{4,})*")


def _assignments(text: str, first: int, last: int) -> Iterator[SecretHit]:
    for name in RULES.names:
        is_password = name.lower() in {"assword", "asswd", "pwd", "passphrase"}
        for end in _ends(text, name, first, last):
            match = _ASSIGNED.match(text, end)
            if match is None or _PAGE.search(text, max(0, end - 24), end):
                continue
            value = match["secret"]
            if not match["quote"]:
                value = _NEXT_FIELD.split(value, 1)[0].rstrip(_TRAILING)
            if _is_value(value, is_quoted=bool(match["quote"]), is_password=is_password):
                start = match.start("secret")
                kind = "password" if is_password else "assigned-secret"
                yield SecretHit(start, start + len(value), kind)


def _is_value(value: str, *, is_quoted: bool, is_password: bool) -> bool:
    n_signs = len(set("!@#$%^&*+~?") & set(value))
    if not is_quoted and n_signs < 4 and _EXPRESSION.match(value):
        # A token may have dots in it; a chain of names is code.
        is_token = "(" not in value and "[" not in value and value[0].isalnum()
        if not is_token or "://" in value or _is_wordy(value):
            return False
    return is_random(value, is_password=is_password)


def is_random(value: str, *, is_password: bool = False) -> bool:
    """Return whether a value looks like a random or chosen secret, and not like a word."""
    if len(value) < MIN_CHARS or _DUMMY.search(value) or _PLACE.fullmatch(value):
        return False
    has_digit = any(c.isdigit() for c in value)
    has_upper = any(c.isupper() for c in value)
    has_lower = any(c.islower() for c in value)
    has_sign = any(not c.isalnum() and c not in "_-./:" for c in value)
    n_classes = has_digit + has_upper + has_lower + has_sign
    bits = entropy(value)
    if _HEX.fullmatch(value) and not is_password:
        is_grouped = ":" in value or len(value) >= 24
        return is_grouped and bits > 2.9 and not value.isdigit()
    if is_password:
        is_wordy = re.fullmatch(r"[a-z]+[_.:-]?\d{0,3}|[\w.-]+\.[a-z]{2,5}", value) is not None
        return has_digit and n_classes >= 3 and bits > 2.7 and not is_wordy
    is_mixed = has_digit and (has_upper or has_lower)
    if len(value) < 20:
        n_digits = sum(c.isdigit() for c in value)
        return (
            len(value) >= 14
            and is_mixed
            and n_digits >= 2
            and bits > 3.1
            and value.isalnum()
            and not _is_wordy(value)
        )
    return is_mixed and bits > 3.3 and not _is_wordy(value)


_LETTERS = re.compile(r"[a-z]{3,}|[A-Z]{3,}|[A-Z][a-z]{2,}")
_MIN_PAIRS = 5
_WORDY_SHARE = 0.5
"""Of pairs of letters that are common: words and names have two thirds, random letters a fifth."""


def _is_wordy(value: str) -> bool:
    """Return whether much of a value is words, as in paths and identifiers."""
    runs = [run.lower() for run in _LETTERS.findall(value)]
    pairs = [run[i : i + 2] for run in runs for i in range(len(run) - 1)]
    if len(pairs) < _MIN_PAIRS:
        return False
    if sum(map(len, runs)) < 0.45 * len(value):
        return False
    return sum(pair in _PAIRS for pair in pairs) > _WORDY_SHARE * len(pairs)


def entropy(value: str) -> float:
    """Return the Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


# Secrets that are known by the line they stand in.


def _in_lines(text: str) -> Iterator[SecretHit]:
    for rule, literal in _LINES:
        for end in _ends(text, literal):
            match = rule.expression.match(text, end)
            if match is not None and _fits(rule.kind, match["secret"]):
                yield SecretHit(*match.span("secret"), rule.kind)


def _fits(kind: str, value: str) -> bool:
    if kind == "url-password":
        return not (
            _DUMMY.search(value) or value.lower() in RULES.common_passwords or value.isdigit()
        )
    if kind == "basic-auth":
        return ":" in decoded_base64(value)
    if kind == "bearer-token":
        return is_random(value)
    return is_random(value, is_password=True)


_PEM = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:\s|\\+[nrt]|[\d\u2192|>:\"',])*+[A-Za-z0-9+/]{16,}+={0,2})++"
    r"(?:(?:\s|\\+[nrt]|[\d\u2192|>:\"',])*+[A-Za-z0-9+/]{1,15}+={0,2})?"
    r"(?:(?:\s|\\+[nrt]|[\d\u2192|>:\"',=])*+-----END [A-Z0-9 ]+-----)?"
)

# Secrets inside an encoding.

_ASCII_GROUP = r"[A-Za-f][A-HQ-Xg-nw-z0-3][ABEFIJMNQRUVYZcdghklopstwx014589][A-Za-z0-9+/_-]"
"""Four base64 digits that stand for three bytes below 128."""
_BASE64 = re.compile(rf"(?:{_ASCII_GROUP}){{6,}}+[A-Za-z0-9+/_-]{{0,3}}={{0,2}}")
_BASE64_HEAD = re.compile(r"[A-Za-z0-9+/_-]*\Z")
_URL_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}(?:[\w.~+-]|%[0-9A-Fa-f]{2})*")
_URL_HEAD = re.compile(r"[\w.~+-]*\Z")
_PRINTABLE = frozenset(range(32, 127)) | {9, 10, 13}


def _in_base64(text: str, depth: int) -> Iterator[SecretHit]:
    for match in _BASE64.finditer(text):
        hit = next(own_hits(decoded_base64(match.group()), depth + 1), None)
        if hit is not None:
            head = _BASE64_HEAD.search(text, max(0, match.start() - 3), match.start())
            start = head.start() if head is not None else match.start()
            yield SecretHit(start, match.end(), hit.kind)


def _in_urls(text: str, depth: int) -> Iterator[SecretHit]:
    for match in _URL_ENCODED.finditer(text):
        head = _URL_HEAD.search(text, max(0, match.start() - 200), match.start())
        start = head.start() if head is not None else match.start()
        hit = next(own_hits(unquote(text[start : match.end()]), depth + 1), None)
        if hit is not None:
            yield SecretHit(start, match.end(), hit.kind)


def decoded_base64(value: str) -> str:
    """Return the text in a base64 value; empty if there is none."""
    body = value.rstrip("=").replace("-", "+").replace("_", "/")
    if not _is_text(body[:24]):
        return ""
    try:
        data = base64.b64decode(body[: len(body) // 4 * 4] + _padded(body))
    except (binascii.Error, ValueError):
        return ""
    return data.decode("ascii") if _PRINTABLE.issuperset(data) else ""


def _padded(body: str) -> str:
    rest = body[len(body) // 4 * 4 :]
    return rest + "=" * (4 - len(rest)) if len(rest) > 1 else ""


def _is_text(head: str) -> bool:
    try:
        data = base64.b64decode(head[: len(head) // 4 * 4])
    except (binascii.Error, ValueError):
        return False
    return _PRINTABLE.issuperset(data)


# What a linear-time engine looks for in many texts at once, to spare nearly all of them the rest. It
# is made from the rules, so that no rule can be forgotten here.

ESCAPED_SIGNAL = "escaped"
"""Matches an escaped character of JSON, HTML, or JavaScript in an address or between letters."""
_ESCAPES = {
    "\\/": "/", "\\u002F": "/", "\\u002f": "/", "\\u0026": "&", "\\u003D": "=", "\\u003d": "=",
    "&#x2F;": "/", "&#x2f;": "/", "&#47;": "/", "&amp;": "&", "&#38;": "&", "&quot;": '"', "&#34;": '"',
    "&#39;": "'", "&#x27;": "'", "&#x3D;": "=", "&#x3d;": "=", "&#61;": "=", "&lt;": "<", "&gt;": ">",
}  # fmt: skip
_ESCAPE = re.compile("|".join(map(re.escape, _ESCAPES)))


def unescaped(text: str) -> tuple[str, list[int]]:
    """Return a text with these characters unescaped, and the original position of each character."""
    parts: list[str] = []
    places: list[int] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        parts += (text[end : match.start()], _ESCAPES[match[0]])
        places += range(end, match.start() + 1)
        end = match.end()
    places += range(end, len(text) + 1)
    return "".join([*parts, text[end:]]), places


CUT_SIGNAL = "cut"
"""Matches a value that ends where a query or an element continues. Our own rules don't need it."""


def _signals_of(rules: Rules) -> dict[str, str]:
    """Return the expressions, by name, of which one is found wherever `own_hits` finds something."""
    assigned = (
        rf"(?:{'|'.join(map(re.escape, rules.names))})[A-Za-z_-]{{0,10}}"
        r"[\\\"'\x60\]]*(?:\s*[=:,|>][=>]?|</\w{1,8}>|\s+(?:value|content)\s?=)"
        r"(?:\s*</?\w{1,8}>){0,3}\s*[\\\"'\x60]*[^\s\"'\x60\\]*[0-9]"
    )  # A name, a sign and a value with a digit, which every value that looks like a secret has.
    return {
        "token": "|".join(rule.signal for rule in rules.token),
        "assigned": assigned,
        "line": "|".join(rule.signal for rule in rules.line),
        "key": "PRIVATE KEY",
        "base64": rf"(?:{_ASCII_GROUP}){{6}}",
        "percent": r"%[0-9A-Fa-f]{2}",
        ESCAPED_SIGNAL: r"[A-Za-z0-9:](?:\\/|\\u00(?:2[fF6]|3[dD])|&#x?(?:2[fF7]|3[dD489]|47|61);|&(?:amp|quot);)"
        r"[A-Za-z0-9/\\&=]",
        CUT_SIGNAL: r"[=>\"'][\w.~+/=:%-]{16,512}[&<]",
    }


RULES = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("secret_rules.toml").read_text("utf-8")), Rules
)
SIGNALS: Mapping[str, str] = _signals_of(RULES)
_PAIRS = frozenset(RULES.common_pairs.split())
_TOKENS = [(rule, literal) for rule in RULES.token for literal in rule.literals]
_LINES = [(rule, literal) for rule in RULES.line for literal in rule.literals]
