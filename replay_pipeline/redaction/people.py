"""Find names of people, hosts, and addresses, which aren't secrets but reveal who and where somebody is."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from replay_pipeline.redaction.secret_rules import RULES

_MIN_LOGIN_CHARS = 3
_MAX_HEAD_CHARS = 160
_AROUND_CHARS = 120
_MIN_PLAIN_CHARS = 4
"""A shorter login name is replaced only where an account stands: it may be a word of code."""

_NAME = r"[A-Z][\w.'-]*(?: [A-Z][\w.'-]*){1,3}"
_HOMES = tuple(
    re.compile(rf"{root}\\{{0,3}}([A-Za-z0-9][\w.-]{{0,63}})")
    for root in (r"Users(?:(?<![\w.]/Users)(?<=/Users)/|\\)", r"home(?<![\w.]/home)(?<=/home)/")
)
"""Of people's machines, and where programs run: there the owner may be a part that a program plays."""
_AUTHOR = re.compile(rf"(?:ter)?(?:[:= ]{{1,3}}\"?|\\*\": ?\\*\")({_NAME})(?=\"? <|\n|\\*\"|$)")
_AUTHORS = ("uthor", "ommit", "agger", "-by", "-By", "user.name", "reatedBy", "ssignee", "\tname")
_ACCOUNT = re.compile(
    r"\\*\": ?\\*\"([A-Za-z][\w-]*)\\*\""
    r"(?:,\s*\\*\"name\\*\": ?\\*\"([A-Z][^\"\\]{2,60} [^\"\\]{2,60}))?"
)
_LOGIN_LINE = re.compile(r"[A-Za-z][\w-]{2,38}(?=\n|$)")
_BRANCH = re.compile(r"[A-Za-z][\w-]{2,38}(?=/[\w-]+)")
_OF_ORGANIZATION = re.compile(r".{0,12}from ([\w.-]{1,64}/([A-Za-z][\w-]{2,38}))(?=/[\w-]+)")
_BRANCHES = ("origin/", "branch.", "\n[", "branch ", "branch '", "into ", "into '")
_BRANCH_FIELD = re.compile(r"[A-Za-z][\w-]{2,38}(?=/[\w-]+ Is[A-Z])")
_THANKED = re.compile(
    r"(?:anks(?: to)?|(?:report|suggest|request|review|tribut|merg|prov)ed by|cc) @[A-Za-z][\w-]{2,38}"
    r"(?:(?:,| and|, and| but also) @[A-Za-z][\w-]{2,38})*"
    r"|@[A-Za-z][\w-]{2,38}(?= made their first)"
)
_COLLEAGUE = re.compile(r"(?:sk|ing|ell|with) ([A-Z][a-z]{3,})\b")
_SURNAME = re.compile(r" [A-Z][\w'-]+(?=\\*\")")
_NOBODY = re.compile(
    r"\b(?:Claude|Copilot|Test|User|Unknown|Name|GitHub|Bot|Date|Merge|Code|Inc|LLC|Ltd"
    r"|Team|Foundation|Labs|Software|Contributors|Authors)\b"
)

HOSTS_HEAD = (
    r"\d\.\d{1,3}\.\d{1,3}\.\d|\.(?:local|lan|internal|corp)\b|MacBook|DESKTOP-|LAPTOP-|iMac"
    r"|(?:Darwin|Linux) [\w.-]+ \d"
)
"""Matches wherever a host or an address may be, in a linear-time engine."""
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


class Mention(NamedTuple):
    """A person or a place at `text[start:end]`."""

    start: int
    end: int
    kind: str
    """`name`, `user_name`, `home`, `host` or `address`."""


