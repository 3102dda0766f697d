"""A stranger's server, which writes down whatever arrives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.loopback import QuietHandler, served


@dataclass
class Stranger:
    """What reached the stranger: one text of request line, headers and body per request."""

    url: str
    heard: list[str] = field(default_factory=list)


@contextmanager
def stranger(files: dict[str, str] | None = None) -> Iterator[Stranger]:
    """A server that answers as a teacher would, lists every model, and serves `files` by path."""
    heard: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            heard.append(f"{self.requestline}\n{self.headers}")
            models = {"data": [{"id": "m", "pricing": {"prompt": "0", "completion": "0"}}]}
            self.say((files or {}).get(self.path, json.dumps(models)))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            heard.append(f"{self.requestline}\n{self.headers}{body.decode()}")
            message = {"role": "assistant", "content": "thank you"}
            self.say(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))

        do_HEAD = do_GET

        def say(self, text: str) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    with served(Handler) as url:
        yield Stranger(url, heard)
