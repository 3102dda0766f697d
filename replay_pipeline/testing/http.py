"""A small HTTP/1.1 server that can also misbehave: cut a reply short, or hang up.

Ordinary frameworks hide the connection, but the faults of a flaky endpoint need it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import h11


@dataclass(slots=True)
class Request:
    """One complete request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Response:
    """One reply, and how to send it."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    delivery: Literal["whole", "truncated", "hang_up", "never"] = "whole"


Handler = Callable[[Request], Awaitable[Response]]


class Connection(asyncio.Protocol):
    """One client connection, which answers requests one after the other."""

    def __init__(self, handler: Handler, tasks: set[asyncio.Task[None]]) -> None:
        self._handler = handler
        self._tasks = tasks
        self._http = h11.Connection(h11.SERVER)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Feed the parser."""
        self._http.receive_data(data)
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Continue after the client left. Its request is still computed and charged."""
        self._transport = None

    def _advance(self) -> None:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self._hang_up()
                return
            if isinstance(event, h11.Request):
                self._head, self._body = event, []
            elif isinstance(event, h11.Data):
                self._body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and self._head is not None:
                request = Request(
                    self._head.method.decode(),
                    self._head.target.decode(),
                    {k.decode(): v.decode("latin-1") for k, v in self._head.headers},
                    b"".join(self._body),
                )
                task = asyncio.get_running_loop().create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            else:
                return

    async def _answer(self, request: Request) -> None:
        response = await self._handler(request)
        if self._transport is None or response.delivery == "never":
            return
        if response.delivery == "hang_up":
            self._hang_up()
            return
        headers = {
            "content-type": "application/json",
            **response.headers,
            "content-length": str(len(response.body)),
        }
        data = self._http.send(
            h11.Response(status_code=response.status, headers=list(headers.items()))
        )
        if response.delivery == "truncated":
            half = response.body[: len(response.body) // 2]
            self._transport.write((data or b"") + (self._http.send(h11.Data(data=half)) or b""))
            self._hang_up()
            return
        body = self._http.send(h11.Data(data=response.body)) or b""
        end = self._http.send(h11.EndOfMessage()) or b""
        self._transport.write((data or b"") + body + end)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._advance()
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()
