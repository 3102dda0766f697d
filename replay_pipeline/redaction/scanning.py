"""Scan many texts in one pass, and find those that may contain secrets or personal data.

kingfisher runs in this process and never opens a connection. Its validators, which do, aren't used.
It also searches for the starting points of our own rules, since it finds hundreds of expressions at
once in the time that other engines need for one.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kingfisher_sdk import Rules, Scanner

from replay_pipeline.errors import StorageError
from replay_pipeline.redaction.people import HOSTS_HEAD, PEOPLE_SIGNALS, first_names, names_in
from replay_pipeline.redaction.secret_rules import (
    RULES,
    SIGNALS,
    SecretHit,
)

_BLOB_BYTES = 1 << 18
_BETWEEN = b"\n" * 3


class Suspect(NamedTuple):
    """The kinds of secrets that a text may hold."""

    signals: set[str]
    """Names in `SIGNALS` that were found. They may mean a secret by our own rules."""
    assigned: list[tuple[int, int]]
    """Start and end of places that may assign a value to a name."""
    is_known: bool
    """Whether kingfisher's rules may find a secret."""
    hosts: list[tuple[int, int]]
    """Start and end of possible host names and addresses."""


OF_NAMED_FILES = (
    "betterleaks.freemius-secret-key",
    "betterleaks.hashicorp-tf-password",
    "betterleaks.kubernetes-secret-yaml",
    "betterleaks.nuget-config-password",
    "veles.secrets/bitbucketcredentials",
    "veles.secrets/bitwardenoauth2access",
    "veles.secrets/codecatalystcredentials",
    "veles.secrets/codecommitcredentials",
)
"""Rules for files of some name, which can't match a text. The one of Kubernetes takes a third of the time to compile."""
_NOTHING = r"(\x01{40})"  # kingfisher refuses what can never match
AWS_SESSION_TOKEN: Mapping[str, Any] = {
    "id": "betterleaks.aws-session-token",
    "pattern": r"""(?x)\b(?i:AWS[_-]?(?:SESSION|SECURITY)[_-]?TOKEN)\b["']?\s*(?:=|:)\s*["']?([A-Za-z0-9/+=._-]{16,})"""
    r"""(?:["'\s,;}]|$)""",
    "depends_on_rule": [
        {
            "rule_id": f"betterleaks.{rule}",
            "variable": name,
            "within": "5L",
            "verify_candidates": True,
        }
        for rule, name in (
            ("aws-access-token", "AKID"),
            ("aws-secret-access-key", "AWS_SECRET_ACCESS_KEY"),
        )
    ],
}
"""The scanner's rule, for tokens of any length. Its own limit takes half a second to compile."""


@cache
def _known() -> Scanner:
    """Return a scanner for kingfisher's rules."""
    left_out = [{"id": name, "pattern": _NOTHING} for name in OF_NAMED_FILES]
    return _scanner([*left_out, AWS_SESSION_TOKEN], builtins=True)


@cache
def _scanner_for(*names: str) -> Scanner:
    """Return a scanner for some of our own expressions."""
    return _scanner(
        [{"id": f"own.{name}", "pattern": f"({_PATTERNS[name]})"} for name in names], builtins=False
    )


def _scanner(rules: Iterable[Mapping[str, Any]], *, builtins: bool) -> Scanner:
    """Return a scanner for rules, which replace those of kingfisher with the same id.

    Raises:
        StorageError: the folder for temporary files can't be written.
    """
    written = [{"name": rule["id"], "min_entropy": 0.0, **rule} for rule in rules]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rules.yml"
        try:
            path.write_text(json.dumps({"rules": written}))
        except OSError as error:
            raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from error
        # What is inside base64 our own rules look at.
        return Scanner(Rules([path], builtins=builtins), base64=False)


_HOSTS = "hosts"
_PATTERNS = {**SIGNALS, _HOSTS: HOSTS_HEAD, **PEOPLE_SIGNALS}


def suspects_in(texts: Sequence[str]) -> Iterator[tuple[int, Suspect]]:
    """Yield the texts with possible findings, by position, in order.

    The texts are joined for the search, because a search takes almost as long for a word as for a
    page. So a finding is only a suspicion: a rule may find its keyword in the preceding text.
    """
    blob, ends, first = bytearray(), list[int](), 0
    for number, text in enumerate(texts):
        blob += text.encode("utf-8", "replace")
        blob += _BETWEEN
        ends.append(len(blob))
        if len(blob) > _BLOB_BYTES or number == len(texts) - 1:
            for index, suspect in sorted(_suspects(bytes(blob), ends).items()):
                yield first + index, suspect
            blob.clear()
            ends.clear()
            first = number + 1


def _suspects(data: bytes, ends: list[int]) -> dict[int, Suspect]:
    found: dict[int, Suspect] = {}

    def suspect(index: int) -> Suspect:
        return found.setdefault(index, Suspect(set(), [], False, []))

    for start, end, _ in _spans(data):
        for index in {bisect_right(ends, start), bisect_right(ends, end - 1)}:
            found[index] = suspect(index)._replace(is_known=True)
    for finding in _scanner_for(*SIGNALS, _HOSTS).scan(data):
        where, name = finding.location, finding.rule_id.removeprefix("own.")
        start, end = where["start_offset"], where["end_offset"]
        index = bisect_right(ends, start)
        if name == _HOSTS:
            suspect(index).hosts.append((start, end))
            continue
        for inside in {index, bisect_right(ends, end - 1)}:
            suspect(inside).signals.add(name)
            if name == "assigned":
                suspect(inside).assigned.append((start, end))
    for index, its in found.items():
        at = ends[index - 1] if index else 0
        for places in (its.hosts, its.assigned):
            places[:] = _in_characters(data, at, sorted(places))
    return found


def _in_characters(
    data: bytes, at: int, places: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield ranges of bytes, in order, as ranges of the text that begins at byte `at`, or wider ones."""
    n_bytes, n_chars = at, 0
    for first, last in places:
        start = max(at, first)  # what begins in the text before
        n_chars += len(data[n_bytes:start].decode("utf-8", "replace"))
        n_bytes = start
        yield n_chars, n_chars + last - start


def people_in(texts: Iterable[str]) -> frozenset[str]:
    """Collect the people of a session from its texts and calls, in the form of `names_in`."""
    found: frozenset[str] = frozenset()
    together, n_chars = list[str](), 0
    for text in chain(texts, [None]):
        if text is not None:
            together.append(text)
            n_chars += len(text)
        if text is None or n_chars > _PEOPLE_CHARS:
            found |= _people_in("\n".join(["", *together]))  # each begins a line
            together, n_chars = [], 0
    return first_names(found)


def _people_in(text: str) -> frozenset[str]:
    data = text.encode("utf-8", "replace")
    starts = [f.location["start_offset"] for f in _scanner_for(*PEOPLE_SIGNALS).scan(data)]
    pieces = (data[at : at + _PIECE_BYTES].decode("utf-8", "replace") for at in starts)
    return names_in(text, "\n".join(pieces))


_PEOPLE_CHARS = 1_000_000
_PIECE_BYTES = 240


def _spans(data: bytes) -> list[tuple[int, int, str]]:
    """Start, end and kind of what kingfisher finds, in bytes."""
    return [
        (where["start_offset"], where["end_offset"], _kind_of(finding.rule_id))
        for finding in _known().scan(data)
        if finding.visible and finding.secret.lower() not in RULES.common_passwords
        if (where := finding.location)
    ]


def secrets_by_kingfisher(text: str) -> list[SecretHit]:
    """Return the secrets that kingfisher's rules find in a text."""
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
