"""Find conversations that must go to one split: those of a project, and those that share a message."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import pyarrow as pa

from replay_pipeline.publish import layout
from replay_pipeline.publish.splits import name_sha

MAX_SHARING = 3
"""The most conversations that share a message. A message in more of them comes from a program."""


def conversations_of(
    keys: Iterable[str],
    given: Mapping[str, pa.Table],
    agreed: Mapping[str, pa.Table],
    projects: Callable[[str], Mapping[str, str]] | None,
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the tables' conversations with their projects, and the conversation of each session."""
    belong: dict[str, str | None] = {}
    named: dict[str, str] = {}
    for key in sorted(keys):
        project_of = projects(key) if projects else {}
        for table in (given[key], agreed[key]):
            conversations = layout.conversations_in(table, {})
            belong |= {each: project_of.get(each) for each in conversations}
            named |= dict(zip(sessions_in(table), conversations, strict=True))
    return belong, named


def long_messages(
    keys: Iterable[str],
    belong: Collection[str],
    messages: Callable[[str], Mapping[str, Collection[str]]] | None,
) -> dict[str, set[str]]:
    """Return the long messages of these conversations."""
    said: dict[str, set[str]] = {}
    for key in sorted(keys) if messages else ():
        for name, hashes in messages(key).items() if messages else ():
            if name in belong:
                said.setdefault(name, set()).update(hashes)
    return said


def shared(
    said: Mapping[str, Iterable[str]], n_published: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yield each shared message with its conversations, without common messages."""
    having: dict[str, list[str]] = {}
    for name, hashes in said.items():
        for each in sorted(hashes):
            having.setdefault(each, []).append(name)
    for each, names in having.items():
        n_elsewhere = n_published.get(name_sha(each), 0)
        if 1 < len(names) + n_elsewhere <= MAX_SHARING:
            yield [*names, each]


def sessions_in(table: pa.Table) -> list[str]:
    """Return the session of each row. A row without one counts as its own session."""
    return [
        session or state
        for session, state in zip(
            table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True
        )
    ]
