"""Build conversations from logs, row by row: what the readers of most agents share."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from replay_pipeline.ingesters.base import (
    LACKS,
    MEDIA,
    ReadCounts,
    RecordedCall,
    RecordedUsage,
    Result,
    SessionLog,
    Turn,
)
from replay_pipeline.ingesters.json_lines import (
    arguments_text,
    as_count,
    as_dict,
    as_list,
    objects_in,
    read_document,
    read_objects,
    text_in,
    text_or_none,
)
from replay_pipeline.types import Tool

_NOT_TEXT = (*MEDIA, "file", "audio", "video", "compaction")
"""What `text_in` names in brackets, because no text stands for it."""


_BY_PROVIDER = re.compile(r"^\[(\w+_tool_result)\]$", re.MULTILINE)
"""A tool that ran at the provider: what it gave is not in the log."""


class LinearReader:
    """Reads files of JSON lines that are one conversation each. A reader says what a row means."""

    name: ClassVar[str]
    rank: ClassVar[int] = 3
    conversation: ClassVar[type["Conversation"] | None] = None

    def begins(self, row: dict[str, Any]) -> bool:
        """Return whether the first row of a file is one of this agent's."""
        raise NotImplementedError

    def take(self, talk: "Conversation", row: dict[str, Any]) -> str | None:
        """Take one row in; returns the reason if it makes no turn."""
        raise NotImplementedError

    def sniff(self, head: bytes) -> bool:
        """Return whether a file that starts with `head` is one of this agent's."""
        first = first_row(head)
        return first is not None and self.begins(first)

    def rows(
        self, talk: "Conversation", path: Path, counts: ReadCounts, end: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a file with their offsets."""
        del talk
        return read_objects(path, counts, end)

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield the one conversation of a file."""
        talk = (self.conversation or Conversation)(path.stem, self.name)
        for offset, row in self.rows(talk, path, counts, end):
            talk.offset = offset
            counts.count(self.take(talk, row))
        yield talk.log()


class DocumentReader(LinearReader):
    """Reads files that are one JSON document with messages. They are read as a whole."""

    def messages(self, talk: "Conversation", document: Any) -> list[Any]:
        """Take in what a document says of its session, and return its messages."""
        raise NotImplementedError

    def rows(
        self, talk: "Conversation", path: Path, counts: ReadCounts, end: int | None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the messages."""
        del end
        messages = self.messages(talk, read_document(path))
        counts.rows += len(messages)
        return ((0, as_dict(message)) for message in messages)


class TrajectoryReader:
    """Reads files in which each row, or each item of one document, has whole conversations."""

    name: ClassVar[str]
    rank: ClassVar[int] = 3

    def talks(self, row: dict[str, Any], name: str) -> Iterable["Conversation"]:
        """Yield the conversations of a row; `name` stands for one that has none."""
        raise NotImplementedError

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield every conversation of a file."""
        for number, (offset, row) in enumerate(_lines_or_document(path, counts, end)):
            logs = [talk.log() for talk in self.talks(row, f"{path.stem}-{number}")]
            counts.count(None if logs else "no_message")
            for log in logs:
                for turn in log.turns:
                    turn.offset = offset
            yield from logs


def first_row(head: bytes) -> dict[str, Any] | None:
    """Return the first row of a file."""
    return next(objects_in(head.split(b"\n", 1)[0], ReadCounts()), None)


def _lines_or_document(
    path: Path, counts: ReadCounts, end: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        is_lines = file.readline().rstrip().endswith(b"}")
    document = None if is_lines else read_document(path)
    if document is None:
        yield from read_objects(path, counts, end)
        return
    for each in document if isinstance(document, list) else [document]:
        counts.rows += 1
        yield 0, as_dict(each)


def usage_of(
    n_prompt: Any, n_output: Any, *, n_cached: Any = 0, n_written: Any = 0
) -> RecordedUsage:
    """Return the tokens of a message, where those of the prompt include what the cache had or got."""
    n_read, n_new = as_count(n_cached), as_count(n_written)
    n_input = max(0, as_count(n_prompt) - n_read - n_new)
    return RecordedUsage(n_input, n_new, n_read, as_count(n_output))


def openai_usage(value: Any) -> RecordedUsage | None:
    """Return the tokens in OpenAI's form; `None` if there are none."""
    used = as_dict(value)
    details = as_dict(used.get("prompt_tokens_details"))
    cached = details.get("cached_tokens") or used.get("cached_tokens")
    n_prompt, n_output = used.get("prompt_tokens"), used.get("completion_tokens")
    return usage_of(n_prompt, n_output, n_cached=cached) if used else None


def tools_in(tools: Any) -> list[Tool]:
    """Return the tools of a list that have a name, in OpenAI's form."""
    found = [as_dict(tool.get("function")) or tool for tool in map(as_dict, as_list(tools))]
    return [
        {
            "type": "function",
            "function": {
                **tool,
                "description": text_or_none(tool.get("description")) or "",
                "parameters": as_dict(tool.get("parameters")),
            },
        }
        for tool in ({k: v for k, v in each.items() if k != "type"} for each in found)
        if text_or_none(tool.get("name"))
    ]


class Conversation:
    """Builds the turns of one session. A row's place in the file decides; its ids only help.

    Each turn stands below the one before it, unless `at` goes back to another place.
    """

    def __init__(self, session_id: str, agent: str) -> None:
        self.session_id = session_id
        self.agent = agent
        self.turns: list[Turn] = []
        self.tools: list[Tool] = []
        self.system: str | None = None
        """The system prompt, where the log has it."""
        self.title: str | None = None
        """What the log calls the session."""
        self.is_resolved: bool | None = None
        self.part_of: tuple[str, str] | None = None
        """Of a subagent: its id, and the session that started it."""
        self.cwd: str | None = None
        self.model: str | None = None
        self.version: str | None = None
        self.offset = 0
        """Of the row that is being read."""
        self.timestamp: str | None = None
        """Of the message that is being read."""
        self.segment = 0
        self._tip: Turn | None = None
        self._n_seen: int | None = None
        """Results of the last turn that stand above the next one, if not all."""
        self._open: Turn | None = None
        self._calls: dict[str, list[tuple[Turn, str]]] = {}
        """By the id that the log gives a call: its message, and the id that it has here."""
        self._messages: dict[str, int] = {}
        """How many messages have an id."""
        self._has_children: set[str] = set()
        self._copies: dict[tuple[str, int], Turn] = {}
        self._shapes: dict[str, Turn] = {}

    def instruct(self, text: str) -> None:
        """Add words of the system: its prompt before all else, or a message in its name."""
        if self._tip is None:
            self.system = f"{self.system}\n\n{text}" if self.system else text
        else:
            self.user(text, kind="developer")

    def user(self, text: str, *, kind: str = "user") -> None:
        """Add a message that the model was given."""
        self._open = None
        self._append(kind).texts.append(text)

    def compacted(self, summary: str) -> None:
        """Start a new root with a summary that replaces the history."""
        self.cleared()
        self.user(summary, kind="summary")

    def cleared(self) -> None:
        """Start a new root without history."""
        self.segment += 1
        self._tip = self._open = None

    def keep(self, turns: Sequence[Turn]) -> None:
        """Add copies of these turns, which a compaction kept."""
        for turn in turns:
            self._tip, self._n_seen = turn.copy_below(self._tip, self.segment), None
            self.turns.append(self._tip)

    def clear(self, call_ids: list[str]) -> None:
        """Note that the model no longer sees these results."""
        self._open = None
        self._append("microcompact").cleared = call_ids

    def copied(self, text: str) -> None:
        """Add earlier messages of the model that were kept when its history was replaced. They are no decisions."""
        self._open = None
        turn = self._append("assistant")
        turn.texts.append(text)
        turn.flags |= {"copy"}

    def interrupted(self) -> bool:
        """Mark the model's last message as stopped by the user; return `False` if something came after it."""
        if self._tip is None or self._tip.kind != "assistant":
            return False
        self._tip.flags |= {"interrupted"}
        return True

    def assistant(self, message_id: str | None = None) -> Turn:
        """Return the model's message that is being built, or a new one."""
        turn = self._open
        is_other = message_id is not None and turn is not None and turn.message_id != message_id
        if turn is None or is_other:
            turn = self._append("assistant")
            name = message_id or f"{self.agent}:{self.session_id}:{len(self._messages)}"
            n_before = self._messages[name] = self._messages.get(name, -1) + 1
            turn.message_id = f"{name}~{n_before}" if n_before else name
            turn.model = self.model
            turn.shape = self._shape()
            self._open = turn
        return turn

    def close(self) -> None:
        """End the model's message. The next block starts a new one."""
        self._open = None

    def reopen(self, turn: Turn) -> None:
        """Continue a message whose calls were answered while it was written."""
        self._open = turn

    @property
    def written(self) -> Turn | None:
        """Return the model's message that is being built."""
        return self._open

    @property
    def calling(self) -> set[str]:
        """Return the tools that the last message calls and that have not answered."""
        tip = self._tip
        return {c.name for c in tip.calls if c.id not in tip.results} if tip is not None else set()

    @property
    def is_waiting(self) -> bool:
        """Return whether the last message has no call or an unanswered call."""
        tip = self._tip
        is_text = tip is not None and tip.kind == "assistant" and not tip.calls
        return is_text or bool(self.calling)

    def call(self, turn: Turn, call_id: str | None, name: str, arguments: Any) -> str:
        """Add a call to the model's message, and return its id, which no other call has."""
        known = self._calls.setdefault(call_id or "", [])
        own = call_id if call_id and not known else f"{turn.message_id}-{len(turn.calls)}"
        known.append((turn, own))
        turn.calls.append(RecordedCall(own, name, arguments_text(arguments)))
        return own

    def answer(self, call_id: str | None, result: Result) -> bool:
        """Add the result of a call. Returns `False` if there is no such call.

        It answers the first call of this id, or of any if it names none, that waits in the last
        message, or else in the one before that has such a call.
        """
        tip = self._tip
        calls = self._calls.get(call_id, []) if call_id else []
        if not call_id and tip is not None:
            calls = [(tip, call.id) for call in tip.calls]
        seen = set(list(tip.results)[: self._n_seen]) if tip is not None else ()
        waits = [(t, own) for t, own in calls if own not in (seen if t is tip else t.results)]
        if not waits:
            return bool(calls)
        last = next((turn for turn, _ in waits if turn is tip), waits[-1][0])
        own = next(own for turn, own in waits if turn is last)
        if last is tip:
            self._answer_here(last, own, result)
        else:
            last.results.setdefault(own, result)
        if last is self._open:
            self._open = None
        return True

    def _answer_here(self, tip: Turn, own: str, result: Result) -> None:
        """Put a result behind the last message. Another branch may have put others there."""
        if self._n_seen is None:
            tip.results.setdefault(own, result)
            return
        have = list(tip.results.items())[self._n_seen :]
        if not have or have[0] != (own, result):
            if have or tip.uuid in self._has_children:
                tip = self._tip = self._cut(tip, self._n_seen)
            tip.results[own] = result
        self._n_seen += 1

    def usage(self, usage: RecordedUsage) -> None:
        """Set the recorded tokens of the last message that has none."""
        for turn in reversed(self.turns):
            if turn.kind == "assistant":
                if turn.usage is None:
                    turn.usage = usage
                return

    def message(self, message: dict[str, Any]) -> str | None:
        """Take in a message in OpenAI's form; returns the reason if it makes no turn.

        One of the model is `written` until the next.
        """
        role, text = message.get("role"), text_in(message.get("content"))
        if role == "tool":
            is_known = self.answer(text_or_none(message.get("tool_call_id")), Result(text))
            return None if is_known else "orphan_result"
        if role == "assistant":
            self.close()
            turn = self.assistant()
            turn.texts += [text] if text else []
            thinking = message.get("reasoning_content") or message.get("thinking")
            turn.thinking += filter(None, [text_or_none(thinking)])
            for call in map(as_dict, as_list(message.get("tool_calls"))):
                told = as_dict(call.get("function")) or call
                name = text_or_none(told.get("name")) or ""
                self.call(turn, text_or_none(call.get("id")), name, told.get("arguments"))
        elif text and role in ("system", "developer"):
            self.instruct(text)
        elif text:
            self.user(text)
        else:
            return "empty"
        return None

    @property
    def place(self) -> "Place":
        """Return where the conversation stands."""
        n_results = len(self._tip.results) if self._tip is not None else 0
        return self._tip, n_results if self._n_seen is None else self._n_seen, self.system

    def at(self, place: "Place | None") -> None:
        """Go on from a place where the conversation stood, or from its beginning."""
        self._tip, self._n_seen, self.system = place or (None, 0, None)
        self._open = None

    def log(self) -> SessionLog:
        """Return the finished session without empty messages of the model."""
        kept: list[Turn] = []
        for turn in self.turns:
            shown = [result.text for result in turn.results.values()]
            shown += turn.texts if turn.kind != "assistant" else ()
            lacks = [kind for kind in _NOT_TEXT if _has_line(shown, f"[{kind}]")]
            lacks += [kind for text in turn.texts for kind in _BY_PROVIDER.findall(text)]
            turn.flags |= {f"{LACKS}{kind}" for kind in lacks}
            while turn.parent is not None and _is_empty(turn.parent):
                turn.parent = turn.parent.parent
            if not _is_empty(turn):
                turn.index = len(kept)
                kept.append(turn)
        agent_id, parent = self.part_of or (None, None)
        return SessionLog(
            self.session_id,
            self.agent,
            kept,
            agent_id,
            parent,
            is_resolved=self.is_resolved,
            tools=self.tools,
            title=self.title,
            sent=list(self._shapes.values()),
            left_out=Counter(empty=sum(map(_is_empty, self.turns))),
        )

    def _shape(self) -> Turn | None:
        """Return what holds the system prompt of the decisions that have it."""
        if self.system is None:
            return None
        if self.system not in self._shapes:
            number = -1 - len(self._shapes)
            uuid = f"{self.session_id}-system{number}"
            shape = Turn(parent=None, kind="shape", offset=0, uuid=uuid, index=number)
            shape.wire_json = msgspec.json.encode({"system": self.system, "tools": []}).decode()
            self._shapes[self.system] = shape
        return self._shapes[self.system]

    def _append(self, kind: str) -> Turn:
        tip = self._tip
        if tip is not None:
            if self._n_seen is not None and self._n_seen < len(tip.results):
                key = (tip.uuid, self._n_seen)
                if key not in self._copies:
                    self._copies[key] = self._cut(tip, self._n_seen)
                tip = self._copies[key]
            self._has_children.add(tip.uuid)
        turn = Turn(
            parent=tip,
            kind=kind,
            offset=self.offset,
            uuid=f"{self.session_id}-{len(self.turns)}",
            segment=tip.segment if tip is not None else self.segment,
            timestamp=self.timestamp,
            version=self.version,
            cwd=self.cwd,
        )
        self.turns.append(turn)
        self._tip, self._n_seen = turn, None
        return turn

    def _cut(self, turn: Turn, n_results: int) -> Turn:
        """Return a copy of a message of the model with only its first results."""
        copied = turn.copy_below(turn.parent, turn.segment)
        copied.uuid = f"{turn.uuid}-{len(self.turns)}"
        copied.results = dict(list(turn.results.items())[:n_results])
        self.turns.append(copied)
        return copied


Place = tuple[Turn | None, int, str | None]
"""The last turn above, how many of its results are seen, and the system prompt."""


def _has_line(texts: list[str], line: str) -> bool:
    return any(line in text and f"\n{line}\n" in f"\n{text}\n" for text in texts)


def _is_empty(turn: Turn) -> bool:
    return turn.kind == "assistant" and not turn.texts and not turn.calls
