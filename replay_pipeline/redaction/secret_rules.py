"""Our own rules for secrets: what a general scanner misses in the texts of coding sessions.

Every rule starts from a literal that is found by plain search; a regular expression runs only
where one stands. So most texts cost a few dozen searches and no expression at all.
"""

import base64
import binascii
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow.compute as pc

from replay_pipeline.storage.arrays import string_array

MIN_CHARS = 8
_MAX_DEPTH = 2


@dataclass(frozen=True, slots=True, order=True)
class SecretHit:
    """A secret at `text[start:end]`."""

    start: int
    end: int
    kind: str


class Suspicion(NamedTuple):
    """Which of the slow rules may find something in a text."""

    has_token: bool = True
    is_encoded: bool = True


_ANYTHING = Suspicion()


def own_hits(text: str, depth: int = 0, *, suspicion: Suspicion = _ANYTHING) -> Iterator[SecretHit]:
    """Secrets that our rules find, in no order; they may overlap."""
    if suspicion.has_token:
        yield from _tokens(text)
    yield from _assignments(text)
    yield from _in_lines(text)
    if "PRIVATE KEY" in text:
        for match in _PEM.finditer(text):
            yield SecretHit(*match.span(), "private-key")
    if suspicion.is_encoded and depth < _MAX_DEPTH:
        yield from _encoded(text, depth)


# Tokens that are known by their own look.

