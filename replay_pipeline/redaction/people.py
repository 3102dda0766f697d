"""Names of people, hosts and addresses: what is not secret, and tells who and where somebody is."""

import ipaddress
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from replay_pipeline.redaction.secret_rules import RULES

_MIN_LOGIN_CHARS = 3
_MIN_PLAIN_CHARS = 4
"""A shorter login name is replaced only where an account stands: it may be a word of code."""

_HOME = re.compile(r"(?:/Users/|/home/|Users\\{1,4})([A-Za-z0-9][\w.-]{0,63})")
_AUTHOR = re.compile(
    r"(?:[Aa]uthor|[Cc]ommit(?:ter)?|[Tt]agger|-by|-By|user\.name)[:= ]{1,3}\"?"
    r"([A-Z][\w.'-]*(?: [A-Z][\w.'-]*){1,3})\"?(?= <|\n|\"|$)"
)
_ACCOUNT = re.compile(
    r"\"login\\*\": ?\\*\"(?P<login>[A-Za-z][\w-]*)\\*\""
    r"(?:,\s*\\*\"name\\*\": ?\\*\"(?P<name>[A-Z][^\"\\]{2,60} [^\"\\]{2,60}))?"
)
_SIGNS = (
    "/Users/", "/home/", "Users\\", "uthor", "ommit", "agger", "-by", "-By", "user.name", "login"
)  # fmt: skip
BRANCH_SIGNS = ("origin/", "branch", "worktrees/", "pull request")
_BRANCH = re.compile(
    r"(?:\borigin/|\bfrom [\w.-]+/|\b(?:into|branch) '?|worktrees/)(?P<head>[A-Za-z][\w-]{2,38})(?=/[\w-]+)"
)
_NOBODY = re.compile(r"\b(?:Claude|Copilot|Test|User|Unknown|Name|GitHub|Bot|Date|Merge|Code)\b")

