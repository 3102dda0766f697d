"""Sessions with an OpenEnv server over its WebSocket, by the package's generic client.

Servers with MCP tools list them. Any other server gets one tool, `act`, whose parameters are the
fields of its action.
"""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from openenv.core import GenericEnvClient

from trainer.engines.openenv.adapter import (
    CallOutcomes,
    ServerReply,
    ToolSpec,
    as_text,
    make_environment,
)
from trainer.errors import EnvironmentFailedError

ACT = "act"
MCP_ACTIONS = frozenset({"Action", "CallToolAction", "ListToolsAction"})
"""Titles of action schemas whose servers accept `list_tools` and `call_tool`."""
OUTAGES = frozenset({"transport_error", "timeout", "execution_error"})
"""Kinds of tool errors that are the environment's fault. All others are the model's."""
INVALID = "(code: VALIDATION_ERROR)"
"""The message of the package's client for an action that doesn't fit the server's schema."""
PLAIN = frozenset({"done", "reward", "metadata"})


class OpenEnvSession:
    """A session on one WebSocket of any OpenEnv server, with one episode at a time."""

    def __init__(self, base_url: str, *, timeout_s: float = 60.0) -> None:
        self.base_url = base_url
        self._action = _schema(base_url, timeout_s)["action"]
        self._has_mcp = self._action.get("title") in MCP_ACTIONS
        self._client = GenericEnvClient(base_url=base_url, message_timeout_s=timeout_s).sync()
        self._do("connect", self._client.connect)

    def tools(self) -> list[ToolSpec]:
        """Return the server's tools."""
        if not self._has_mcp:
            return [_act_tool(self._action)]
        result = self._do("list tools", lambda: self._client.step({"type": "list_tools"}))
        return list(result.observation.get("tools") or ())

    def reset(self, **options: Any) -> ServerReply:
        """Start an episode. The options are the server's own."""
        result = self._do("reset", lambda: self._client.reset(**options))
        return _answer(result, has_result=False)

    def call(self, name: str, arguments: dict[str, Any]) -> ServerReply:
        """Call a tool.

        Raises:
            EnvironmentFailedError: the server doesn't answer, or reports an error.
        """
        action = arguments
        if self._has_mcp:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = self._do(name, lambda: self._client.step(action))
        except EnvironmentFailedError as error:
            if INVALID in str(error):  # the model's own mistake; the session goes on
                return ServerReply(text=f"Error: {error.__cause__}", is_refused=True)
            raise
        answer = _answer(result, has_result=True)
        error = answer.observation.get("error")
        if isinstance(error, Mapping) and error.get("error_type") in OUTAGES:
            raise EnvironmentFailedError(f"{self.base_url}: {name}: {error.get('message')}")
        return answer

    def close(self) -> None:
        """End the session, unless the server has gone."""
        try:
            self._client.close()
        except (OSError, RuntimeError, TimeoutError):
            return

    def _do(self, what: str, request: Any) -> Any:
        try:
            return request()
        except Exception as error:
            raise EnvironmentFailedError(
                f"{self.base_url}: {what}: {type(error).__name__}: {error}"
            ) from error


def list_tools(base_url: str, *, timeout_s: float = 60.0) -> list[ToolSpec]:
    """List the tools of a server, in a separate session."""
    session = OpenEnvSession(base_url, timeout_s=timeout_s)
    try:
        return session.tools()
    finally:
        session.close()


def environment_factory(
    base_url: str,
    *,
    columns: tuple[str, ...] = ("state_id",),
    timeout_s: float = 60.0,
    name: str = "OpenEnv",
) -> tuple[Any, CallOutcomes]:
    """Make TRL's `environment_factory` for the server at `base_url`, and count its calls."""
    return make_environment(
        list_tools(base_url, timeout_s=timeout_s),
        lambda: OpenEnvSession(base_url, timeout_s=timeout_s),
        columns=columns,
        name=name,
    )


def _schema(base_url: str, timeout_s: float) -> dict[str, Any]:
    url = base_url.replace("ws://", "http://").replace("wss://", "https://").rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=timeout_s) as reply:  # noqa: S310
            return json.load(reply)
    except (OSError, ValueError) as error:
        raise EnvironmentFailedError(f"{base_url}: cannot read its schema: {error}") from error


def _act_tool(schema: Mapping[str, Any]) -> ToolSpec:
    properties = {k: v for k, v in (schema.get("properties") or {}).items() if k not in PLAIN}
    required = [name for name in schema.get("required") or () if name in properties]
    parameters = {"type": "object", "properties": properties, "required": required}
    description = str(schema.get("description") or "Act in the environment.")
    return {"name": ACT, "description": description, "input_schema": parameters}


def _answer(result: Any, *, has_result: bool) -> ServerReply:
    observation: Mapping[str, Any] = result.observation or {}
    error = observation.get("error")
    return ServerReply(
        text=_text(observation, has_result=has_result),
        reward=float(result.reward or 0.0),
        is_done=bool(result.done),
        is_refused=bool(error),
        observation=observation,
    )


def _text(observation: Mapping[str, Any], *, has_result: bool) -> str | None:
    """Choose what the model reads: an error, a tool's result, a text field, or everything."""
    error = observation.get("error")
    if isinstance(error, Mapping):
        return f"Error: {error.get('message')}"
    if error:
        return f"Error: {error}"
    if has_result and "result" in observation:
        result = observation["result"]
        return as_text(result.get("data", result) if isinstance(result, Mapping) else result)
    for name in ("text", "message", "content", "output"):
        if isinstance(observation.get(name), str):
            return observation[name]
    rest = {k: v for k, v in observation.items() if k not in PLAIN}
    return as_text(rest) if has_result and rest else None
