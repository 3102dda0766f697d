"""Recorded states as one verifiers taskset, with the harness that plays them.

The states come from a published dataset, or from `replay-pipeline workspace serve`. At a state of a
dataset, a rollout is one model call with the state's own messages and tools, and its reward is the
agreement with the consensus. At a state of a server, the model acts with the server's tools, and the
server pays for the project's check or the consensus. The task's data contains the `hint`, where
self-distillation looks for a demonstration (`demo_key="hint"`).
"""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from trainer.data.dataset import load_preference_data
from trainer.data.rewards import load_reward
from trainer.engines.verifiers.wire import (
    flat_messages,
    flat_tools,
    nested_action,
    nested_tools,
)
from trainer.errors import DatasetError, EnvironmentFailedError

__all__ = ["ReplayData", "ReplayEpisode", "ReplayTask", "ReplayTaskset", "ReplayTasksetConfig"]

_MOST_BYTES = 64_000_000


class ReplayData(vf.TaskData):
    """A recorded state, and what decides the reward there."""

    state_id: str | None = None
    session_id: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """The tools that the agent could call, in verifiers' form."""
    hint: str | None = None
    """What went wrong here, according to the log. It is for a teacher, and never part of the prompt."""
    consensus: dict[str, Any] | None = None
    """The assistant message that the teachers agreed on."""
    check: str | None = None
    """The command that has to pass."""
    base_url: str | None = None
    """The server that plays the state, and pays. By default, it is one model call."""


class ReplayTaskConfig(vf.TaskConfig):
    """How to score a decision that no server scores."""

    reward: str = "consensus"
    """The built-in reward, or `package.module:function(message, row) -> float`."""


class ReplayTasksetConfig(vf.TasksetConfig):
    """Which recorded states to use."""

    dataset: str = ""
    """Published dataset: a folder or a Hub id."""
    revision: str | None = None
    split: Literal["train", "test"] = "train"
    base_url: str = ""
    """Where `workspace serve` offers states, instead of a dataset."""
    timeout_s: float = 120.0
    """For the server's list of states, in seconds."""
    task: ReplayTaskConfig = ReplayTaskConfig()


class ReplayState(vf.State):
    """What the server has paid so far."""

    paid: float = 0.0


class ReplayTask(vf.Task[ReplayData, ReplayState, ReplayTaskConfig]):
    """The task to act at one recorded state."""

    @property
    def key(self) -> str:
        """Return the state's id, which is the same in every version of the dataset."""
        return self.data.state_id or self.hash

    @vf.reward
    async def state_reward(self, trace: vf.Trace) -> float:
        """Return what the server has paid, or how well the reply agrees with the consensus."""
        if self.data.base_url is not None:
            return float(trace.state.paid)
        replies = [node.message for node in trace.nodes if node.sampled]
        if not replies:
            return 0.0
        prompt = self.data.prompt if isinstance(self.data.prompt, list) else []
        row = {"consensus": self.data.consensus, "prompt": [m.model_dump() for m in prompt]}
        action = nested_action(replies[0].model_dump())
        return float(load_reward(self.config.reward)(action, row))

    @vf.metric
    async def used_a_tool(self, trace: vf.Trace) -> float:
        """Return 1 if the first reply has a tool call, else 0."""
        replies = [node.message for node in trace.nodes if node.sampled]
        return float(bool(replies and getattr(replies[0], "tool_calls", None)))


class ReplayTaskset(vf.Taskset[ReplayTask, ReplayTasksetConfig]):
    """The states of a split with a consensus, or everything that a server offers."""

    def load(self) -> Iterator[ReplayTask]:
        """Yield one task per state.

        Raises:
            DatasetError: neither a dataset nor a server is set, or it has no state.
        """
        config, address = self.config, self.config.base_url.rstrip("/") or None
        if not (config.dataset or address):
            raise DatasetError("set the taskset's `dataset` to a folder or a Hub id, or `base_url`")
        rows: list[Any] = self._served(address) if address else self._published()
        if not rows:
            where = address or f"{config.dataset}, split {config.split},"
            raise DatasetError(f"{where} has no state to act at")
        for row in rows:
            yield ReplayTask(
                ReplayData(
                    id=row.get("state_id"),
                    prompt=flat_messages(row["prompt"]),  # type: ignore[arg-type]
                    state_id=row.get("state_id"),
                    session_id=row.get("session_id"),
                    tools=flat_tools(row.get("tools")),
                    hint=row.get("hint"),
                    consensus=row.get("consensus"),
                    check=row.get("check"),
                    base_url=address,
                ),
                config.task,
            )

    def _published(self) -> list[Any]:
        data = load_preference_data(self.config.dataset, revision=self.config.revision)
        return list(data.prompts if self.config.split == "train" else data.test_prompts)

    def _served(self, address: str) -> list[Any]:
        try:
            with urllib.request.urlopen(f"{address}/tasks", timeout=self.config.timeout_s) as reply:  # noqa: S310
                return json.load(reply)
        except (OSError, ValueError) as error:
            raise DatasetError(f"{address}: cannot read its tasks: {error}") from error


class ReplayEpisode(vf.Harness[vf.HarnessConfig]):
    """One model call, or the loop of an agent whose tools are a server's. Nothing is executed here."""

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
        data: ReplayData,
    ) -> vf.ProgramResult:
        """Play one episode.

        Raises:
            EnvironmentFailedError: the server cannot be reached, or cannot run the check.
        """
        _, prompt = self.resolve_prompt(data)
        messages = [message_to_wire(each) for each in prompt] if isinstance(prompt, list) else []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            if data.base_url is None:
                tools = {"tools": nested_tools(data.tools)} if data.tools else {}
                await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            address = f"{data.base_url.replace('http', 'ws', 1)}/ws"
            try:
                async with connect(address, max_size=_MOST_BYTES) as session:
                    await _play(session, client, ctx.model, messages, trace, data)
            except (OSError, WebSocketException) as error:
                raise EnvironmentFailedError(f"{data.base_url}: {error}") from error
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _play(
    session: ClientConnection,
    client: AsyncOpenAI,
    model: str,
    messages: list[Any],
    trace: vf.Trace,
    data: ReplayData,
) -> None:
    """Let the model act until the server ends the episode, or the model answers in words."""
    await _said(session, "reset", {"state_id": data.state_id})
    offered = await _said(session, "step", {"type": "list_tools"})
    tools = nested_tools(
        [
            {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
            for t in offered["observation"]["tools"]
        ]
    )
    is_done = False
    while not is_done:
        reply = await client.chat.completions.create(model=model, tools=tools, messages=messages)
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            answer = await _called(session, call.function.name, call.function.arguments)
            trace.state.paid += answer["reward"]
            is_done = is_done or answer["done"]
            error = answer["observation"].get("error")
            text = f"Error: {error['message']}" if error else answer["observation"].get("result")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(text or "")})


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
