"""A real S3-speaking server as a process, and a hostile network in front of it."""

import contextlib
import http.client
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.loopback import LoopbackServer
from tests.support.ports import free_port


class MotoServer:
    """`moto_server` on a free port of loopback."""

    def __init__(self, folder):
        self.port = free_port()
        with (folder / "moto.log").open("wb") as log:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("moto_server"), "-p", str(self.port)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        answered = threading.Event()
        while not answered.wait(0.05):
            assert self.process.poll() is None, (folder / "moto.log").read_text()
            with contextlib.suppress(OSError):
                self.request("PUT", "/bucket")
                answered.set()

    def request(self, method, path, body=b"", headers=None):
        """Return status, headers and body of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def close(self):
        self.process.kill()
        self.process.wait()


class HostileNetwork(LoopbackServer):
    """A proxy that refuses, delays, cuts, loses answers and replays old listings, by seed."""

    def __init__(self, target, *, seed=0, odds=0.0):
        self.target = target
        self.odds = odds
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.creating = threading.Lock()
        self.listings = {}
        self.counts = Counter()
        super().__init__()

    def fault(self, request):
        """Choose what happens to a request."""
        is_list = "list-type" in request.path
        kinds = {
            "GET": ["refused", "slow", "stale list" if is_list else "cut answer"],
            "PUT": ["refused", "slow", "lost answer", "cut upload"],
        }.get(request.command, ["refused"])
        with self.lock:
            # What has not happened yet comes soon, so that a short run meets every kind.
            missing = [kind for kind in kinds if not self.counts[kind]]
            odds = max(self.odds, 0.5) if missing and self.odds else self.odds
            kind = self.random.choice(missing or kinds) if self.random.random() < odds else ""
            if kind == "stale list" and request.path not in self.listings:
                kind = ""
            self.counts[kind or "fine"] += 1
        return kind

    def serve(self, request, body):
        kind = self.fault(request)
        if kind == "refused":
            return self.answer(request, 503, b"<Error><Code>SlowDown</Code></Error>")
        if kind == "slow":
            threading.Event().wait(0.3)
        if kind == "cut upload":
            self.half_upload(request, body)
            request.close_connection = True
            return None
        headers = {k: v for k, v in request.headers.items() if k.lower() != "connection"}
        # moto looks and writes in two steps, S3 in one: conditional requests take turns here.
        with self.creating if "If-None-Match" in request.headers else contextlib.nullcontext():
            status, given, data = self.target.request(request.command, request.path, body, headers)
        if kind == "lost answer":
            return self.answer(request, 500, b"<Error><Code>InternalError</Code></Error>")
        if "list-type" in request.path:
            with self.lock:
                old = self.listings.setdefault(request.path, (status, given, data))
                self.listings[request.path] = (status, given, data)
            status, given, data = old if kind == "stale list" else (status, given, data)
        return self.answer(request, status, data, given, cut=kind == "cut answer")

    def half_upload(self, request, body):
        """Send the server half of a body and hang up, as a dying machine would."""
        with socket.create_connection(("127.0.0.1", self.target.port)) as connection:
            head = [f"{request.command} {request.path} HTTP/1.1"]
            head += [f"{name}: {value}" for name, value in request.headers.items()]
            connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body[: len(body) // 2])
