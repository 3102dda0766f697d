"""What Claude Code prints when it runs without a screen: `claude -p --output-format stream-json`.

The rows are those of its log without their place in the graph: they stand in order, a subagent's
under the call that started it. They come one per line, as one array (as its GitHub action keeps
them), with `--include-partial-messages` between pieces of messages, or inside a recording of a
terminal (asciinema), as benchmarks keep them. What the user asked is in them only where a user's
messages are replayed; the folder of a benchmark's trial may have it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.base import LACKS, ReadCounts, SessionLog, Turn
from replay_pipeline.ingesters.claude_code import LogTree, logs_of
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    digest_of,
    read_document,
    read_objects,
    text_or_none,
)
from replay_pipeline.ingesters.rows import parsed_row
from replay_pipeline.ingesters.trials import instruction_of

_KINDS = frozenset({"system", "assistant", "user", "result", "stream_event"})
_BOOKKEEPING = frozenset({
    "control_request", "control_response", "control_cancel_request", "keep_alive", "rate_limit_event",
    "tool_progress", "tool_use_summary", "auth_status",
})  # fmt: skip
"""Kinds that are for the program that reads the output."""
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][A-Z0-9]|[=>])"
)
_LINE_END = re.compile(r"\r*\n")
_ROW_BEGINS = '{"type":'
_NO_REQUEST = "request"
"""What a state lacks where nothing says what the user asked."""


class StreamJson:
    """Reads what a run of Claude Code printed, in each of its forms."""

    name = "claude_code"
    rank = 1

    def sniff(self, head: bytes) -> bool:
        """Return whether `head` begins a run's output, or the recording of a terminal."""
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n[").decode("utf-8", "replace")
        if re.match(r'\{"version": ?[23], ?"(?:width|term)"', text):
            return True
        try:
            row, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return False
        return isinstance(row, dict) and _is_ours(row)

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one log for each session in the output, and one for each of its subagents."""
        runs: dict[str, _SessionRun] = {}
        for offset, row in _rows(path, counts, end):
            if row.get("type") in _BOOKKEEPING:
                counts.count("bookkeeping")
                continue
            if row.get("type") not in _KINDS:
                counts.count(f"unknown_row_{str(row.get('type'))[:40]}")
                continue
            session_id = text_or_none(row.get("session_id")) or next(iter(runs), path.stem)
            run = runs.get(session_id)
            if run is None:
                run = runs[session_id] = _SessionRun(
                    counts, instruction_of(path) if not runs else None
                )
            run.add(offset, row)
        for session_id, run in runs.items():
            yield from run.logs(session_id)


def _is_ours(row: dict[str, Any]) -> bool:
    message = as_dict(row.get("message"))
    is_begun = (row.get("type"), row.get("subtype")) == ("system", "init") and "tools" in row
    is_said = row.get("type") == "assistant" and "id" in message and "usage" in message
    is_told = row.get("type") in ("user", "stream_event", "result") and "uuid" in row
    is_logged = not {"parentUuid", "sessionId"}.isdisjoint(row)
    return "session_id" in row and (is_begun or is_said or is_told) and not is_logged


def _rows(path: Path, counts: ReadCounts, end: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        first = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if first.startswith(b"["):
        for row in map(as_dict, as_list(read_document(path))):
            counts.rows += 1
            yield 0, row
    elif first.startswith(b'{"version"'):
        yield from _printed(path, counts, end)
    else:
        yield from read_objects(path, counts, end)


def _printed(
    path: Path, counts: ReadCounts, end: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows that the recording of a terminal shows. Other lines of a screen are not counted."""
    line = ""
    for offset, event in _events(path, end):
        *whole, line = _LINE_END.split(line + event)
        for text in whole:
            row = _ESCAPES.sub("", text).strip()
            if not row.startswith(_ROW_BEGINS):
                continue
            counts.rows += 1
            try:
                yield offset, as_dict(json.loads(row, strict=False))
            except ValueError:
                counts.count("not_json")


def _events(path: Path, end: int | None) -> Iterator[tuple[int, str]]:
    """Yield what a recording says was printed: arrays of a time, `o` and a text."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if end is not None and offset >= end:
                return
            try:
                event = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                event = None
            if isinstance(event, list) and len(event) == 3 and event[1] == "o":
                yield offset, str(event[2])
            offset += len(line)


class _SessionRun:
    """One session of an output, as a tree of turns like that of a log."""

    def __init__(self, counts: ReadCounts, request: str | None) -> None:
        self._counts = counts
        self._main = LogTree(None, counts)
        self._request = request
        self._row: dict[str, Any] = {}
        """What each row of a log says of its client, and the rows of an output once."""
        self._tools: list[str] = []
        self._is_compacted = False
        self._ended: str | None = None

    def add(self, offset: int, row: dict[str, Any]) -> None:
        """Take in one row."""
        kind = row["type"]
        if kind == "stream_event":
            self._counts.count("partial_message")
        elif kind == "result":
            used = as_dict(row.get("modelUsage")) or {"": {"costUSD": row.get("total_cost_usd")}}
            usd = {name: as_dict(each).get("costUSD") for name, each in used.items()}
            self._main.count_usd({n: x for n, x in usd.items() if isinstance(x, int | float)})
            self._ended = text_or_none(row.get("subtype")) or self._ended
            self._counts.count(None)
        elif kind == "system" and row.get("subtype") == "init":
            self._begin(row)
        else:
            self._place(offset, row)

    def _begin(self, row: dict[str, Any]) -> None:
        self._counts.count(None)
        self._tools = [name for name in as_list(row.get("tools")) if isinstance(name, str)]
        self._row = {"cwd": row.get("cwd"), "version": row.get("claude_code_version")}

    def _place(self, offset: int, row: dict[str, Any]) -> None:
        inner = self._row | row
        inner["compactMetadata"] = row.get("compact_metadata")
        inner["isCompactSummary"] = row["type"] == "user" and self._is_compacted
        inner["isMeta"] = bool(row.get("isSynthetic"))
        tree, agent = self._main, text_or_none(row.get("parent_tool_use_id"))
        if agent is not None:
            tree = self._main.agents.setdefault(agent, LogTree(None, self._counts, agent))
        parsed = parsed_row(inner, self._counts)
        parsed.uuid = parsed.uuid or digest_of([offset, row])
        if tree.is_copy(offset, parsed):
            self._counts.count("duplicate_row")
            return
        tip = tree.tips[False]
        if row["type"] == "assistant" and agent is None and tip is None:
            tip = self._asked(offset)
        if row["type"] == "assistant" and tip is not None:
            tip = _standing(tip, as_dict(row.get("message")).get("id"))
        tree.place(offset, parsed, tip)
        if row.get("subtype") == "compact_boundary":
            tree.tips[False] = None
        self._is_compacted = row.get("subtype") == "compact_boundary"

    def _asked(self, offset: int) -> Turn:
        """Return the turn with the request, which an output has only where it was told to."""
        turn = Turn(None, "user", offset, "request", texts=[self._request or ""])
        turn.cwd, turn.version = self._row.get("cwd"), self._row.get("version")
        if self._request is None:
            turn.flags |= {f"{LACKS}{_NO_REQUEST}"}
        self._main.turns.append(turn)
        return turn

    def logs(self, session_id: str) -> Iterator[SessionLog]:
        """Yield the finished conversations."""
        self._main.finish()
        for log in logs_of(self._main, session_id, None):
            if log.agent_id is None:
                log.ended, log.entrypoint = self._ended, "sdk-cli"
                log.offers(self._tools)
            yield log


def _standing(tip: Turn, message_id: Any) -> Turn | None:
    """Return the turn below which a message stands: not one that it replaced.

    A client whose stream breaks off asks once more. The calls that it had printed already were
    never carried out.
    """
    is_open = tip.kind == "assistant" and bool(tip.calls) and not tip.results
    if not is_open or tip.message_id == message_id:
        return tip
    tip.flags |= {"retracted"}
    return tip.parent