PEOPLE_SIGNALS = {
    "author": r"(?:uthor|ommit|agger|-by|-By|user\.name|reatedBy|ssignee|\tname)(?:ter)?"
    r"(?:[:= ]{1,3}\"?|\\*\": ?\\*\")[A-Z][\w.'-]* [A-Z]",
    "account": r'"login\\*": ?\\*"[A-Za-z]|author:\t[A-Za-z]',
    "branch": r"(?:origin/|worktrees/|branch\.|\n\[|branch '?|into '?|\{Name:)[A-Za-z][\w-]{2,38}/",
    "thanked": r"(?:anks(?: to)?|(?:report|suggest|request|review|tribut|merg|prov)ed by|\bcc) @[A-Za-z]|@[\w-]{3,39} made their first",
    "colleague": r"(?:\b[Aa]sk|\b[Pp]ing|\b[Tt]ell|(?:[Ss]ync|[Cc]oordinate|[Ss]hare) (?:\w+ ){0,2}with)"
    r" [A-Z][a-z]{3}",
    "organization": r"ull request .{0,12}from [\w.-]{1,64}/[A-Za-z][\w-]{2,38}/",
}
"""Match wherever a person may be named outside a home folder, in a linear-time engine."""


def names_in(text: str, pieces: str) -> frozenset[str]:
    """Collect the people of a session from home folders, commits, accounts, and branches.

    Login names and full names are returned unchanged. A leading tilde marks the owner of a home
    folder who appears nowhere else, such as the user of a container image. A trailing slash marks a
    login name at the head of branch names, with any prefix before it. A leading space marks a part
    of a full name. A leading question mark marks a possible first name, which `first_names` decides
    on. `pieces` are the parts of the text that begin with one of `PEOPLE_SIGNALS`.
    """
    own, others = ({name.rstrip(".") for name in home.findall(text)} for home in _HOMES)
    found = own | {f"~{name}" for name in others - own}
    worktrees = {match[0] for match in _after(text, ("worktrees/",), _BRANCH)}
    text = pieces
    for match in _after(text, _AUTHORS, _AUTHOR):
        found.add(match[1])
        if match.string.startswith(" <", match.end()):  # a mail address follows: it is a person
            found.update(_parts_of(match[1]))
    for match in _after(text, ('"login',), _ACCOUNT):
        found.update(filter(None, match.groups()))
        found.update(_parts_of(match[2] or ""))
    found.update(match[0] for match in _after(text, ("author:\t",), _LOGIN_LINE))
    for match in _THANKED.finditer(text):
        found.update(re.findall(r"@([\w-]+)", match[0]))
    found = {name for name in found if not _NOBODY.search(name)}
    for literal in _BRANCHES:
        before = literal if literal[-1] in "/." else ""
        for name in {match[0] for match in _after(text, (literal,), _BRANCH)}:
            if _owns_branches(name):
                found |= {f"{name}/", f"{before}{name}/"}
    # A worktree may have any name; it is somebody's where there are branches of that name.
    found.update(f"worktrees/{name}/" for name in worktrees if f"{name}/" in found)
    found.update(
        f"{m[0]}/" for m in _after(text, ("{Name:",), _BRANCH_FIELD) if _owns_branches(m[0])
    )
    found.update(f"?{match[1]}" for match in _COLLEAGUE.finditer(text))
    for match in _after(text, ("ull request ",), _OF_ORGANIZATION):
        if _owns_branches(match[2]):
            found |= {f"{match[2]}/", f"{match[1]}/"}
    return frozenset(
        name
        for name in found
        if {" ", "/", "?"} & set(name) or is_private_login(name.removeprefix("~"))
    )


def first_names(people: frozenset[str]) -> frozenset[str]:
    """Turn first names that also begin branch names into login names.

    A word after "ask" or "coordinate with" may be a product name, so alone it isn't enough.
    """
    asked = {name for name in people if name.startswith("?")}
    logins = {name[1:].lower() for name in asked}
    return people - asked | {name for name in logins if f"{name}/" in people}


def _parts_of(name: str) -> Iterator[str]:
    """Yield first and last name, where they may stand for the person and for nothing else."""
    parts = name.split()
    for part in {*parts[:1], *parts[-1:]}:
        is_word = part.lower() in RULES.wordlike_logins | RULES.common_logins
        if len(part) >= _MIN_PLAIN_CHARS and part.isalpha() and not is_word:
            yield f" {part}"


