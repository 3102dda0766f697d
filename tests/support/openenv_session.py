"""A session with an OpenEnv server by its messages alone, where the package is not installed.

`tests/frameworks/openenv` holds the same server to the package's own client.
"""

import asyncio
import json
from typing import Any

import aiohttp

from trainer.engines.openenv.adapter import ServerReply
from trainer.errors import EnvironmentFailedError


class Session:
    """One WebSocket."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._address = address
        self._run(self._connect())

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    async def _connect(self) -> None:
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"{self._address}/ws")

    def say(self, kind: str, **data: Any) -> dict[str, Any]:
        async def exchange() -> dict[str, Any]:
            await self._socket.send_json({"type": kind, "data": data})
            return await self._socket.receive_json()

        return self._run(exchange())

    def _reply(self, kind: str, **data: Any) -> ServerReply:
        told = self.say(kind, **data)
        if told["type"] == "error":
            raise EnvironmentFailedError(told["data"]["message"])
        observation = told["data"]["observation"]
        error = observation.get("error")
        return ServerReply(
            text=error["message"] if error else observation.get("result"),
            reward=told["data"]["reward"],
            is_done=told["data"]["done"],
            is_refused=bool(error),
            observation=observation,
        )

    def tools(self) -> list[dict[str, Any]]:
        return self._reply("step", type="list_tools").observation["tools"]

    def reset(self, **options: Any) -> ServerReply:
        return self._reply("reset", **options)

    def call(self, name: str, arguments: dict[str, Any]) -> ServerReply:
        return self._reply("step", type="call_tool", tool_name=name, arguments=arguments)

    def close(self) -> None:
        async def end() -> None:
            await self._socket.close()
            await self._http.close()

        self._run(end())
        self._loop.close()


def rows_at(address: str) -> list[dict[str, Any]]:
    """What the server offers."""

    async def fetch() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as http, http.get(f"{address}/tasks") as reply:
            return json.loads(await reply.text())

    return asyncio.run(fetch())
