"""Readers of conversations without branches, which is what most agents log."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from replay_pipeline.ingesters.base import (
    ReadCounts,
    RecordedCall,
    RecordedUsage,
    Result,
    SessionLog,
    Turn,
)
from replay_pipeline.ingesters.json_lines import as_count, objects_in, read_objects
from replay_pipeline.types import Tool


class LinearReader:
    """Reads files of JSON lines that are one conversation each. A reader says what a row means."""

    name: ClassVar[str]
    rank: ClassVar[int] = 3

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether the first row of a file is one of this agent's."""
        raise NotImplementedError

    def take(self, talk: "Conversation", row: dict[str, Any], offset: int) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        raise NotImplementedError

    def sniff(self, head: bytes) -> bool:
        """Return whether a file that starts with `head` is one of this agent's."""
        first = next(objects_in(head.split(b"\n", 1)[0], ReadCounts()), None)
        return first is not None and self.begins(first)

    def rows(
        self, talk: "Conversation", path: Path, counts: ReadCounts, end: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a file with their offsets."""
        del talk
        return read_objects(path, counts, end)

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield the one conversation of a file."""
        talk = Conversation(path.stem, self.name)
        for offset, row in self.rows(talk, path, counts, end):
            counts.count(self.take(talk, row, offset))
        yield talk.log()


def usage_of(
    n_prompt: Any, n_output: Any, *, n_cached: Any = 0, n_written: Any = 0
) -> RecordedUsage:
    """Return the tokens of a message, where those of the prompt include what the cache had or got."""
    n_read, n_new = as_count(n_cached), as_count(n_written)
    n_input = max(0, as_count(n_prompt) - n_read - n_new)
    return RecordedUsage(n_input, n_new, n_read, as_count(n_output))


class Conversation:
    """Builds the turns of one linear session, row by row."""

    def __init__(self, session_id: str, agent: str) -> None:
        self.session_id = session_id
        self.agent = agent
        self.turns: list[Turn] = []
        self.tools: list[Tool] = []
        self.system: str | None = None
        """The system prompt, where the log has it."""
        self.cwd: str | None = None
        self.model: str | None = None
        self.version: str | None = None
        self.segment = 0
        self._tip: Turn | None = None
        self._open: Turn | None = None
        self._by_call: dict[str, Turn] = {}
        self._n_messages = 0

    def user(
        self, text: str, *, offset: int, timestamp: str | None = None, kind: str = "user"
    ) -> None:
        """A message that the model was given."""
        self._open = None
        self._append(kind, offset, timestamp).texts.append(text)

    def compacted(self, summary: str, *, offset: int, timestamp: str | None = None) -> None:
        """Start a new root with a summary that replaces the history."""
        self.cleared()
        self.user(summary, offset=offset, timestamp=timestamp, kind="summary")

    def cleared(self) -> None:
        """Start a new root without history."""
        self.segment += 1
        self._tip = self._open = None

    def begin_again(self, kept: Sequence[Turn] = ()) -> None:
        """Start a new root with copies of these turns; the rest of the history is dropped."""
        self.cleared()
        for turn in kept:
            self._tip = turn.copy_below(self._tip, self.segment)
            self.turns.append(self._tip)

    def clear(self, call_ids: list[str], *, offset: int) -> None:
        """Note that the model no longer sees these results."""
        self._open = None
        self._append("microcompact", offset, None).cleared = call_ids

    def copied(self, text: str, *, offset: int, timestamp: str | None = None) -> None:
        """Add earlier messages of the model that were kept when its history was replaced. They are no decisions."""
        self._open = None
        turn = self._append("assistant", offset, timestamp)
        turn.texts.append(text)
        turn.flags |= {"copy"}

    def interrupted(self) -> bool:
        """Mark the model's last message as stopped by the user; return `False` if something came after it."""
        if self._tip is None or self._tip.kind != "assistant":
            return False
        self._tip.flags |= {"interrupted"}
        return True

    def assistant(
        self, *, offset: int, timestamp: str | None = None, message_id: str | None = None
    ) -> Turn:
        """Return the model's message that is being built, or a new one."""
        turn = self._open
        is_other = message_id is not None and turn is not None and turn.message_id != message_id
        if turn is None or is_other:
            turn = self._append("assistant", offset, timestamp)
            turn.message_id = message_id or f"{self.agent}:{self.session_id}:{self._n_messages}"
            self._n_messages += 1
            turn.model = self.model
            self._open = turn
        return turn

    def close(self) -> None:
        """End the model's message. The next block starts a new one."""
        self._open = None

    def reopen(self, turn: Turn) -> None:
        """Continue a message whose calls were answered while it was written."""
        self._open = turn

    @property
    def is_waiting(self) -> bool:
        """Return whether the last message has no call or an unanswered call."""
        tip = self._tip
        return (
            tip is not None
            and tip.kind == "assistant"
            and (not tip.calls or any(call.id not in tip.results for call in tip.calls))
        )

    def call(self, turn: Turn, call_id: str | None, name: str, arguments: str) -> str:
        """Add a call to the model's message, and return its id."""
        call_id = call_id or f"{turn.message_id}-{len(turn.calls)}"
        if call_id not in self._by_call:
            turn.calls.append(RecordedCall(call_id, name, arguments))
            self._by_call[call_id] = turn
        return call_id

    def result(self, call_id: str, text: str, *, is_error: bool = False) -> bool:
        """Add the text of a call's result. Returns `False` if there is no such call."""
        return self.answer(call_id, Result(text, is_error))

    def answer(self, call_id: str, result: Result) -> bool:
        """Add the result of a call. Returns `False` if there is no such call."""
        turn = self._by_call.get(call_id)
        if turn is None:
            return False
        turn.results.setdefault(call_id, result)
        if turn is self._open:
            self._open = None
        return True

    def usage(self, usage: RecordedUsage) -> None:
        """Set the recorded tokens of the last message that has none."""
        for turn in reversed(self.turns):
            if turn.kind == "assistant":
                if turn.usage is None:
                    turn.usage = usage
                return

    def log(self) -> SessionLog:
        """Return the finished session without empty messages of the model."""
        kept: list[Turn] = []
        for turn in self.turns:
            while turn.parent is not None and _is_empty(turn.parent):
                turn.parent = turn.parent.parent
            if not _is_empty(turn):
                turn.index = len(kept)
                kept.append(turn)
        return SessionLog(
            self.session_id, self.agent, kept, tools=self.tools, sent=self._shape(kept)
        )

    def _shape(self, turns: list[Turn]) -> list[Turn]:
        """Attach the system prompt to every decision, and return the turn that holds it."""
        if self.system is None:
            return []
        shape = Turn(
            parent=None, kind="shape", offset=0, uuid=f"{self.session_id}-system", index=-1
        )
        shape.wire_json = msgspec.json.encode({"system": self.system, "tools": []}).decode()
        for turn in turns:
            if turn.kind == "assistant":
                turn.shape = shape
        return [shape]

    def _append(self, kind: str, offset: int, timestamp: str | None) -> Turn:
        turn = Turn(
            parent=self._tip,
            kind=kind,
            offset=offset,
            uuid=f"{self.session_id}-{len(self.turns)}",
            segment=self.segment,
            timestamp=timestamp,
            version=self.version,
            cwd=self.cwd,
        )
        self.turns.append(turn)
        self._tip = turn
        return turn


def _is_empty(turn: Turn) -> bool:
    return turn.kind == "assistant" and not turn.texts and not turn.calls
