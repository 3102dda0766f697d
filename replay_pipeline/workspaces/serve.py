"""Serve episodes to OpenEnv's clients. Each WebSocket is a session.

Messages are `{"type": "reset", "data": {...}}` and `{"type": "step", "data": {"type":
"list_tools"}}` or `{"type": "call_tool", "tool_name": ..., "arguments": {...}}`; answers `{"type":
"observation", "data": {"observation", "reward", "done"}}` or `{"type": "error", "data": {"message",
"code"}}`. Source: openenv 0.10, `core/env_server/http_server.py`. `/tasks` lists the tasks.
"""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from replay_pipeline.errors import ConfigError
from replay_pipeline.types import Tool
from replay_pipeline.workspaces.environment import Attempt, OfferedTask

_MOST_BYTES = 64_000_000
_MOST_SILENT_S = 900.0
"""A client that is alive and asks nothing for so long has forgotten its episode."""
_ACTION = {
    "title": "CallToolAction",
    "type": "object",
    "properties": {
        "type": {"const": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}


class Served:
    """The tasks on offer. Each client is told of the tools of all of them."""

    def __init__(self, tasks: Mapping[str, OfferedTask]) -> None:
        self._tasks = tasks
        tools: dict[str, Tool] = {}
        for task in tasks.values():
            for tool in task.tools:
                name = tool["function"]["name"]
                if name not in tools or _n_parameters(tool) > _n_parameters(tools[name]):
                    tools[name] = tool
        self._tools = [
            {
                "name": name,
                "description": tools[name]["function"].get("description") or name,
                "input_schema": tools[name]["function"].get("parameters") or {"type": "object"},
            }
            for name in sorted(tools)
        ]

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request, or return `None` if a session begins."""
        path = urlsplit(request.path).path
        if path == "/ws":
            return None
        pages = {
            "/health": lambda: {"status": "healthy"},
            "/schema": lambda: {"action": _ACTION, "observation": {}, "state": {}},
            "/tasks": lambda: [task.row for task in self._tasks.values()],
        }
        if path not in pages:
            return connection.respond(HTTPStatus.NOT_FOUND, f"no such address: {path}\n")
        response = connection.respond(HTTPStatus.OK, json.dumps(pages[path]()))
        del response.headers["content-type"]
        response.headers["content-type"] = "application/json"
        return response

    async def session(self, connection: ServerConnection) -> None:
        """Run the episodes of one connection until the client closes it, or is silent for too long."""
        with contextlib.suppress(ConnectionClosed):
            try:
                await self._play(connection)
            except TimeoutError:
                await connection.close(reason=f"silent for {_MOST_SILENT_S:.0f} s")

    async def _play(self, connection: ServerConnection) -> None:
        episode: Attempt | None = None
        while True:
            message = await asyncio.wait_for(connection.recv(), _MOST_SILENT_S)
            if not isinstance(message, str):
                break
            try:
                told = json.loads(message)
                kind, data = told["type"], told.get("data") or {}
                if kind == "close":
                    break
                if kind == "reset":
                    task = self._task(data)
                    episode = await asyncio.to_thread(task.begin)
                    answer = _observation({**task.row, "text": None}, 0.0, is_done=False)
                elif kind == "step" and data.get("type") == "list_tools":
                    answer = _observation({"tools": self._tools}, 0.0, is_done=False)
                elif kind == "step" and episode is not None:
                    answer = await asyncio.to_thread(_step, episode, data)
                else:
                    raise ValueError("reset first" if kind == "step" else f"no message {kind!r}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                code = "VALIDATION_ERROR"
                answer = {"type": "error", "data": {"message": str(error), "code": code}}
            except ConfigError as error:
                code = "EXECUTION_ERROR"
                answer = {"type": "error", "data": {"message": str(error), "code": code}}
            await connection.send(json.dumps(answer))

    def _task(self, data: dict[str, Any]) -> OfferedTask:
        """Return the task of a state by its id, its position (in a split) or a seed.

        Raises:
            ValueError: there is no such state.
        """
        if (state_id := data.get("state_id")) is None:
            number, split = data.get("index", data.get("seed")), data.get("split")
            if not isinstance(number, int):
                raise ValueError("reset needs state_id, index or seed")
            names = [n for n, t in self._tasks.items() if split in (None, t.row.get("split"))]
            if not names:
                raise ValueError(f"there is no state in the split {split}")
            state_id = names[number % len(names)]
        if state_id not in self._tasks:
            raise ValueError(f"there is no state {state_id}")
        return self._tasks[state_id]


def _n_parameters(tool: Tool) -> int:
    return len((tool["function"].get("parameters") or {}).get("properties") or {})


def _step(episode: Attempt, data: dict[str, Any]) -> dict[str, Any]:
    name = str(data["tool_name"])
    turn = episode.call(name, data.get("arguments") or {})
    observation: dict[str, Any] = {"tool_name": name, "result": turn.text, "error": None}
    if turn.error is not None:
        observation["error"] = {"error_type": "tool_error", "message": turn.error}
    return _observation(observation, turn.reward, is_done=turn.is_done)


def _observation(observation: dict[str, Any], reward: float, *, is_done: bool) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": is_done}
    return {"type": "observation", "data": data}


def serve(
    tasks: Mapping[str, OfferedTask], *, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve until the process is stopped.

    Args:
        tasks: the tasks to serve, by the id of their state.
        host: the address to listen on.
        port: the port; 0 chooses a free one.
        on_ready: called with the address.

    Raises:
        ConfigError: the address can't be used.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"{host}:{port}: cannot listen there ({error})") from error
    address = listener.getsockname()
    on_ready(f"http://{address[0]}:{address[1]}")
    asyncio.run(_until_told(Served(tasks), listener))


async def _until_told(served: Served, listener: socket.socket) -> None:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with listen(
        served.session, sock=listener, process_request=served.answer, max_size=_MOST_BYTES
    ):
        await told.wait()
