"""An endpoint that answers with exactly the bytes it is told to, in OpenRouter's protocol."""

import asyncio
import contextlib
import threading

from replay_pipeline.types import TeacherSpec


class OddServer:
    """Answers each call by `reply(number, body)`: status, headers and bytes; keeps what it was sent.

    `None` hangs up, `"stall"` never answers, `"drip"` sends a blank again and again, an awaitable is
    awaited first; `on_get(path)` answers what is only looked up, which is not there by default. It keeps
    no answers, so an equal request is charged again: what it replies is up to the test.
    """

    def __init__(self, reply, on_get=None):
        self.reply = reply
        self.on_get = on_get
        self.bodies = []
        self._writers = []

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve():
            self._server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            ready.set()
            self._ended = asyncio.Event()
            await self._ended.wait()
            self._server.close()
            talks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in talks:
                task.cancel()
            if talks:
                await asyncio.wait(talks)
            for writer in self._writers:  # whoever still reads is told that it is over
                writer.transport.abort()
            await asyncio.sleep(0)

        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serve()))
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def teacher(self, **more):
        spec = {
            "name": "t", "model": "a/b", "base_url": f"http://127.0.0.1:{self.port}/v1",
            "api_key_env": None, "dialect": "vllm", "timeout_s": 5.0,
            "price": {"prompt": 1e-6, "completion": 2e-6},
        }  # fmt: skip
        return TeacherSpec(**{**spec, **more})

    async def _talk(self, reader, writer):
        self._writers.append(writer)
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                if head.startswith("GET "):
                    nothing = (404, {"content-type": "text/html"}, b"")
                    reply = self.on_get(head.split()[1]) if self.on_get else nothing
                else:
                    length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                    body = await reader.readexactly(length)
                    self.bodies.append(body)
                    reply = self.reply(len(self.bodies) - 1, body)
                if asyncio.iscoroutine(reply):
                    reply = await reply
                if reply is None:
                    break
                if reply == "stall":
                    await asyncio.sleep(600)
                if reply == "drip":
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n")
                    while True:
                        writer.write(b" ")
                        await writer.drain()
                        await asyncio.sleep(0.02)
                status, headers, data = reply
                lines = {"content-type": "application/json", "content-length": str(len(data)),
                         **headers}  # fmt: skip
                text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{text}\r\n".encode() + data)
                await writer.drain()
        writer.close()
