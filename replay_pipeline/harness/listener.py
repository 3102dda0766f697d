"""A server on loopback that stores what a client sends, and whose answers make the client send more.

It supports the parts of four APIs that clients need: Anthropic's Messages, OpenAI's Responses and
chat completions, and Gemini's `generateContent`.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, NamedTuple, Self

Body = dict[str, Any]
_MAX_BODY = 64_000_000


class KeptRequest(NamedTuple):
    """One request to the model."""

    path: str
    headers: Mapping[str, str]
    body: Body


class ToolReply(NamedTuple):
    """A tool call in an answer."""

    name: str
    arguments: dict[str, Any]


Answer = Callable[[KeptRequest], Sequence[ToolReply]]
"""The answer to a request: tool calls, or a text that ends the turn."""


class Listener:
    """The server; use it as a context.

    Args:
        answer: returns the answer to a request.
    """

    def __init__(self, answer: Answer) -> None:
        self.kept: list[KeptRequest] = []
        self.came = threading.Condition()
        self.others: list[str] = []
        """Requests for something else, by method and path."""
        self._answer = answer
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Return the address, without a path."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, kept: KeptRequest) -> Sequence[ToolReply]:
        """Store a request, and return the answer to it."""
        answer = self._answer(kept)
        with self.came:
            self.kept.append(kept)
            self.came.notify_all()
        return answer


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a client that is ended leaves its connections."""


def _handler_of(listener: Listener) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Report nothing."""

        def do_HEAD(self) -> None:
            self._send(200, b"", "text/plain")

        def do_GET(self) -> None:
            listener.others.append(f"GET {self.path}")
            self._send(404, b"{}", "application/json")

        def do_CONNECT(self) -> None:
            listener.others.append(f"CONNECT {self.path}")
            self._send(403, b"", "text/plain")

        def do_POST(self) -> None:
            n_bytes = int(self.headers.get("content-length") or 0)
            data = self.rfile.read(min(n_bytes, _MAX_BODY))
            path = self.path.partition("?")[0]
            write = next((_WRITERS[end] for end in _WRITERS if path.endswith(end)), None)
            body: Any = None
            with suppress(ValueError):
                body = json.loads(data)
            if write is None or not isinstance(body, dict):
                listener.others.append(f"POST {path}")
                tokens = {"input_tokens": 1} if path.endswith("/count_tokens") else {}
                self._send(200, json.dumps(tokens).encode(), "application/json")
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            calls = listener.take(KeptRequest(path, headers, body))
            if body.get("stream") or path.endswith(_STREAM):
                lines = b"".join(write(body, calls))
                self._send(200, lines, "text/event-stream")
            else:
                self._send(200, json.dumps(_whole(path, body, calls)).encode(), "application/json")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            with suppress(OSError):  # the client may be gone already
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    return Handler


def _whole(path: str, body: Body, calls: Sequence[ToolReply]) -> Body:
    if path.endswith("/messages"):
        return _message(body, _blocks(calls)) | {"stop_reason": "end_turn"}
    if path.endswith(_WHOLE):
        return _content()
    message = {"role": "assistant", "content": "Done."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "chat_1", "object": "chat.completion", "choices": [choice], "usage": _USAGE}


_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


_numbers = count(1)


def _blocks(calls: Sequence[ToolReply]) -> list[Body]:
    return [
        {"type": "tool_use", "id": f"toolu_{next(_numbers)}", "name": name, "input": arguments}
        for name, arguments in calls
    ] or [{"type": "text", "text": "Done."}]


def _message(body: Body, content: list[Body]) -> Body:
    return {
        "id": f"msg_{next(_numbers)}", "type": "message", "role": "assistant", "model": body.get("model"),
        "content": content, "stop_reason": None, "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip


def _event(name: str, value: Body) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **value})}\n\n".encode()


def _of_messages(body: Body, calls: Sequence[ToolReply]) -> Iterator[bytes]:
    yield _event("message_start", {"message": _message(body, [])})
    for index, block in enumerate(_blocks(calls)):
        if calls:
            written = json.dumps(block["input"])
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": written}
        else:
            start, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        yield _event("content_block_start", {"index": index, "content_block": start})
        yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    stop = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    yield _event("message_delta", {"delta": stop, "usage": {"output_tokens": 1}})
    yield _event("message_stop", {})


def _of_responses(body: Body, calls: Sequence[ToolReply]) -> Iterator[bytes]:
    del calls
    said = [{"type": "output_text", "text": "Done.", "annotations": []}]
    item = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": said,
    }
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response = {"id": "resp_1", "object": "response", "model": body.get("model"), "output": []}
    yield _event("response.created", {"response": response | {"status": "in_progress"}})
    yield _event("response.output_item.done", {"output_index": 0, "item": item})
    done = response | {"status": "completed", "output": [item], "usage": usage}
    yield _event("response.completed", {"response": done})


def _of_chat(body: Body, calls: Sequence[ToolReply]) -> Iterator[bytes]:
    del calls
    head = {"id": "chat_1", "object": "chat.completion.chunk", "model": body.get("model")}
    for delta, reason in (({"role": "assistant", "content": "Done."}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        yield f"data: {json.dumps({**head, 'choices': [choice], 'usage': _USAGE})}\n\n".encode()
    yield b"data: [DONE]\n\n"


_STREAM, _WHOLE = ":streamGenerateContent", ":generateContent"


def _content() -> Body:
    content = {"role": "model", "parts": [{"text": "Done."}]}
    return {"candidates": [{"index": 0, "content": content, "finishReason": "STOP"}]}


def _of_gemini(body: Body, calls: Sequence[ToolReply]) -> Iterator[bytes]:
    del body, calls
    yield f"data: {json.dumps(_content())}\r\n\r\n".encode()


_WRITERS: dict[str, Callable[[Body, Sequence[ToolReply]], Iterator[bytes]]] = {
    "/messages": _of_messages,
    "/responses": _of_responses,
    "/chat/completions": _of_chat,
    _STREAM: _of_gemini,
    _WHOLE: _of_gemini,
}
