"""The published dataset as a verifiers taskset, and the harness that plays one decision.

A rollout is one model call at a recorded state, with the state's own messages and tools. Its reward
is the agreement with the consensus. The task's data contains the `hint`, where self-distillation
looks for a demonstration (`demo_key="hint"`).
"""

from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

from trainer.data.dataset import load_preference_data
from trainer.data.rewards import load_reward
from trainer.engines.verifiers.wire import (
    flat_messages,
    flat_tools,
    nested_action,
    nested_tools,
)
from trainer.errors import DatasetError

__all__ = ["OneDecision", "ReplayData", "ReplayTask", "ReplayTaskset", "ReplayTasksetConfig"]


class ReplayData(vf.TaskData):
    """A recorded state and the teachers' consensus."""

    state_id: str | None = None
    session_id: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    """The tools that the agent could call, in verifiers' form."""
    hint: str | None = None
    """What went wrong here, according to the log. It is for a teacher, and never part of the prompt."""
    consensus: dict[str, Any]
    """The assistant message that the teachers agreed on."""


class ReplayTaskConfig(vf.TaskConfig):
    """How to score a decision."""

    reward: str = "consensus"
    """The built-in reward, or `package.module:function(message, row) -> float`."""


class ReplayTasksetConfig(vf.TasksetConfig):
    """Which recorded states to use."""

    dataset: str = ""
    """Published dataset: a folder or a Hub id."""
    revision: str | None = None
    split: Literal["train", "test"] = "train"
    task: ReplayTaskConfig = ReplayTaskConfig()


class ReplayTask(vf.Task[ReplayData, vf.State, ReplayTaskConfig]):
    """The task to decide at one recorded state."""

    @property
    def key(self) -> str:
        """Return the state's id, which is the same in every version of the dataset."""
        return self.data.state_id or self.hash

    @vf.reward
    async def consensus_reward(self, trace: vf.Trace) -> float:
        """Return how well the reply agrees with the consensus, or 0 without a reply."""
        replies = [node.message for node in trace.nodes if node.sampled]
        if not replies:
            return 0.0
        row = {"consensus": self.data.consensus, "prompt": self._prompt()}
        action = nested_action(replies[0].model_dump())
        return float(load_reward(self.config.reward)(action, row))

    @vf.metric
    async def used_a_tool(self, trace: vf.Trace) -> float:
        """Return 1 if the reply has a tool call, else 0."""
        replies = [node.message for node in trace.nodes if node.sampled]
        return float(bool(replies and getattr(replies[0], "tool_calls", None)))

    def _prompt(self) -> list[dict[str, Any]]:
        prompt = self.data.prompt
        return [] if not isinstance(prompt, list) else [m.model_dump() for m in prompt]


class ReplayTaskset(vf.Taskset[ReplayTask, ReplayTasksetConfig]):
    """The states of a split with a consensus."""

    def load(self) -> Iterator[ReplayTask]:
        """Yield one task per row of the dataset's `prompts`.

        Raises:
            DatasetError: no dataset is set, or it has no such rows.
        """
        if not self.config.dataset:
            raise DatasetError("set the taskset's `dataset` to a folder or a Hub id")
        data = load_preference_data(self.config.dataset, revision=self.config.revision)
        rows = data.prompts if self.config.split == "train" else data.test_prompts
        if not rows:
            raise DatasetError(f"{self.config.dataset} has no 'prompts' in {self.config.split}")
        for row in rows:
            yield ReplayTask(
                ReplayData(
                    id=row.get("state_id"),
                    prompt=flat_messages(row["prompt"]),  # type: ignore[arg-type]
                    state_id=row.get("state_id"),
                    session_id=row.get("session_id"),
                    tools=flat_tools(row.get("tools")),
                    hint=row.get("hint"),
                    consensus=row["consensus"],
                ),
                self.config.task,
            )


class OneDecision(vf.Harness[vf.HarnessConfig]):
    """One model call at the recorded state. It executes nothing, so it needs no sandbox."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002 - the interface of the package
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: ReplayData,
    ) -> vf.ProgramResult:
        """Ask the model once."""
        _, prompt = self.resolve_prompt(data)
        messages = prompt if isinstance(prompt, list) else []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            request: dict[str, Any] = {
                "model": ctx.model,
                "messages": [message_to_wire(message) for message in messages],
            }
            if data.tools:
                request["tools"] = nested_tools(data.tools)
            await client.chat.completions.create(**request)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
