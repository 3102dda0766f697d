"""HTTP servers of a test's own, on a free port of loopback."""

import contextlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LoopbackServer:
    """Serves in threads from its creation to `close`; a subclass says how by `serve`."""

    def __init__(self):
        loopback = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                loopback.serve(self, body)

            do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.02])
        self.thread.start()

    def serve(self, request, body):
        """Answer one request, whose body is already read."""
        raise AssertionError(f"{type(self).__name__} does not answer {request.path}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answer(self, request, status, data=b"", headers=(), *, cut=False):
        """Send an answer; `cut` hangs up after half of its body."""
        request.send_response_only(status)
        given = {name.lower(): value for name, value in headers}
        length = given.get("content-length", len(data))
        for name, value in headers:
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                request.send_header(name, value)
        # The answer to HEAD tells the length of what GET would send.
        sent = length if request.command == "HEAD" else len(data)
        request.send_header("Content-Length", str(sent))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            request.close_connection = True

    def answer_json(self, request, value, status=200):
        """Send a value as JSON."""
        headers = [("Content-Type", "application/json")]
        self.answer(request, status, json.dumps(value).encode(), headers)


@contextmanager
def webhook(status=200, *, stalls=False):
    """A server that takes messages; one that stalls drips its answer until the test is over."""
    heard, over = [], threading.Event()

    class Server(LoopbackServer):
        def serve(self, request, body):
            heard.append(
                {"path": request.path, "headers": str(request.headers), **json.loads(body)}
            )
            while stalls and not over.wait(0.02):
                request.wfile.write(b"H")
            self.answer(request, status, headers=[("location", "/elsewhere")])

    with Server() as server:
        try:
            yield f"{server.url}/hooks/T0/B0/secret-path", heard
        finally:
            over.set()
