"""Agent Lightning: spans (up to 0.3) or events (from 1.0) of rollouts, one a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from replay_pipeline.ingesters.agents.verifiers import MessageGraph
from replay_pipeline.ingesters.base import ReadCounts, SessionLog
from replay_pipeline.ingesters.json_lines import (
    as_count,
    as_dict,
    as_list,
    read_objects,
    text_in,
    text_or_none,
)

_HEAD_BYTES = 4_096


class AgentLightning:
    """Reads the rollouts of a training run's store: `Span`s or `Event`s as JSON lines.

    The log has the whole prompt of each model call. If a prompt continues an earlier one, it
    becomes a child of it. Only the model's answers are decisions.
    """

    name = "agent_lightning"
    rank = 3

    def sniff(self, head: bytes) -> bool:
        """Return whether the first row is a span or an event of a rollout."""
        start = head[:_HEAD_BYTES].split(b"\n", 1)[0]
        is_of_rollout = b'"rollout_id"' in start and b'"attempt_id"' in start
        return is_of_rollout and (b'"span_id"' in start or b'"event_type"' in start)

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
            rows.sort(key=lambda row: as_count(row.get("sequence_id")))
            rollout = _Rollout()
            for row in rows:
                counts.count(rollout.take(row, rows))
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

    def take(self, row: dict[str, Any], rows: list[dict[str, Any]]) -> str | None:
        """Take in one span or event; gives the reason if it is no call to the model."""
        call = _of_event(row) if "event_type" in row else _of_span(row, rows)
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


def _of_span(row: dict[str, Any], rows: list[dict[str, Any]]) -> _Call | None:
    """Read a call to the model from attributes whose names are paths (`gen_ai.prompt.0.role`)."""
    attributes = as_dict(row.get("attributes"))
    if not any(key.startswith("gen_ai.completion.") for key in attributes):
        return None
    found = as_dict(_nested(attributes).get("gen_ai"))
    (completion,) = map(as_dict, as_list(found.get("completion"))[:1] or [None])
    response, usage = as_dict(found.get("response")), as_dict(found.get("usage"))
    made = {
        "model": response.get("model") or as_dict(found.get("request")).get("model"),
        "usage": {**usage, "cached_input_tokens": usage.get("cache_read_input_tokens")},
        "finish_reason": completion.get("finish_reason"),
        "timestamp": row.get("start_time"),
    }
    calls = as_list(completion.get("tool_calls")) or [
        {"id": as_dict(call.get("call")).get("id"), **call, "arguments": call.get("parameters")}
        for inner in rows
        if inner.get("parent_id") == row.get("span_id")
        and (call := as_dict(_nested(as_dict(inner.get("attributes"))).get("tool")))
    ]
    prompt = [_message(as_dict(message)) for message in as_list(found.get("prompt"))]
    tools = as_list(as_dict(found.get("request")).get("functions"))
    for tool in map(as_dict, tools):
        tool["parameters"] = _parsed(tool.get("parameters"))
    return prompt, _message({**completion, "tool_calls": calls}), made, tools


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


def _nested(attributes: dict[str, Any]) -> dict[str, Any]:
    """Put values whose names are paths inside one another; those with numbers become lists."""
    root: dict[str, Any] = {}
    for path, value in attributes.items():
        *above, last = path.split(".")
        place = root
        for name in above:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        if not isinstance(place.get(last), dict):
            place[last] = value
    return as_dict(_with_lists(root))


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and all(key.isdigit() for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
