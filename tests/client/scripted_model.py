"""A model on loopback that says what a script tells it, and keeps every request as it was sent."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tests.loopback import LoopbackServer

Block = dict[str, Any]
Body = dict[str, Any]
MODEL = "claude-sonnet-4-6"


def text(words: str) -> Block:
    """Return a block of text."""
    return {"type": "text", "text": words}


def thinking(words: str) -> Block:
    """Return a block of thinking."""
    return {"type": "thinking", "thinking": words, "signature": "c2lnbmVk"}


def call(name: str, **arguments: Any) -> Block:
    """Return a block that calls a tool; its id is given when it is said."""
    return {"type": "tool_use", "name": name, "input": arguments}


class ScriptedModel(LoopbackServer):
    """The Messages API of one model, as `POST /v1/messages`.

    Args:
        script: what the model says, answer by answer.
        helper: the same for requests that a subagent makes: those whose first message holds `SUBTASK`.
        before: called with the number of the main answer right before it goes out.
    """

    def __init__(
        self,
        script: Sequence[Sequence[Block]],
        helper: Sequence[Sequence[Block]] = (),
        before: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.script, self.helper, self.before = list(script), list(helper), before
        self.requests: list[tuple[str | None, Body]] = []
        """Message id of the answer and the body of each request for one."""
        self._n = {"main": 0, "helper": 0}
        self._lock = threading.Lock()
        super().__init__()

    def say(self, body: Body) -> tuple[str, list[Block]]:
        """Return the id and the blocks of the answer to a request."""
        with self._lock:
            message_id = f"msg_{len(self.requests):04d}"
            said = self._said(body)
            self.requests.append((message_id, body))
        offered = {tool["name"] for tool in body.get("tools") or ()}
        blocks = []
        for number, block in enumerate(said):
            if block.get("name") in ("Agent", "Task"):  # it has had both names
                block = block | {"name": "Agent" if "Agent" in offered else "Task"}
            its_id = f"toolu_{message_id[4:]}_{number}"
            blocks.append(block | {"id": its_id} if block["type"] == "tool_use" else block)
        return message_id, blocks

    def serve(self, request: Any, body: bytes) -> None:
        """Answer a request of the client."""
        path = request.path.partition("?")[0]
        if request.command != "POST":
            return self.answer(request, 200 if request.command == "HEAD" else 404)
        if path.endswith("/count_tokens"):
            return self.answer_json(request, {"input_tokens": 3_000})
        if not path.endswith("/messages"):
            return self.answer_json(request, {})
        asked = json.loads(body)
        message_id, blocks = self.say(asked)
        if not asked.get("stream"):
            return self.answer_json(request, _whole(message_id, blocks, asked["model"]))
        events = events_of(message_id, blocks, asked["model"])
        lines = ((name, json.dumps({"type": name, **event})) for name, event in events)
        data = "".join(f"event: {name}\ndata: {line}\n\n" for name, line in lines).encode()
        return self.answer(request, 200, data, [("content-type", "text/event-stream")])

    def _said(self, body: Body) -> Sequence[Block]:
        last = json.dumps(body["messages"][-1])
        if "detailed summary" in last.lower():
            return [text("<summary>The user wanted f to return other values.</summary>")]
        if not body.get("tools"):
            return [text("A title")]
        first = json.dumps(body["messages"][:3])
        who = "helper" if self.helper and "SUBTASK" in first and "MAINTASK" not in first else "main"
        lines = self.helper if who == "helper" else self.script
        number, self._n[who] = self._n[who], self._n[who] + 1
        if who == "main":
            self.before(number)
        return lines[number] if number < len(lines) else [text("That is all.")]


def events_of(message_id: str, blocks: Sequence[Block], model: str) -> list[tuple[str, Any]]:
    """Return an answer as the events of a stream."""
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 100,
        "cache_read_input_tokens": 3_000,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 100},
        "output_tokens": 1,
    }
    message = {
        "id": message_id, "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    events: list[tuple[str, Any]] = [("message_start", {"message": message})]
    for index, block in enumerate(blocks):
        kind = block["type"]
        if kind == "tool_use":
            start = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        elif kind == "thinking":
            start = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        else:
            start = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": block["text"]}]
        events.append(("content_block_start", {"index": index, "content_block": start}))
        events += (("content_block_delta", {"index": index, "delta": delta}) for delta in deltas)
        events.append(("content_block_stop", {"index": index}))
    is_calling = any(block["type"] == "tool_use" for block in blocks)
    stop = {"stop_reason": "tool_use" if is_calling else "end_turn", "stop_sequence": None}
    events.append(("message_delta", {"delta": stop, "usage": {"output_tokens": 50}}))
    return [*events, ("message_stop", {})]


def _whole(message_id: str, blocks: Sequence[Block], model: str) -> dict[str, Any]:
    return {
        "id": message_id, "type": "message", "role": "assistant", "model": model,
        "content": list(blocks), "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 50},
    }  # fmt: skip