_TOKENS: tuple[tuple[str, str, str], ...] = (
    ("github-token", "ghp_", r"[A-Za-z0-9]{36,255}"),
    ("github-token", "gho_", r"[A-Za-z0-9]{36,255}"),
    ("github-token", "ghu_", r"[A-Za-z0-9]{36,255}"),
    ("github-token", "ghs_", r"[A-Za-z0-9]{36,255}"),
    ("github-token", "ghr_", r"[A-Za-z0-9]{36,255}"),
    ("github-token", "github_pat_", r"\w{60,}"),
    ("gitlab-token", "glpat-", r"[\w-]{20,}"),
    ("slack-token", "xox", r"[abeprs]-[\w-]{20,}"),
    ("slack-webhook", "hooks.slack.com", r"(?:/|%2F)(?:services|workflows)(?:[\w/]|%2F){30,}"),
    ("aws-access-key-id", "AKIA", r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("aws-access-key-id", "ASIA", r"[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("google-api-key", "AIza", r"[\w-]{35}"),
    ("google-client-secret", "GOCSPX-", r"[\w-]{28}"),
    ("google-token", "ya29.", r"[\w-]{60,}"),
    ("anthropic-key", "sk-ant-", r"[\w-]{40,}"),
    ("openrouter-key", "sk-or-v1-", r"[0-9a-f]{40,}"),
    ("openai-key", "sk-proj-", r"[\w-]{40,}"),
    ("openai-key", "sk-svcacct-", r"[\w-]{40,}"),
    ("openai-key", "sk-", r"(?=[A-Za-z]*\d)[A-Za-z0-9]{32,}"),
    ("huggingface-token", "hf_", r"[A-Za-z0-9]{30,}(?![\w])"),
    ("replicate-token", "r8_", r"[A-Za-z0-9]{30,}"),
    ("groq-key", "gsk_", r"[A-Za-z0-9]{40,}"),
    ("xai-key", "xai-", r"[A-Za-z0-9]{60,}"),
    ("perplexity-key", "pplx-", r"[A-Za-z0-9]{40,}"),
    ("stripe-key", "k_live_", r"[A-Za-z0-9]{16,}"),
    ("stripe-key", "k_test_", r"[A-Za-z0-9]{24,}"),
    ("sendgrid-key", "SG.", r"[\w-]{20,}\.[\w-]{40,}"),
    ("mailgun-key", "key-", r"[0-9a-f]{32}(?![\w-])"),
    ("twilio-key", "SK", r"[0-9a-f]{32}(?![\w-])"),
    ("npm-token", "npm_", r"(?=[A-Za-z]*\d)[A-Za-z0-9]{36}(?!\w)"),
    ("pypi-token", "pypi-", r"[\w-]{60,}"),
    ("docker-token", "dckr_pat_", r"[\w-]{24,}"),
    ("digitalocean-token", "do", r"[opr]_v1_[0-9a-f]{40,}"),
    ("telegram-token", ":AA", r"[\w-]{33}(?![\w-])"),
    ("shopify-token", "shp", r"(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    ("linear-key", "lin_api_", r"[A-Za-z0-9]{32,}"),
    ("notion-token", "ntn_", r"[A-Za-z0-9]{40,}"),
    ("notion-token", "secret_", r"(?=[A-Za-z]*\d)[A-Za-z0-9]{43}(?!\w)"),
    ("figma-token", "figd_", r"[\w-]{36,}"),
    ("postman-key", "PMAK-", r"[0-9a-f]{24}-[0-9a-f]{34}"),
    ("databricks-token", "dapi", r"[0-9a-f]{32}"),
    ("vault-token", "hvs.", r"[\w-]{24,}"),
    ("terraform-token", ".atlasv1.", r"[\w-]{60,}"),
    ("grafana-token", "glsa_", r"\w{32,}"),
    ("grafana-token", "glc_", r"[\w=+/]{32,}"),
    ("new-relic-key", "NRAK-", r"[A-Z0-9]{27}"),
    ("supabase-token", "sbp_", r"[0-9a-f]{40}"),
    ("doppler-token", "dp.", r"(?:pt|st|ct|sa)\.\w{40,}"),
    ("atlassian-token", "ATATT3", r"[\w=-]{100,}"),
    ("pinecone-key", "pcsk_", r"\w{50,}"),
    ("langsmith-key", "lsv2_", r"(?:pt|sk)_\w{32,}"),
    ("modal-token", "ak-", r"(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{22}(?![\w-])"),
    ("modal-token", "as-", r"(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{22}(?![\w-])"),
    ("netlify-token", "nfp_", r"[A-Za-z0-9]{36,}"),
    ("age-key", "AGE-SECRET-KEY-1", r"[A-Z0-9]{50,}"),
    ("jwt", "eyJ", r"[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{16,}"),
)
"""Kind, literal, and what must follow it."""

_BODIES = tuple((kind, literal, re.compile(body)) for kind, literal, body in _TOKENS)
_WORDLIKE = frozenset({"modal-token", "notion-token", "npm-token"})
"""Kinds whose literal also begins ordinary names: these must not read like words."""
_BEFORE = {
    "telegram-token": re.compile(r"(?<!\d)\d{8,10}$"),
    "terraform-token": re.compile(r"[A-Za-z0-9]{14}$"),
    "stripe-key": re.compile(r"(?<![A-Za-z0-9])[sr]$"),
}
"""Kinds whose literal stands in the middle, and what must stand before it."""


def _tokens(text: str) -> Iterator[SecretHit]:
    for kind, literal, body in _BODIES:
        position = text.find(literal)
        while position >= 0:
            match = body.match(text, position + len(literal))
            if match is not None:
                start = _start_of(kind, text, position)
                is_word = kind in _WORDLIKE and _is_wordy(match.group())
                if start is not None and not is_word:
                    yield SecretHit(start, match.end(), kind)
            position = text.find(literal, position + 1)


def _start_of(kind: str, text: str, position: int) -> int | None:
    before = _BEFORE.get(kind)
    if before is not None:
        match = before.search(text[max(0, position - 16) : position])
        return position - len(match.group()) if match else None
    if position and text[position - 1].isalnum() and not _is_escape(text, position):
        return None
    return position


def _is_escape(text: str, position: int) -> bool:
    """Whether the letter before `position` ends a backslash or percent escape."""
    return text[position - 2 : position - 1] == "\\" or text[position - 3 : position - 2] == "%"


# Values that are known by the name they are given to.

_NAMES = (
    "assword",
    "ASSWORD",
    "asswd",
    "ASSWD",
    "PWD",
    "ecret",
    "ECRET",
    "oken",
    "OKEN",
    "pi_key",
    "piKey",
    "pikey",
    "pi-key",
    "pi-Key",
    "PI_KEY",
    "PI-KEY",
    "ccess_key",
    "CCESS_KEY",
    "ccessKey",
    "ccountKey",
    "CCOUNT_KEY",
    "rivate_key",
    "RIVATE_KEY",
    "redential",
    "REDENTIAL",
    "passphrase",
    "PASSPHRASE",
)
_ASSIGNED = re.compile(
    r"(?P<rest>(?:_?(?:KEY(?:_BASE)?|HASH_SALT|VALUE)|Key|_?key(?:_base)?|s)?)"
    r"(?:\\*[\"'`]?\]?)(?P<sign>\s{0,8}(?:=>|:=|=|:(?!:))\s{0,8}|[\"']?,\s?(?=[\"']))"
    r"(?P<quote>(?:\\*[\"'`])?)(?P<secret>[^\s\"'`\\]{8,200}+)"
)
_TRAILING = ",;)]}>|&"
_DUMMY = re.compile(
    r"x{4}|\*{3}|\.{3}|your|example|changeme|placeholder|redacted|dummy|sample|insert|todo"
    r"|process\.env|os\.environ|getenv|import\.meta|secrets?\.|^\$|\$[({]",
    re.IGNORECASE,
)


_EXPRESSION = re.compile(r"[$%@/.<{\[(-]|[A-Za-z_][\w.]*[(\[<{]|\w+://|[A-Za-z_]+\.[A-Za-z_.]+")


def _assignments(text: str) -> Iterator[SecretHit]:
    for name in _NAMES:
        position = text.find(name)
        while position >= 0:
            end = position + len(name)
            match = _ASSIGNED.match(text, end)
            if match is not None:
                value = match["secret"]
                if not match["quote"]:
                    value = value.rstrip(_TRAILING)
                is_password = name.lower() in {"assword", "asswd", "pwd", "passphrase"}
                if _is_value(value, is_quoted=bool(match["quote"]), is_password=is_password):
                    start = match.start("secret")
                    kind = "password" if is_password else "assigned-secret"
                    yield SecretHit(start, start + len(value), kind)
            position = text.find(name, end)


def _is_value(value: str, *, is_quoted: bool, is_password: bool) -> bool:
    n_signs = len(set("!@#$%^&*+~?") & set(value))
    if not is_quoted and n_signs < 4 and _EXPRESSION.match(value):
        return False
    return is_random(value, is_password=is_password)


def is_random(value: str, *, is_password: bool = False) -> bool:
    """Whether a value looks drawn or chosen as a secret, and not like a word or a name."""
    if len(value) < MIN_CHARS or _DUMMY.search(value):
        return False
    has_digit = any(c.isdigit() for c in value)
    has_upper = any(c.isupper() for c in value)
    has_lower = any(c.islower() for c in value)
    has_sign = any(not c.isalnum() and c not in "_-./:" for c in value)
    n_classes = has_digit + has_upper + has_lower + has_sign
    bits = entropy(value)
    if re.fullmatch(r"[0-9a-fA-F]+", value):
        return len(value) >= 24 and bits > 3.0 and not value.isdigit()
    if is_password:
        is_wordy = re.fullmatch(r"[a-z]+[_.:-]?\d{0,3}|[\w.-]+\.[a-z]{2,5}", value) is not None
        return has_digit and n_classes >= 3 and bits > 2.7 and not is_wordy
    is_mixed = has_digit and (has_upper or has_lower)
    return len(value) >= 20 and is_mixed and bits > 3.6 and not _is_wordy(value)


_WORD = re.compile(r"[A-Z]?[a-z]{4,}|[A-Z]{5,}")


def _is_wordy(value: str) -> bool:
    """Whether much of a value is words, as in paths and identifiers."""
    return sum(len(word) for word in _WORD.findall(value)) > 0.45 * len(value)


def entropy(value: str) -> float:
    """Shannon entropy in bits per character."""
    counts = Counter(value)
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())


# Secrets that are known by the line they stand in.

_URL_PASSWORD = re.compile(
    r"[^\s:@/\"'`<>{}$\\]{0,64}:(?P<secret>[^\s:@/\"'`<>{}\\]{4,128})@(?=[\w\[-])"
)
_BEARER = re.compile(r"[ :]\s{0,4}(?P<secret>[\w.~+/-]{20,}={0,2})")
_BASIC = re.compile(r" (?P<secret>[A-Za-z0-9+/]{12,}={0,2})")
_USER_FLAG = re.compile(r"[ =]?[\"']?[\w.@-]{1,64}:(?P<secret>[^\s\"'\\]{6,128})")
_PASSWORD_FLAG = re.compile(r"[ =]\\*[\"']?(?P<secret>[^\s\"'\\<>$][^\s\"'\\<>]{7,128})")
_LINES: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("url-password", "://", _URL_PASSWORD),
    ("bearer-token", "earer", _BEARER),
    ("basic-auth", "asic", _BASIC),
    ("password", " -u", _USER_FLAG),
    ("password", "--user", _USER_FLAG),
    ("password", "sshpass -p", _PASSWORD_FLAG),
    ("password", "--password", _PASSWORD_FLAG),
    ("password", " password", _PASSWORD_FLAG),
)


def _in_lines(text: str) -> Iterator[SecretHit]:
    for kind, literal, rule in _LINES:
        position = text.find(literal)
        while position >= 0:
            end = position + len(literal)
            match = rule.match(text, end)
            if match is not None and _fits(kind, match["secret"]):
                yield SecretHit(*match.span("secret"), kind)
            position = text.find(literal, end)


COMMON_PASSWORDS = frozenset(
    {"password", "passwd", "pass", "secret", "postgres", "root", "admin", "user", "test", "guest"}
    | {"token", "pwd", "mysql", "redis", "rabbit", "rabbitmq"}
)
"""Values that stand for a password in examples and local set-ups."""


def _fits(kind: str, value: str) -> bool:
    if kind == "url-password":
        return not (_DUMMY.search(value) or value.lower() in COMMON_PASSWORDS or value.isdigit())
    if kind == "basic-auth":
        return ":" in _decoded_base64(value)
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
_BASE64_HEAD = re.compile(r"[A-Za-z0-9+/_-]*$")
_URL_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}(?:[\w.~+-]|%[0-9A-Fa-f]{2})*")
_URL_HEAD = re.compile(r"[\w.~+-]*$")
_PRINTABLE = frozenset(range(32, 127)) | {9, 10, 13}


