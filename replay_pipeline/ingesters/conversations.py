"""Find the sessions that belong to one conversation: subagents, resumed and forked sessions, copies.

A log may name the session that it was forked from, contain copies of its rows, or continue from a
row of another log. In each case the sessions belong together: a model that trains on one has seen
part of the others.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from replay_pipeline.ingesters.base import SessionLog
from replay_pipeline.storage.arrays import array_of
from replay_pipeline.types import conversation_of


@dataclass(frozen=True, kw_only=True)
class KnownConversation:
    """What connects a conversation with those of earlier ingestions."""

    named: frozenset[str] = frozenset()
    """The sessions in it, and the sessions that they name."""
    copied: frozenset[str] = frozenset()
    """Ids of its decisions that are already in an earlier ingestion."""


@dataclass
class _MainSession:
    """A main session, with its subagents."""

    began: str = ""
    ended: str = ""
    origins: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    is_here: bool = False


class Conversations:
    """Collects which logs of one ingestion belong together."""

    def __init__(self) -> None:
        self._sessions: dict[str, _MainSession] = {}
        self._tied: dict[str, str] = {}
        self._by_row: dict[int, str] = {}
        self._parts: dict[str, str] = {}

    def add(self, log: SessionLog, copied: Iterable[str] = ()) -> None:
        """Add one log, and the ids of its decisions that earlier ingestions have."""
        name = conversation_of(log.parent_session_id or log.session_id)
        session = self._sessions.setdefault(name, _MainSession())
        session.copied.update(copied)
        if log.parent_session_id is None:
            session.is_here = True
            moments = [turn.timestamp for turn in log.turns if turn.timestamp]
            session.began = min([*filter(None, [session.began]), *moments], default="")
            session.ended = max([session.ended, *moments])
        for origin in map(conversation_of, log.origins):
            if origin != name:
                session.origins.add(origin)
                self._tie(name, origin)
        rows = {row for turn in log.turns for row in (turn.uuid, turn.message_id) if row}
        for row in itertools.chain(rows, log.rows, log.follows):
            if (other := self._by_row.setdefault(hash(row), name)) != name:
                self._tie(name, other)

    def part(self, session_id: str, log: SessionLog) -> None:
        """Record the id under which the rows of a log are stored."""
        self._parts[session_id] = conversation_of(log.parent_session_id or log.session_id)

    def result(self) -> tuple[dict[str, str], dict[str, KnownConversation]]:
        """Return the conversation of each stored session, and each conversation by its name."""
        members: dict[str, set[str]] = {}
        for name in {*self._sessions, *self._tied}:
            members.setdefault(self._top(name), set()).add(name)
        began = {top: self._began(found) for top, found in members.items()}
        conversations = {
            began[top]: KnownConversation(
                named=frozenset(found),
                copied=frozenset().union(
                    *(self._sessions[name].copied for name in found if name in self._sessions)
                ),
            )
            for top, found in members.items()
        }
        return {part: began[self._top(name)] for part, name in self._parts.items()}, conversations

    def _began(self, names: set[str]) -> str:
        """Name the session that began a conversation; of a session and its copy, what ended first."""

        def key(name: str) -> tuple[bool, bool, str, str, str]:
            session = self._sessions.get(name, _MainSession())
            return bool(session.origins), not session.is_here, session.began, session.ended, name

        return min(names, key=key)

    def _tie(self, one: str, other: str) -> None:
        top, other_top = self._top(one), self._top(other)
        if top != other_top:
            self._tied[max(top, other_top)] = min(top, other_top)
            self._tied.setdefault(min(top, other_top), min(top, other_top))

    def _top(self, name: str) -> str:
        while (above := self._tied.get(name, name)) != name:
            name = above
        return name


class InConversations:
    """A table in parts, with the conversation of each row's session filled in."""

    def __init__(self, parts: Iterable[pa.Table], conversation_of: Mapping[str, str]) -> None:
        self._parts = parts
        self._conversation_of = conversation_of

    def __iter__(self) -> Iterator[pa.Table]:
        for part in self._parts:
            sessions = part["session_id"].to_pylist()
            place = part.column_names.index("conversation")
            values = array_of([self._conversation_of[each] for each in sessions], pa.string())
            yield part.set_column(place, part.field(place), values)
