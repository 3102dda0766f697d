"""States with a check, as `replay-pipeline workspace serve` offers them, as a verifiers taskset.

A rollout is an episode: the model acts with the client's tools on the files of a state until the
project's check passes, it says something instead of calling a tool, or the server ends it. The calls are
made by the server, in its sandbox, over one WebSocket a rollout. The reward is the check's.
"""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from trainer.engines.verifiers.wire import flat_messages, nested_tools
from trainer.errors import DatasetError, EnvironmentFailedError

__all__ = ["ServedData", "ServedEpisode", "ServedTask", "ServedTaskset", "ServedTasksetConfig"]

_MOST_BYTES = 64_000_000


class ServedData(vf.TaskData):
    """A state with a check."""

    state_id: str
    base_url: str
    check: str
    """The command that has to pass."""


class ServedState(vf.State):
    """What an episode has earned so far."""

    reward: float = 0.0


class ServedTasksetConfig(vf.TasksetConfig):
    """Where the states are served."""

    base_url: str = ""
    timeout_s: float = 120.0
    """For the list of tasks, in seconds."""


class ServedTask(vf.Task[ServedData, ServedState]):
    """Make the check of a project pass."""

    @property
    def key(self) -> str:
        """Return the state's id: the same wherever it is served."""
        return self.data.state_id

    @vf.reward
    async def check_reward(self, trace: vf.Trace) -> float:
        """Return 1 where the check passes at the end and did not before."""
        return float(trace.state.reward)


class ServedTaskset(vf.Taskset[ServedTask, ServedTasksetConfig]):
    """Every state that a server offers."""

    def load(self) -> Iterator[ServedTask]:
        """Yield one task per state.

        Raises:
            DatasetError: no address is set, or nothing is offered there.
        """
        address = self.config.base_url.rstrip("/")
        if not address:
            raise DatasetError("set the taskset's `base_url` to where `workspace serve` listens")
        try:
            with urllib.request.urlopen(f"{address}/tasks", timeout=self.config.timeout_s) as reply:  # noqa: S310
                rows = json.load(reply)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{address}: cannot read its tasks: {error}") from error
        if not rows:
            raise DatasetError(f"{address} offers no task")
        for row in rows:
            yield ServedTask(
                ServedData(
                    id=row["state_id"],
                    prompt=flat_messages(row["prompt"]),  # type: ignore[arg-type]
                    state_id=row["state_id"],
                    base_url=address,
                    check=row["check"],
                ),
                self.config.task,
            )


class ServedEpisode(vf.Harness[vf.HarnessConfig]):
    """The loop of an agent whose tools are the server's; nothing is executed on this machine."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,  # noqa: ARG002 - the interface of the package
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: ServedData,
    ) -> vf.ProgramResult:
        """Play one episode.

        Raises:
            EnvironmentFailedError: the server cannot be reached, or cannot run the check.
        """
        _, prompt = self.resolve_prompt(data)
        messages = [message_to_wire(each) for each in prompt] if isinstance(prompt, list) else []
        address = data.base_url.replace("http", "ws", 1)
        try:
            async with (
                connect(f"{address}/ws", max_size=_MOST_BYTES) as session,
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
            ):
                await _said(session, "reset", {"state_id": data.state_id})
                offered = await _said(session, "step", {"type": "list_tools"})
                request = {"model": ctx.model, "tools": _tools(offered["observation"]["tools"])}
                is_done = False
                while not is_done:
                    reply = await client.chat.completions.create(messages=messages, **request)
                    message = reply.choices[0].message
                    if not message.tool_calls:
                        break
                    messages.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls:
                        answer = await _called(session, call.function.name, call.function.arguments)
                        trace.state.reward += answer["reward"]
                        is_done = is_done or answer["done"]
                        text = _text(answer["observation"])
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailedError(f"{data.base_url}: {error}") from error
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _tools(offered: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return nested_tools(
        [
            {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
            for t in offered
        ]
    )


async def _called(session: ClientConnection, name: str, arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments or "{}")
    except ValueError as error:
        refused = {"error": {"message": f"the arguments are no JSON: {error}"}}
        return {"observation": refused, "reward": 0.0, "done": False}
    return await _said(
        session, "step", {"type": "call_tool", "tool_name": name, "arguments": values}
    )


async def _said(session: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Send a message and return the data of its answer.

    Raises:
        EnvironmentFailedError: the server refuses it, or cannot do it.
    """
    await session.send(json.dumps({"type": kind, "data": data}))
    told = json.loads(await session.recv())
    if told["type"] == "error":
        raise EnvironmentFailedError(f"{kind}: {told['data']['message']}")
    return told["data"]


def _text(observation: Mapping[str, Any]) -> str:
    error = observation.get("error")
    return f"Error: {error['message']}" if error else str(observation.get("result") or "")