def _encoded(text: str, depth: int) -> Iterator[SecretHit]:
    for match in _BASE64.finditer(text):
        hit = next(own_hits(_decoded_base64(match.group()), depth + 1), None)
        if hit is not None:
            head = _BASE64_HEAD.search(text, max(0, match.start() - 3), match.start())
            start = head.start() if head is not None else match.start()
            yield SecretHit(start, match.end(), hit.kind)
    for match in _URL_ENCODED.finditer(text):
        head = _URL_HEAD.search(text, max(0, match.start() - 200), match.start())
        start = head.start() if head is not None else match.start()
        hit = next(own_hits(unquote(text[start : match.end()]), depth + 1), None)
        if hit is not None:
            yield SecretHit(start, match.end(), hit.kind)


def _decoded_base64(value: str) -> str:
    """The text in a base64 value; empty if there is none."""
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


# One pass of a linear-time engine over many texts at once, to spare nearly all of them the rest.

_SIGNALS = (
    r"gh[opusr]_\w{8}|github_pat_|glpat-|xox[abeprs]-|hooks\.slack\.com|AKIA[A-Z0-9]{4}"
    r"|ASIA[A-Z0-9]{4}|AIza[\w-]{4}|GOCSPX-|ya29\.|sk-(?:ant|or|proj|svcacct)-|sk-[A-Za-z0-9]{12}"
    r"|hf_[A-Za-z0-9]{12}|r8_[A-Za-z0-9]{12}|gsk_|xai-\w{8}|pplx-|k_live_|k_test_\w{8}|SG\.[\w-]{8}"
    r"|key-[0-9a-f]{12}|SK[0-9a-f]{12}|npm_[A-Za-z0-9]{12}|pypi-[\w-]{12}|dckr_pat_|do[opr]_v1_"
    r"|:AA[\w-]{12}|shp(?:at|ca|pa|ss)_|lin_api_|ntn_\w{8}|secret_[A-Za-z0-9]{12}|figd_|PMAK-"
    r"|dapi[0-9a-f]{8}|hvs\.[\w-]{8}|\.atlasv1\.|glsa_|glc_\w{8}|NRAK-|sbp_[0-9a-f]{8}"
    r"|dp\.(?:pt|st|ct|sa)\.|ATATT3|pcsk_|lsv2_|a[ks]-[A-Za-z0-9]{12}|nfp_\w{8}|AGE-SECRET-KEY"
    r"|eyJ[\w-]{8}|PRIVATE KEY|://[^\s/@:]*:[^\s/@]+@|earer[ :]\s*[\w.~+/-]{8}|asic [A-Za-z0-9+/]{8}"
    r"|-u[ =]?[\"']?[\w.@-]+:\S|--user[ =]?[\"']?[\w.@-]+:\S|sshpass -p|--password[ =]| password[ =]"
    r"|(?:assw(?:or)?d|ASSW(?:OR)?D|PWD|ecret|ECRET|oken|OKEN|[pP]i[_-]?[kK]ey|PI[_-]KEY|ccess_?[kK]ey"
    r"|CCESS_KEY|ccountKey|CCOUNT_KEY|rivate_key|RIVATE_KEY|redential|REDENTIAL|passphrase|PASSPHRASE)"
    r"[A-Za-z_]{0,10}[\\\"'\x60\]]*\s*[=:,][=>]?\s*[\\\"'\x60]*[^\s\"'\x60\\]*[0-9]"
)
_ENCODED = rf"(?:{_ASCII_GROUP}){{6}}|%[0-9A-Fa-f]{{2}}"
_SIGNAL = f"{_SIGNALS}|{_ENCODED}"

