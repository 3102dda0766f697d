"""verifiers: `traces.jsonl` of rollouts, each a graph of messages that marks those of the model."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from replay_pipeline.ingesters.base import (
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
    read_objects,
    text_in,
    text_or_none,
)
from replay_pipeline.types import Tool

# An episode, and a trace by itself; heads of lines too long to be read whole.
_HEAD = re.compile(
    rb'\s*\{"id":\s?"[0-9a-f]{32}",\s?"env":\s?\{|'
    rb'\s*\{"version":\s?\d+,\s?"id":\s?"[^"]+",\s?"verifiers":\s?\{'
)


class VerifiersTraces:
    """Reads `traces.jsonl`: each row is one episode with the traces of its agents, or one trace.

    Each message is stored once and names the one before it. Only messages that the model wrote in
    the rollout are decisions. An assistant message in the prompt is context.
    """

    name = "verifiers"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is an episode or a trace."""
        for row in objects_in(head.split(b"\n", 1)[0], ReadCounts()):
            return "task" in row and any(_nodes(trace) for trace in _traces(row))
        return bool(_HEAD.match(head))

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per trace."""
        for number, (offset, row) in enumerate(read_objects(path, counts, end)):
            traces = [trace for trace in _traces(row) if _nodes(trace)]
            if not traces:
                counts.count("no_message")
                continue
            counts.count(None)
            for k, trace in enumerate(traces):
                yield MessageGraph(trace, f"{path.stem}-{number}-{k}", offset, self.name).log()


def _traces(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(trace) for trace in as_list(row.get("traces"))] or [row]


def _nodes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    nodes = [as_dict(node) for node in as_list(trace.get("nodes"))]
    return nodes if any("message" in node for node in nodes) else []


class MessageGraph:
    """Turns the message graph of one trace into turns."""

    def __init__(self, trace: dict[str, Any], name: str, offset: int, agent: str) -> None:
        self.session_id = text_or_none(trace.get("id")) or name
        self.trace, self.offset, self.agent = trace, offset, agent
        self.turns: list[Turn] = []
        self._copies: dict[tuple[str, int], Turn] = {}
        self._sealed: set[str] = set()
        # Of every node: the turn it belongs to, and how many of its results stand above.
        self._views: list[tuple[Turn, int] | None] = []
        config = as_dict(as_dict(trace.get("agent")).get("config"))
        self._model = text_or_none(config.get("model"))
        self._harness = text_or_none(as_dict(config.get("harness")).get("id"))
        calls = [as_dict(call) for call in as_list(trace.get("calls"))]
        self._calls = {call["node"]: call for call in calls if isinstance(call.get("node"), int)}

    def log(self) -> SessionLog:
        """Return the session. If a result differs between branches, its message is copied."""
        nodes = _nodes(self.trace)
        for index, node in enumerate(nodes):
            parent = node.get("parent")
            is_known = isinstance(parent, int) and 0 <= parent < index
            self._views.append(self._take(index, node, self._views[parent] if is_known else None))
        for index, turn in enumerate(self.turns):
            turn.index = index
        log = SessionLog(self.session_id, self._harness or self.agent, self.turns)
        log.tools = _tools(nodes) or _tools([self.trace])
        return log

    def _take(
        self, index: int, node: dict[str, Any], above: tuple[Turn, int] | None
    ) -> tuple[Turn, int] | None:
        message = as_dict(node.get("message"))
        if message.get("role") == "tool" and above is not None:
            return self._result(message, *above)
        role, text = message.get("role"), text_in(message.get("content"))
        kind = role if role in ("user", "assistant") else "meta"
        turn = Turn(
            parent=self._seen(above),
            kind=str(kind),
            offset=self.offset,
            uuid=f"{self.session_id}-{index}",
            timestamp=_instant(node.get("timestamp")),
            texts=[text] if text else [],
        )
        if kind == "assistant":
            self._decision(turn, index, node, message)
        if kind != "assistant" and not text:
            return above
        self.turns.append(turn)
        return turn, 0

    def _decision(
        self, turn: Turn, index: int, node: dict[str, Any], message: dict[str, Any]
    ) -> None:
        turn.message_id = f"{self.agent}:{self.session_id}:{index}"
        turn.flags = frozenset() if node.get("sampled") else frozenset({"copy"})
        thinking = text_or_none(message.get("reasoning_content"))
        turn.thinking = [thinking] if thinking else []
        for number, call in enumerate(map(as_dict, as_list(message.get("tool_calls")))):
            call_id = text_or_none(call.get("id")) or f"{turn.message_id}-{number}"
            name = text_or_none(call.get("name")) or ""
            turn.calls.append(RecordedCall(call_id, name, arguments_text(call.get("arguments"))))
        made_by = self._calls.get(index, {})
        turn.model = text_or_none(made_by.get("model")) or self._model
        turn.stop_reason = text_or_none(made_by.get("finish_reason"))
        if usage := as_dict(made_by.get("usage")):
            turn.usage = RecordedUsage(
                n_input=as_count(usage.get("prompt_tokens")),
                n_cache_read=as_count(usage.get("cached_input_tokens")),
                n_output=as_count(usage.get("completion_tokens")),
            )

    def _result(self, message: dict[str, Any], turn: Turn, n_above: int) -> tuple[Turn, int]:
        """Put a result behind its call; another branch may have put others there."""
        call_id = text_or_none(message.get("tool_call_id")) or ""
        text = text_in(message.get("content"))
        have = list(turn.results.items())
        if len(have) > n_above and have[n_above] == (call_id, Result(text)):
            return turn, n_above + 1
        if len(have) > n_above or turn.uuid in self._sealed:
            turn = self._copy(turn, n_above)
        turn.results.setdefault(call_id, Result(text))
        return turn, len(turn.results)

    def _seen(self, above: tuple[Turn, int] | None) -> Turn | None:
        """Return the turn above as this branch saw it: with the results that stand on its path."""
        if above is None:
            return None
        turn, n_results = above
        if len(turn.results) == n_results:
            self._sealed.add(turn.uuid)
            return turn
        key = (turn.uuid, n_results)
        if key not in self._copies:
            self._copies[key] = self._copy(turn, n_results)
        self._sealed.add(self._copies[key].uuid)
        return self._copies[key]

    def _copy(self, turn: Turn, n_results: int) -> Turn:
        copied = replace(
            turn,
            uuid=f"{turn.uuid}-{len(self.turns)}",
            flags=turn.flags | {"copy"},
            results=dict(list(turn.results.items())[:n_results]),
        )
        self.turns.append(copied)
        return copied


def _tools(holders: list[dict[str, Any]]) -> list[Tool]:
    """Return the tools that the first holder with any names, in the OpenAI form."""
    for holder in holders:
        tools = [as_dict(tool) for tool in as_list(holder.get("tools"))]
        named = [tool for tool in tools if text_or_none(tool.get("name"))]
        if named:
            return [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": text_or_none(tool.get("description")) or "",
                        "parameters": as_dict(tool.get("parameters")),
                    },
                }
                for tool in named
            ]
    return []


def _instant(value: Any) -> str | None:
    """Return seconds since 1970 as the log's other ingesters write times."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return datetime.fromtimestamp(value, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None
