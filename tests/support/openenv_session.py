"""A session with an OpenEnv server by its messages alone, where the package is not installed.

`tests/frameworks/openenv` holds the same server to the package's own client.
"""

import json
import urllib.request
from contextlib import ExitStack
from typing import Any

from websockets.sync.client import connect

from trainer.engines.openenv.adapter import ServerReply
from trainer.errors import EnvironmentFailedError


class Session:
    """One WebSocket."""

    def __init__(self, address: str) -> None:
        place = f"{address.replace('http', 'ws', 1)}/ws"
        self._open = ExitStack()
        self._socket = self._open.enter_context(connect(place, max_size=None, proxy=None))

    def say(self, kind: str, **data: Any) -> dict[str, Any]:
        self._socket.send(json.dumps({"type": kind, "data": data}))
        return json.loads(self._socket.recv())

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
        self._open.close()


def rows_at(address: str) -> list[dict[str, Any]]:
    """What the server offers."""
    with urllib.request.urlopen(f"{address}/tasks") as reply:
        return json.load(reply)
