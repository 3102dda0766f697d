"""A stranger's server, which writes down whatever arrives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.loopback import LoopbackServer


@dataclass
class Stranger:
    """What reached the stranger: one text of request line, headers and body per request."""

    url: str
    heard: list[str] = field(default_factory=list)


@contextmanager
def stranger(files: dict[str, str] | None = None) -> Iterator[Stranger]:
    """A server that answers as a teacher would, lists every model, and serves `files` by path."""
    heard: list[str] = []
    models = {"data": [{"id": "m", "pricing": {"prompt": "0", "completion": "0"}}]}
    message = {"role": "assistant", "content": "thank you"}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}]}

    class Server(LoopbackServer):
        def serve(self, request: Any, body: bytes) -> None:
            heard.append(f"{request.requestline}\n{request.headers}{body.decode()}")
            told = json.dumps(reply if request.command == "POST" else models)
            self.answer(request, 200, (files or {}).get(request.path, told).encode())

    with Server() as server:
        yield Stranger(server.url, heard)
