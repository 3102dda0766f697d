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
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as listen
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from replay_pipeline.errors import ConfigError
from replay_pipeline.workspaces.environment import TOOLS, CheckedTask, Run, TaskEpisode, row_of

_MOST_BYTES = 64_000_000
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
    """The tasks on offer."""

    def __init__(
        self,
        tasks: Sequence[CheckedTask],
        run_of: Callable[[CheckedTask], Run],
        *,
        max_calls: int = 32,
    ) -> None:
        """Offer tasks.

        Args:
            tasks: which.
            run_of: what runs commands of a task.
            max_calls: how many calls an episode has at most.
        """
        self.tasks = {task.state_id: task for task in tasks}
        self._run_of = run_of
        self._max_calls = max_calls

    def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request, or return `None` if a session begins."""
        path = urlsplit(request.path).path
        if path == "/ws":
            return None
        pages = {
            "/health": lambda: {"status": "healthy"},
            "/schema": lambda: {"action": _ACTION, "observation": {}, "state": {}},
            "/tasks": lambda: [row_of(task) for task in self.tasks.values()],
        }
        if path not in pages:
            return connection.respond(HTTPStatus.NOT_FOUND, f"no such address: {path}\n")
        response = connection.respond(HTTPStatus.OK, json.dumps(pages[path]()))
        del response.headers["content-type"]
        response.headers["content-type"] = "application/json"
        return response

    async def session(self, connection: ServerConnection) -> None:
        """Run the episodes of one connection until the client closes it."""
        with contextlib.suppress(ConnectionClosed):
            await self._play(connection)

    async def _play(self, connection: ServerConnection) -> None:
        episode: TaskEpisode | None = None
        async for message in connection:
            if not isinstance(message, str):
                break
            try:
                told = json.loads(message)
                kind, data = told["type"], told.get("data") or {}
                if kind == "close":
                    break
                if kind == "reset":
                    episode = await asyncio.to_thread(self._reset, data)
                    answer = _observation(
                        {**row_of(episode.task), "text": None}, 0.0, is_done=False
                    )
                elif kind == "step" and data.get("type") == "list_tools":
                    answer = _observation({"tools": TOOLS}, 0.0, is_done=False)
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

    def _reset(self, data: dict[str, Any]) -> TaskEpisode:
        """Begin an episode at a state by its id, its position or a seed.

        Raises:
            ValueError: there is no such state.
        """
        names = list(self.tasks)
        if (state_id := data.get("state_id")) is None:
            number = data.get("index", data.get("seed"))
            if not isinstance(number, int):
                raise ValueError("reset needs state_id, index or seed")
            state_id = names[number % len(names)]
        if state_id not in self.tasks:
            raise ValueError(f"there is no state {state_id}")
        task = self.tasks[state_id]
        return TaskEpisode(task, self._run_of(task), max_calls=self._max_calls)


def _step(episode: TaskEpisode, data: dict[str, Any]) -> dict[str, Any]:
    name = str(data["tool_name"])
    turn = episode.call(name, data.get("arguments") or {})
    observation: dict[str, Any] = {"tool_name": name, "result": turn.text, "error": None}
    if turn.error is not None:
        observation["error"] = {"error_type": "tool_error", "message": turn.error}
    return _observation(observation, turn.reward, is_done=turn.is_done)


def _observation(observation: dict[str, Any], reward: float, *, is_done: bool) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": is_done}
    return {"type": "observation", "data": data}


def serve(served: Served, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until the process is stopped.

    Args:
        served: the tasks to serve.
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
    asyncio.run(_until_told(served, listener))


async def _until_told(served: Served, listener: socket.socket) -> None:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with listen(
        served.session, sock=listener, process_request=served.answer, max_size=_MOST_BYTES
    ):
        await told.wait()
