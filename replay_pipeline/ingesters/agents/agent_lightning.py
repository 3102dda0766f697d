"""Agent Lightning, from 1.0 on: events of rollouts, one a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.agents.verifiers import MessageGraph
from replay_pipeline.ingesters.base import ReadCounts, SessionLog
from replay_pipeline.ingesters.json_lines import (
    as_dict,
    as_list,
    read_objects,
    text_in,
    text_or_none,
)

_HEAD_BYTES = 4_096


class AgentLightning:
    """Reads the rollouts of a training run's store: its `Event`s as JSON lines.

    The log has the whole prompt of each model call. If a prompt continues an earlier one, it
    becomes a child of it. Only the model's answers are decisions.
    """

    name = "agent_lightning"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is an event of a rollout."""
        start = head[:_HEAD_BYTES].split(b"\n", 1)[0]
        return all(key in start for key in (b'"rollout_id"', b'"attempt_id"', b'"event_type"'))

    def read(self, path: Path, counts: ReadCounts, end: int | None = None) -> Iterator[SessionLog]:
        """Yield one conversation per attempt at a rollout."""
        rollouts: dict[str, list[dict[str, Any]]] = {}
        for offset, row in read_objects(path, counts, end):
            own, attempt = text_or_none(row.get("rollout_id")), text_or_none(row.get("attempt_id"))
            if own is None or attempt is None:
                counts.count("no_message")
                continue
            rollouts.setdefault(f"{own}-{attempt}", []).append({**row, "offset": offset})
        for name, rows in rollouts.items():
            rollout = _Rollout()
            for row in rows:
                counts.count(rollout.take(row))
            yield MessageGraph(rollout.trace, name, rows[0]["offset"], self.name).log()


class _Rollout:
    """Messages of one attempt, each once, below the one before it."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self._known: dict[bytes, int] = {}
        self._callers: dict[str, int] = {}

    @property
    def trace(self) -> dict[str, Any]:
        """Return what was taken in, as a graph of messages."""
        return {"nodes": self.nodes, "calls": self.calls, "tools": self.tools}

    def take(self, row: dict[str, Any]) -> str | None:
        """Take in one event; gives the reason if it is no call to the model."""
        call = _of_event(row)
        if call is None:
            return "bookkeeping"
        prompt, answer, made, tools = call
        if not prompt or not answer:
            return "no_message"
        parent = None
        for message in prompt:
            # Some tracers leave out the calls of a message, or all of it: its results tell of it.
            caller = self._callers.get(message["tool_call_id"] or "")
            if caller is not None and self.nodes[caller]["parent"] == parent:
                parent = caller
            key = msgspec.json.encode((parent, message))
            parent = self._known[key] if key in self._known else self._add(message, parent, key)
        key = msgspec.json.encode((parent, answer))
        node = self._add(answer, parent, key, sampled=True, timestamp=made.pop("timestamp"))
        self._callers |= {call["id"]: node for call in answer["tool_calls"]}
        self.calls.append({"node": node, **made})
        self.tools = tools or self.tools
        return None

    def _add(self, message: dict[str, Any], parent: int | None, key: bytes, **fields: Any) -> int:
        self._known[key] = len(self.nodes)
        self.nodes.append({"message": message, "parent": parent, **fields})
        return len(self.nodes) - 1


_Call = tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, Any], list[dict[str, Any]]]
"""Prompt, answer, what is known of how it was made, and the tools that were offered."""


def _of_event(row: dict[str, Any]) -> _Call | None:
    """Read a call to the model that the gateway recorded, in OpenAI's form."""
    data = as_dict(row.get("data"))
    if row.get("event_type") != "model_request":
        return None
    request, response = as_dict(data.get("request")), as_dict(data.get("response"))
    (choice,) = map(as_dict, as_list(response.get("choices"))[:1] or [None])
    usage = as_dict(data.get("usage")) or as_dict(response.get("usage"))
    cached = as_dict(usage.get("prompt_tokens_details")).get("cached_tokens")
    made = {
        "model": response.get("model") or data.get("model"),
        "usage": {**usage, "cached_input_tokens": cached},
        "finish_reason": choice.get("finish_reason"),
        "timestamp": row.get("timestamp"),
    }
    prompt = [_message(as_dict(message)) for message in as_list(request.get("messages"))]
    answer = _message(as_dict(choice["message"])) if choice.get("message") else None
    tools = [as_dict(as_dict(tool).get("function")) for tool in as_list(request.get("tools"))]
    return prompt, answer, made, tools


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form in which equal ones are equal."""
    calls = []
    for call in map(as_dict, as_list(message.get("tool_calls"))):
        function = as_dict(call.get("function")) or call
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        calls.append({
            "id": text_or_none(call.get("id")) or "",
            "name": text_or_none(function.get("name")) or "",
            "arguments": text,
        })  # fmt: skip
    return {
        "role": text_or_none(message.get("role")) or "assistant",
        "content": text_in(message.get("content")),
        "tool_calls": calls,
        "tool_call_id": text_or_none(message.get("tool_call_id")),
    }