def _owns_branches(name: str) -> bool:
    return name.lower() not in RULES.branch_words and is_private_login(name)


def _after(text: str, literals: Iterable[str], pattern: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Match a pattern behind each literal, once for places that go on alike.

    Splitting at a literal takes a tenth of the time of a search for the expression.
    """
    for literal in literals:
        for head in {rest[:_MAX_HEAD_CHARS] for rest in text.split(literal)[1:]}:
            if match := pattern.match(head):
                yield match


_BOTS = ("bot", "-ci", "-app")


def is_private_login(name: str) -> bool:
    """Return whether a login name reveals something about a person."""
    is_known = name.lower() in RULES.common_logins or name.lower().endswith(_BOTS)
    return len(name) >= _MIN_LOGIN_CHARS and not is_known


class People:
    """The people of one session, whose names are replaced in its texts."""

    def __init__(self, people: frozenset[str]) -> None:
        self._full = sorted({name.strip() for name in people if " " in name})
        heads = (name for name in people if name.endswith("/"))
        self._heads = sorted(heads, key=lambda name: (-len(name), name))
        self._plain: list[str] = []
        short: list[str] = []
        weak = {name[1:] for name in people if name.startswith("~")}
        weak = {name for name in weak - people if is_private_login(name)}
        for name in people - {*self._heads}:
            if " " in name or name.startswith("~"):
                continue
            is_plain = len(name) >= _MIN_PLAIN_CHARS and name.lower() not in RULES.wordlike_logins
            if is_private_login(name):
                (self._plain if is_plain else short).append(name)
        self._short = tuple(sorted({*short, *map(str.capitalize, short)}))
        self._weak = tuple(sorted({*weak, *map(str.capitalize, weak)}))
        one = _one_of(self._short)
        # As an account, a folder or the head of a branch; in columns of `ls`, `ps` and `lsof`.
        self._as_account = re.compile(
            rf"(?<![\w.-]){one}(?=[@/\\])|(?<=[/\\~@(]){one}(?![\w.-])"
            rf"|(?<=[\w-] ){one}(?= +\w+ +\d)|(?m:^){one}(?= +\d)|(?<=\d ){one}(?= +\d)"
            rf"|(?<!\w){one}(?='s (?:machine|laptop|computer)\b)"
        )

        one = _one_of(self._weak)
        self._as_owner = re.compile(
            rf"(?<![\w./-]){one}(?=@\w)|(?<=~){one}(?![\w.-])|(?<=\(){one}(?=\))"
            rf"|(?<=[\w-] ){one}(?= +\w+ +\d)|(?m:^){one}(?= +\d)|(?<=\d ){one}(?= +\d)"
            rf"|(?<!\w){one}(?='s (?:machine|laptop|computer)\b)"
        )

    def mentions(self, text: str) -> Iterator[Mention]:
        """Find login names and full names, in no particular order. They may overlap."""
        for name in self._full:
            yield from _found(text, name, _is_word, "name")
        for start, end in self._logins_in(text):
            yield Mention(start, end, "user_name")
            if text[start - 1 : start] == '"' and (surname := _SURNAME.match(text, end)):
                yield Mention(start, surname.end(), "name")
        for name in self._heads:
            where = max(name.rfind("/", 0, -1), name.rfind(".", 0, -1)) + 1
            for _, end, kind in _found(text, name, _is_path if where else _is_head, "user_name"):
                yield Mention(end - len(name) + where, end - 1, kind)
        for names, pattern in ((self._short, self._as_account), (self._weak, self._as_owner)):
            for name in names:
                for end in _ends_of(text, name):
                    if match := pattern.match(text, end - len(name)):
                        yield Mention(*match.span(), "user_name")

    def _logins_in(self, text: str) -> Iterator[tuple[int, int]]:
        # Bytes are put in lower case ten times faster than text that is not ASCII.
        data = text.encode("utf-8", "replace").lower()
        n_bytes = n_chars = 0
        for start, end in sorted(
            (end - len(name), end)
            for name in {name.encode().lower() for name in self._plain}
            for end in _ends_of(data, name)
        ):
            n_chars += len(data[n_bytes:start].decode())
            n_bytes = start
            last = n_chars + len(data[start:end].decode())
            before = text[n_chars - 1 : n_chars] if n_chars else ""
            is_file = _SUFFIX.match(text, last) or _STEM.search(text, max(0, n_chars - 12), n_chars)
            if _is_apart(before, text[last : last + 1]) and not is_file:
                yield n_chars, last

    def in_homes(self, text: str) -> list[tuple[str, str]]:
        """Return each home folder in a text, with its placeholder."""
        logins = sorted(
            (*self._plain, *self._short, *self._weak), key=lambda name: (-len(name), name)
        )
        return [
            (folder, f"{root}user/")
            for name in logins
            for root in ("/Users/", "/home/")
            if (folder := f"{root}{name}/") in text
        ]


_SUFFIX = re.compile(
    r"[\w-]*\.(?:py|pyi|js|jsx|ts|tsx|go|rs|rb|java|kt|c|h|cc|cpp|cs|sh|md|rst|txt|json|ya?ml|toml|lock|css|html|sql)\b"
)
"""What makes a name that of a file."""
_STEM = re.compile(r"(?:Dockerfile|Makefile|Procfile|compose|\.env)[.-]\Z")


def _one_of(names: tuple[str, ...]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


def _ends_of(text: str | bytes, name: Any) -> Iterator[int]:
    position = text.find(name)
    while position >= 0:
        position += len(name)
        yield position
        position = text.find(name, position)


def _found(text: str, name: str, fits: Callable[[str, str], bool], kind: str) -> Iterator[Mention]:
    """Find a name between two characters that fit."""
    for end in _ends_of(text, name):
        start = end - len(name)
        if fits(text[start - 1 : start] if start else "", text[end : end + 1]):
            yield Mention(start, end, kind)


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
    """Return the people with these names, which come from `people_in`."""
    return People(names)


def hosts_in(text: str, start: int, end: int) -> Iterator[Mention]:
    """Find host names and public addresses around `text[start:end]`."""
    start, end = max(0, start - _AROUND_CHARS), end + _AROUND_CHARS
    for match in _HOST.finditer(text, start, end):
        group = match.lastgroup or 0
        if match[group].lower() not in _KNOWN_HOSTS | _DEVICES:
            yield Mention(*match.span(group), "host")
    for match in _ADDRESS.finditer(text, start, end):
        value = match.group()
        if value in _KNOWN_ADDRESSES or value.endswith(".0.0"):
            continue
        if _VERSION.search(text[max(0, match.start() - 12) : match.start()]):
            continue
        try:
            is_public = ipaddress.ip_address(value).is_global
        except ValueError:
            continue
        if is_public:
            yield Mention(*match.span(), "address")


def homes_in(text: str) -> Iterator[Mention]:
    """Find the login names in paths of home folders."""
    for rule in _LOGINS_OF_HOMES:
        for match in rule.finditer(text):
            start, end = match.span(match.lastindex or 0)
            if text[start:end].lower() not in RULES.common_logins:
                yield Mention(start, end, "home")


_LOGIN = r"(?!user/)([A-Za-z0-9][\w.-]{0,63})"
_LOGINS_OF_HOMES = (
    re.compile(rf"Users(?:(?<=/Users)/{_LOGIN}|\\{{1,4}}{_LOGIN}|(?<=-Users)-([A-Za-z0-9]+))"),
    re.compile(rf"home(?:(?<=/home)/{_LOGIN}|(?<=-home)-([A-Za-z0-9]+))"),
)
"""Each begins with a word, since a search for a word is many times faster than one for a class."""


def user_of(cwd: str | None) -> str | None:
    """Return the login name in the path of a home folder, if there is one."""
    return (
        next(
            (cwd[m.start : m.end] for m in homes_in(cwd) if m.end - m.start >= _MIN_LOGIN_CHARS),
            None,
        )
        if cwd
        else None
    )