_BODY_HEAD = re.compile(r"(?:\(\?=.*?\))?(?P<class>\[[A-Za-z0-9-]+\])(?:\{(?P<n>\d+))?")


def _token_head(literal: str, body: str) -> str:
    """What every token of a kind begins with, in terms that both engines read alike."""
    match = _BODY_HEAD.match(body)
    if match is None:
        return re.escape(literal)
    return f"{re.escape(literal)}{match['class']}{{{min(int(match['n'] or 1), 12)}}}"


_TOKEN_HEADS = "|".join(_token_head(literal, body) for _, literal, body in _TOKENS)


def suspicious(texts: Sequence[str]) -> list[Suspicion | None]:
    """For each text, what `own_hits` might find in it; `None` for nothing at all."""
    found: list[Suspicion | None] = [None] * len(texts)
    positions = [i for i, flag in enumerate(_matching(_SIGNAL, texts)) if flag]
    if positions:
        suspects = [texts[i] for i in positions]
        families = _matching(_TOKEN_HEADS, suspects), _matching(_ENCODED, suspects)
        for i, has_token, is_encoded in zip(positions, *families, strict=True):
            found[i] = Suspicion(has_token, is_encoded)
    return found


def _matching(pattern: str, texts: Sequence[str]) -> list[bool]:
    array, options = string_array(texts), pc.MatchSubstringOptions(pattern)
    return pc.call_function("match_substring_regex", [array], options).to_pylist()
