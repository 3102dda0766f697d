"""Check from the rows of the dataset alone whether the test split is really held out.

The publisher splits by the ids of conversations. If an id were wrong, a check by id would be wrong
in the same way. So one check here compares what people and agents wrote.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from replay_pipeline.publish import layout
from replay_pipeline.redaction.printable import printable
from replay_pipeline.stages.audit import AuditResult
from replay_pipeline.storage.store import Place, files_below
from replay_pipeline.storage.tables import readable

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers

MIN_CHARS = 200
"""Shorter messages, such as "Go on.", repeat by nature and aren't compared."""
MAX_CONVERSATIONS = 3
"""A text in more conversations than this comes from a program, such as a system text or a skill."""
_ROWS_AT_ONCE = 200
_SHOWN_CHARS = 60

_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
_BY_THE_CLIENT = (
    "Base directory for this skill:",
    "Caveat: The messages below were generated",
    "Contents of ",
    "<command-",
    "<local-command-",
)
"""How texts begin that no user wrote."""


def shared_conversations(folder: Place) -> AuditResult:
    """Is every conversation in one split only?"""
    sides: dict[str, set[str]] = {}
    for split, rows in _shards(folder, ("state_id", "session_id", "conversation")):
        for name in layout.conversations_in(rows):
            sides.setdefault(name, set()).add(split)
    shared = sorted(name for name, found in sides.items() if len(found) > 1)
    return AuditResult(
        problems=[f"conversation {name} is in both splits" for name in shared],
        what_to_do="Held-out figures would be worthless. `replay-pipeline publish` brings such a "
        "conversation to train; what was ever in train is never in test.",
        facts={
            "shared_conversations": len(shared),
            **{
                f"{split}_conversations": sum(split in found for found in sides.values())
                for split in ("train", "test")
            },
        },
        judged=len(sides),
    )


@dataclass(slots=True)
class _Message:
    """A long message, and where it stands."""

    states: dict[str, str] = field(default_factory=dict)
    """By split, the first state with it."""
    conversations: set[str] = field(default_factory=set)
    openings: set[int] = field(default_factory=set)
    """What the prompts begin with: tells conversations apart without their names."""

    def add(self, other: "_Message") -> None:
        self.states |= other.states | self.states
        self.conversations |= other.conversations
        self.openings |= other.openings


def shared_messages(folder: Place) -> AuditResult:
    """Does no long message of a user, and no task of a subagent, stand in both splits?

    A message is long from 200 characters. Texts in more than three conversations are left out, and
    so are the texts of the client, which are the same for everybody.
    """
    messages: dict[str, _Message] = {}
    columns = ("state_id", "session_id", "conversation", *_SIDES)
    for split, rows in _shards(folder, columns):
        for text, found in _long_messages(rows, split):
            messages.setdefault(text, _Message()).add(found)
    _add_quoted(messages)
    leaks = {
        text: found.states
        for text, found in messages.items()
        if len(found.states) > 1
        and min(len(found.conversations), len(found.openings)) <= MAX_CONVERSATIONS
    }
    return AuditResult(
        problems=[
            f"a message of {len(text):,} characters ({printable(text[:_SHOWN_CHARS])!r} …) is in "
            f"train, state {states['train']}, and in test, state {states['test']}"
            for text, states in leaks.items()
        ],
        what_to_do="Held-out figures would be worthless. Two conversations that begin with the same "
        "text, or one that was cut: take one of them out (`replay-pipeline retract --session ID`).",
        facts={"shared_messages": len(leaks), "long_messages": len(messages)},
        judged=len(messages),
    )


_SIDES = ("prompt", "chosen", "rejected", "completion", "consensus")


def _shards(folder: Place, columns: tuple[str, ...]) -> Iterator[tuple[str, pa.Table]]:
    """Yield split and some columns of all rows, in parts."""
    for name in files_below(folder / layout.DATA):
        with pq.ParquetFile(readable(folder / layout.DATA / name)) as shard:
            wanted = [each for each in columns if each in shard.schema_arrow.names]
            for part in shard.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
                yield name.split("/")[1], pa.Table.from_batches([part])


def _long_messages(rows: pa.Table, split: str) -> Iterator[tuple[str, _Message]]:
    conversations = layout.conversations_in(rows)
    states = rows["state_id"].to_pylist()
    openings: dict[int, int] = {}
    found: dict[str, set[int]] = {}
    for name in _SIDES:
        if name not in rows.column_names:
            continue
        for row, message in _messages(rows[name].combine_chunks()):
            if name == "prompt" and message["role"] == "user":
                openings.setdefault(row, hash(message["content"]))
            for text in _written(message):
                found.setdefault(text, set()).add(row)
    for text, places in found.items():
        first = min(places)
        yield (
            text,
            _Message(
                {split: states[first]},
                {conversations[row] for row in places},
                {openings.get(row, row) for row in places},
            ),
        )


def _messages(column: pa.Array) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield user messages and those with calls, each with the number of its row."""
    if pa.types.is_list(column.type):
        numbers, flat = pc.list_parent_indices(column), pc.list_flatten(column)
    else:
        numbers, flat = pa.array(range(len(column)), pa.int64()), column
    wanted = pc.or_(
        pc.equal(pc.struct_field(flat, "role"), "user"),
        pc.is_valid(pc.struct_field(flat, "tool_calls")),
    )
    yield from zip(numbers.filter(wanted).to_pylist(), flat.filter(wanted).to_pylist(), strict=True)


def _written(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the long texts that a user, or an agent that hands out a task, wrote."""
    if message["role"] == "user":
        yield from _own(message["content"] or "")
    for call in message["tool_calls"] or ():
        arguments = (call["function"] or {}).get("arguments") or ""
        if '"prompt"' in arguments and len(arguments) > MIN_CHARS:
            try:
                task = json.loads(arguments)["prompt"]
            except (ValueError, LookupError, TypeError):
                continue
            yield from _own(task if isinstance(task, str) else "")


def _own(text: str) -> Iterator[str]:
    text = _REMINDER.sub("", text).strip() if "<system-reminder>" in text else text.strip()
    if len(text) >= MIN_CHARS and not text.startswith(_BY_THE_CLIENT):
        yield text


def _add_quoted(messages: Mapping[str, _Message]) -> None:
    """Add to each message where it stands within another: those side by side were joined into one."""
    by_start: dict[str, list[str]] = {}
    for text in messages:
        by_start.setdefault(text[:MIN_CHARS], []).append(text)
    for text, found in messages.items():
        breaks = (match.end() for match in re.finditer(r"\n\n", text))
        for place in chain([0], breaks):
            for other in by_start.get(text[place : place + MIN_CHARS], ()):
                if other is not text and text.startswith(other, place):
                    messages[other].add(found)