HOSTS_HEAD = (
    r"\d\.\d{1,3}\.\d{1,3}\.\d|\.(?:local|lan|internal|corp)\b|MacBook|DESKTOP-|LAPTOP-|iMac"
    r"|(?:Darwin|Linux) [\w.-]+ \d"
)
"""Found wherever a host or an address may stand, by a linear-time engine."""
_HOST = re.compile(
    r"(?:(?<=://)|(?<![\w./@-]))(?P<mdns>[A-Za-z][\w-]*\.(?:local|lan|internal|corp))(?![\w/.(-])"
    r"|(?P<device>\b[\w-]*(?:MacBook|DESKTOP-[A-Z0-9]{5}|LAPTOP-[A-Z0-9]{5}|iMac)[\w-]*(?:\.\w+)?)"
    r"|\b(?:Darwin|Linux) (?P<uname>[A-Za-z][\w.-]*)(?= \d+\.\d+)"
)
_KNOWN_HOSTS = frozenset({"settings.local", "env.local", "host.docker.internal", "config.local"})
_DEVICES = frozenset({"macbook", "imac", "macbookpro", "macbookair"})
_ADDRESS = re.compile(r"(?<![\w./:-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.-])")
_VERSION = re.compile(r"(?:version\W{1,6}|[=~<>^v@]\s?)\Z", re.IGNORECASE)
_KNOWN_ADDRESSES = frozenset({"8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "1.2.3.4"})

Placeholder = Callable[[str, str], str]
"""Names a kind and a value; gives what stands for it."""


def people_in(texts: Iterable[str]) -> frozenset[str]:
    """Collect login names and full names: of home folders, and of whoever wrote a commit."""
    found: set[str] = set()
    for text in texts:
        if any(sign in text for sign in _SIGNS):
            found.update(name.rstrip(".") for name in _HOME.findall(text))
            found.update(name for name in _AUTHOR.findall(text) if not _NOBODY.search(name))
        if any(sign in text for sign in BRANCH_SIGNS):
            heads = {match["head"] for match in _BRANCH.finditer(text)}
            found.update(f"{head}/" for head in heads if _is_branch_owner(head))
        if "login" in text:
            for account in _ACCOUNT.finditer(text):
                found.update(n for n in account.groups() if n and not _NOBODY.search(n))
    return frozenset(name for name in found if {" ", "/"} & set(name) or is_private_login(name))


def is_private_login(name: str) -> bool:
    """Whether a login name tells something about a person."""
    return len(name) >= _MIN_LOGIN_CHARS and name.lower() not in RULES.common_logins


def replace_people(
    text: str, people: frozenset[str], replacement: Callable[[re.Match[str]], str]
) -> str:
    """Replace people: login names in group `login` or `account`, full names in `name`."""
    names, rule = _rule_for(people)
    # Searches for literals cost a tenth of the expression, which few texts need.
    lowered = text.lower()
    if rule is not None and any(name in lowered for name in names):
        text = rule.sub(replacement, text)
    return text


def _is_branch_owner(name: str) -> bool:
    return name.lower() not in RULES.branch_words and is_private_login(name)


def without_branch_heads(text: str) -> tuple[str, int]:
    """Replace login names at the head of branch names, of people who are not else in the text."""
    n_found = 0

    def head(match: re.Match[str]) -> str:
        nonlocal n_found
        found = match["head"]
        if not _is_branch_owner(found):
            return match.group()
        n_found += 1
        return match.group().removesuffix(found) + "user"

    return _BRANCH.sub(head, text), n_found


@lru_cache(maxsize=64)
def _rule_for(people: frozenset[str]) -> tuple[tuple[str, ...], re.Pattern[str] | None]:
    parts: list[str] = []
    logins = sorted((n for n in people if n.isascii() and not set(n) & {" ", "/"}), key=len)
    logins = [name for name in logins if is_private_login(name)]
    if heads := [re.escape(name[:-1]) for name in people if name.endswith("/")]:
        parts.append(rf"(?P<head>(?<![\w/.-])(?:{'|'.join(heads)})(?=/[\w-]))")
    plain = [
        name
        for name in logins
        if len(name) >= _MIN_PLAIN_CHARS and name.lower() not in RULES.wordlike_logins
    ]
    if full := [re.escape(name) for name in sorted(people) if " " in name]:
        parts.append(rf"(?<!\w)(?P<name>{'|'.join(full)})(?!\w)")
    if plain:
        one = "|".join(map(re.escape, reversed(plain)))
        parts.append(rf"(?<![A-Za-z0-9])(?P<login>(?i:{one}))(?![A-Za-z0-9])")
    if short := [re.escape(name) for name in reversed(logins) if name not in plain]:
        one = f"(?:{'|'.join(short)})"
        # As an account, a folder or the head of a branch; in columns of `ls`, `ps` and `lsof`.
        parts.append(
            rf"(?P<account>(?<![\w.-]){one}(?=[@/\\])|(?<=[/\\~@(]){one}(?![\w.-])"
            rf"|(?<=[\w-] ){one}(?= +\w+ +\d)|(?m:^){one}(?= +\d)|(?<=\d ){one}(?= +\d))"
        )
    names = tuple(name.lower() for name in people)
    return names, re.compile("|".join(parts)) if parts else None


def without_hosts(text: str, placeholder: Placeholder) -> str:
    """Replace host names and public addresses."""

    def host(match: re.Match[str]) -> str:
        found = next(filter(None, match.groups()))
        if found.lower() in _KNOWN_HOSTS | _DEVICES or found.startswith("<"):
            return match.group()
        return match.group().replace(found, placeholder("HOST", found))

    def address(match: re.Match[str]) -> str:
        value = match.group()
        before = text[max(0, match.start() - 12) : match.start()]
        if value in _KNOWN_ADDRESSES or value.endswith(".0.0") or _VERSION.search(before):
            return value
        try:
            is_public = ipaddress.ip_address(value).is_global
        except ValueError:
            return value
        return placeholder("ADDRESS", value) if is_public else value

    text = _HOST.sub(host, text)
    return _ADDRESS.sub(address, text)
