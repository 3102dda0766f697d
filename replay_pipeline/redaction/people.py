"""Names of people, hosts and addresses: what is not secret, and tells who and where somebody is."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from replay_pipeline.redaction.secret_rules import RULES

_MIN_LOGIN_CHARS = 3
_MIN_PLAIN_CHARS = 4
"""A shorter login name is replaced only where an account stands: it may be a word of code."""

_NAME = r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*){1,3}"
_HOME = re.compile(r"\\{0,3}([A-Za-z0-9][\w.-]{0,63})")
_HOMES = ("/Users/", "/home/", "Users\\")
_AUTHOR = re.compile(rf"(?:ter)?[:= ]{{1,3}}\"?({_NAME})\"?(?= <|\n|\"|$)")
_AUTHORS = ("uthor", "ommit", "agger", "-by", "-By", "user.name")
_ACCOUNT = re.compile(
    r"\\*\": ?\\*\"([A-Za-z][\w-]*)\\*\""
    r"(?:,\s*\\*\"name\\*\": ?\\*\"([A-Z][^\"\\]{2,60} [^\"\\]{2,60}))?"
)
_BRANCH = re.compile(r"[A-Za-z][\w-]{2,38}(?=/[\w-]+)")
_OF_ORGANIZATION = re.compile(r"[\w.-]+/([A-Za-z][\w-]{2,38})(?=/[\w-]+)")
_BRANCHES = ("origin/", "worktrees/", "branch ", "branch '", "into ", "into '")
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
    """Collect the people of a session: of home folders, commits, accounts and branches.

    Login names and full names are given as they are. What ends with a slash is a login name at the
    head of branch names, alone or behind what stood before it.
    """
    text = "\n".join(texts)
    found = {match[1].rstrip(".") for match in _after(text, _HOMES, _HOME)}
    found.update(match[1] for match in _after(text, _AUTHORS, _AUTHOR))
    for match in _after(text, ('"login',), _ACCOUNT):
        found.update(filter(None, match.groups()))
    found = {name for name in found if not _NOBODY.search(name)}
    for literal in _BRANCHES:
        before = literal if literal.endswith("/") else ""
        for name in {match[0] for match in _after(text, (literal,), _BRANCH)}:
            if _owns_branches(name):
                found |= {f"{name}/", f"{before}{name}/"}
    if "pull request" in text:
        for match in _after(text, (" from ",), _OF_ORGANIZATION):
            if _owns_branches(match[1]):
                found |= {f"{match[1]}/", f"{match[0]}/"}
    return frozenset(name for name in found if {" ", "/"} & set(name) or is_private_login(name))


def _owns_branches(name: str) -> bool:
    return name.lower() not in RULES.branch_words and is_private_login(name)


def _after(text: str, literals: Iterable[str], pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Match a pattern behind each literal: a search for literals takes a tenth of its time."""
    for literal in literals:
        position = text.find(literal)
        while position >= 0:
            position += len(literal)
            if match := pattern.match(text, position):
                yield match
            position = text.find(literal, position)


def is_private_login(name: str) -> bool:
    """Whether a login name tells something about a person."""
    return len(name) >= _MIN_LOGIN_CHARS and name.lower() not in RULES.common_logins


class People:
    """The people of one session, to be replaced in its texts."""

    def __init__(self, people: frozenset[str]) -> None:
        self._full = [name for name in people if " " in name]
        heads = (name for name in people if name.endswith("/"))
        self._heads = sorted(heads, key=lambda name: (-len(name), name))
        self._plain: list[str] = []
        short: list[str] = []
        for name in people - {*self._full, *self._heads}:
            is_plain = len(name) >= _MIN_PLAIN_CHARS and name.lower() not in RULES.wordlike_logins
            if is_private_login(name):
                (self._plain if is_plain else short).append(name)
        self._short = tuple(sorted(short))
        one = f"(?:{'|'.join(map(re.escape, self._short))})"
        # As an account, a folder or the head of a branch; in columns of `ls`, `ps` and `lsof`.
        self._as_account = re.compile(
            rf"(?<![\w.-]){one}(?=[@/\\])|(?<=[/\\~@(]){one}(?![\w.-])"
            rf"|(?<=[\w-] ){one}(?= +\w+ +\d)|(?m:^){one}(?= +\d)|(?<=\d ){one}(?= +\d)"
        )

    def replaced(self, text: str, full_name: Callable[[str], str]) -> tuple[str, int]:
        """Replace login names by `user` and full names as told; count the login names."""
        n_found = 0
        for name in self._full:
            if name in text:
                text = _replaced(text, text, name, full_name(name), _is_word)[0]
        lowered = text.lower()
        for name in self._plain:
            if (low := name.lower()) in lowered:
                text, n = _replaced(text, lowered, low, "user", _is_apart)
                lowered, n_found = text.lower(), n_found + n
        for name in self._heads:
            if name in text:
                before = name[: name.rfind("/", 0, -1) + 1]
                text, n = _replaced(
                    text, text, name, f"{before}user/", _is_path if before else _is_head
                )
                n_found += n
        if any(name in text for name in self._short):
            text, n = self._as_account.subn("user", text)
            n_found += n
        return text, n_found


def _replaced(
    text: str, where: str, name: str, by: str, fits: Callable[[str, str], bool]
) -> tuple[str, int]:
    """Put `by` wherever `where` has the name between two characters that fit."""
    if len(where) != len(text):  # a letter whose lower case is two: rare enough to look for case
        where = text
    parts: list[str] = []
    copied = 0
    position = where.find(name)
    while position >= 0:
        end = position + len(name)
        if fits(text[position - 1 : position] if position else "", text[end : end + 1]):
            parts += (text[copied:position], by)
            copied = end
        position = where.find(name, end)
    return "".join([*parts, text[copied:]]), len(parts) // 2


def _is_word(before: str, after: str) -> bool:
    return not (before.isalnum() or after.isalnum() or "_" in (before, after))


def _is_apart(before: str, after: str) -> bool:
    return not (before.isalnum() or after.isalnum())


def _is_path(before: str, after: str) -> bool:
    return not before.isalnum() and after.isalnum()


def _is_head(before: str, after: str) -> bool:
    return not (before.isalnum() or before in {"_", "/", ".", "-"}) and after.isalnum()


@lru_cache(maxsize=64)
def people(names: frozenset[str]) -> People:
    """Give the people with these names, as `people_in` finds them."""
    return People(names)


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
