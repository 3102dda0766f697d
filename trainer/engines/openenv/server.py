"""The trace-replay environment: reset to a recorded state, act, and get a reward for agreement.

`reset(state_id=...)` or `reset(split=..., index=...)` starts an episode at a state of a published
dataset, with the tools in the dataset. The rewards of an episode's calls add up to the reward of
the decision. A call has no result, because the recording ends there.
"""

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_types import (
    CallToolAction,
    CallToolObservation,
    ListToolsAction,
    ListToolsObservation,
    Tool,
    ToolError,
    ToolErrorType,
)
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from trainer.data.dataset import load_preference_data
from trainer.data.rewards import RowReward, load_reward
from trainer.engines.openenv.episodes import Episode, ReplayTasks, replay_tasks
from trainer.errors import TrainerConfigError, TrainerError

logger = logging.getLogger(__name__)

ENV_NAME = "trace_replay"
NO_RESULT = "The recording ends here."


class ResetObservation(Observation):
    """The recorded state that an episode starts from."""

    state_id: str | None = Field(None, description="Name of the recorded state")
    messages: list[dict[str, Any]] = Field(default_factory=list, description="What led to it")
    n_calls: int = Field(0, description="Calls that make up the decision")


class ReplayState(State):
    """The progress of an episode."""

    state_id: str | None = None
    score: float = 0.0


class TraceReplayEnvironment(Environment):
    """The environment for one agent's decisions at recorded states."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, tasks: ReplayTasks, reward: RowReward) -> None:
        """Wait for a reset."""
        super().__init__()
        self._tasks, self._reward = tasks, reward
        self._names = {tool["function"]["name"] for tool in tasks.tools}
        self._episode: Episode | None = None
        self._episode_id: str | None = None

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        state_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **_: Any,
    ) -> Observation:
        """Go to a state by its id, by its index, or by a seed.

        Raises:
            DatasetError: the state doesn't exist.
            TrainerConfigError: neither an id, an index, nor a seed is given.
        """
        if state_id is not None:
            row = self._tasks.find(state_id)
        elif index is not None:
            row = self._tasks.row(split, index)
        elif seed is not None:
            row = self._tasks.row(split, seed % max(len(self._tasks.splits.get(split, ())), 1))
        else:
            raise TrainerConfigError("reset needs state_id, index (with split) or seed")
        self._episode = Episode(row, self._reward)
        self._episode_id = episode_id or str(uuid4())
        return ResetObservation(
            state_id=row.get("state_id"),
            messages=list(row["prompt"]),
            n_calls=len(row["consensus"]["tool_calls"]),
            reward=0.0,
        )

    def step(
        self,
        action: Action,
        timeout_s: float | None = None,  # noqa: ARG002 - the interface of the package
        **_: Any,
    ) -> Observation:
        """List the tools, or make one call of the decision.

        Raises:
            TrainerConfigError: the action comes before a reset, or is of another kind.
        """
        if isinstance(action, ListToolsAction):
            return ListToolsObservation(tools=[_mcp_tool(tool) for tool in self._tasks.tools])
        if not isinstance(action, CallToolAction):
            raise TrainerConfigError("an action must be list_tools or call_tool")
        if self._episode is None:
            raise TrainerConfigError("call reset before the first tool")
        if action.tool_name not in self._names:
            error = ToolError(
                error_type=ToolErrorType.TOOL_NOT_FOUND,
                message=f"there is no tool {action.tool_name}; there are {', '.join(sorted(self._names))}",
            )
            return CallToolObservation(
                tool_name=action.tool_name, error=error, reward=0.0, done=self._episode.is_done
            )
        gained = self._episode.call(action.tool_name, action.arguments)
        return CallToolObservation(
            tool_name=action.tool_name,
            result=NO_RESULT,
            reward=gained,
            done=self._episode.is_done,
        )

    @property
    def state(self) -> ReplayState:
        """Return the state of the episode."""
        episode = self._episode
        if episode is None:
            return ReplayState()
        return ReplayState(
            episode_id=self._episode_id,
            step_count=len(episode.calls),
            state_id=episode.row.get("state_id"),
            score=episode.score,
        )

    def list_splits(self) -> list[str]:
        """List the splits with states."""
        return [split for split, rows in self._tasks.splits.items() if rows]

    def num_tasks(self, split: str) -> int:
        """Count the states of a split."""
        return len(self._tasks.splits.get(split, ()))

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """List the names of all states of a split."""
        return [self.get_task(split, index) for index in range(self.num_tasks(split))]

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """Return the name of the state to which `reset(split=..., index=...)` goes.

        Raises:
            IndexError: the index doesn't exist.
        """
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(f"{split} has {self.num_tasks(split)} states")
        row = self._tasks.row(split, index)
        return {"id": row.get("state_id") or f"{split}-{index}", "index": index}


def _mcp_tool(tool: dict[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(
        name=function["name"],
        description=function.get("description") or function["name"],
        input_schema=function.get("parameters") or {"type": "object", "properties": {}},
    )


def make_app(tasks: ReplayTasks, reward: RowReward, *, max_sessions: int = 64) -> Any:
    """Build the server as an ASGI application.

    Raises:
        TrainerConfigError: `max_sessions` isn't positive.
    """
    if max_sessions < 1:
        raise TrainerConfigError(f"max_sessions={max_sessions} must be at least 1")
    return create_fastapi_app(
        lambda: TraceReplayEnvironment(tasks, reward),
        CallToolAction,
        CallToolObservation,
        max_concurrent_envs=max_sessions,
        env_name=ENV_NAME,
        state_cls=ReplayState,
        reset_observation_cls=ResetObservation,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the process is stopped. The first line of output is the address."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.engines.openenv.server",
        description="Recorded states of a published dataset as an OpenEnv environment.",
    )
    parser.add_argument("--dataset", required=True, help="folder or Hub id")
    parser.add_argument(
        "--reward", default="consensus", help="consensus, or package.module:function(message, row)"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument(
        "--max-sessions", type=int, default=64, help="at least the rollouts in flight"
    )
    options = parser.parse_args(arguments)
    try:
        tasks = replay_tasks(load_preference_data(options.dataset))
        app = make_app(tasks, load_reward(options.reward), max_sessions=options.max_sessions)
        listener = _listen(options.host, options.port)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Open a socket that already takes connections, so that the address can be told at once.

    Raises:
        TrainerConfigError: the address cannot be used.
    """
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise TrainerConfigError(f"{host}:{port}: cannot listen there ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
