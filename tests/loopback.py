"""HTTP servers of a test's own, on a free port of loopback."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing of this goes to the terminal."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The server's address, until the end of the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def webhook(status: int = 200, *, stalls: bool = False) -> Iterator[tuple[str, list[dict]]]:
    """A server that takes messages; one that stalls drips its answer until the test is over."""
    heard: list[dict] = []
    over = threading.Event()

    class Handler(QuietHandler):
        def do_POST(self):
            size = int(self.headers["content-length"])
            heard.append({"path": self.path, **json.loads(self.rfile.read(size))})
            if stalls:
                while not over.wait(0.02):
                    self.wfile.write(b"H")
                return
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.end_headers()

    with served(Handler) as url:
        try:
            yield f"{url}/hooks/T0/B0/secret-path", heard
        finally:
            over.set()
