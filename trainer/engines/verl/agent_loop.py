"""Rollouts at recorded states, each scored by the live policy after a hinted prompt.

The teacher of channel 2 is the policy that just wrote the response. The rollout server gets the
same response again, after the prompt with the hint, and returns its top-k at every position. This
costs one more prefill for a rollout with a hint, and nothing for others.
"""

import logging
from typing import Any
from uuid import uuid4

import ray
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.engine import EngineRegistry

from trainer.engines.verl.engine import ComposerEngine
from trainer.engines.verl.losses import NOT_SCORED
from trainer.engines.verl.options import BACKEND, current_options
from trainer.errors import DatasetError, TrainerConfigError

logger = logging.getLogger(__name__)

AGENT_NAME = "replayed_state"


@register(AGENT_NAME)
class ReplayedStateLoop(SingleTurnAgentLoop):
    """The loop for one action at a recorded state. The prompt is the dataset's, token for token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:  # type: ignore[override]
        """Sample the action."""
        self._prompt_ids = [int(i) for i in state_of(kwargs)["prompt_ids"]]
        return await super().run(sampling_params, **kwargs)

    async def ct_build_initial_tokens(self, *_: Any, **__: Any) -> list[int]:
        """Return the prompt that was rendered with the dataset."""
        return self._prompt_ids


class HintedAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc, name-defined]
    """VeRL's worker with the hinted policy as teacher."""

    async def _compute_teacher_logprobs(
        self,
        output: AgentLoopOutput,
        prompt_ids: list[int],
        response_ids: list[int],
        validate: bool,  # noqa: FBT001 - VeRL's signature
        sample_kwargs: dict[str, Any] | None = None,
    ) -> None:
        options = current_options()
        if validate or options.alpha_sdpo == 0:
            return
        hinted = state_of(sample_kwargs or {})["hinted_ids"]
        n_prompt, n_response, top_k = len(prompt_ids), len(response_ids), options.top_k
        ids = torch.full((n_prompt + n_response, top_k), NOT_SCORED, dtype=torch.int32)
        logprobs = torch.zeros(n_prompt + n_response, top_k)
        if hinted is not None and n_response > 0:
            answer = await self.llm_client.generate(
                request_id=uuid4().hex,
                prompt_ids=[int(i) for i in hinted] + list(response_ids),
                sampling_params={"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k},
            )
            # Row i of the answer is about token i + 1, as are the student's logits.
            first, last = len(hinted) - 1, len(hinted) + n_response - 1
            rows = slice(n_prompt - 1, n_prompt + n_response - 1)
            ids[rows] = torch.tensor(answer.extra_fields["prompt_ids"], dtype=torch.int32)[
                first:last
            ]
            logprobs[rows] = torch.tensor(answer.extra_fields["prompt_logprobs"])[first:last]
        output.extra_fields["teacher_ids"] = ids
        output.extra_fields["teacher_logprobs"] = logprobs


class HintedAgentLoopManager(AgentLoopManagerTQ):
    """The manager that starts hinted workers. It refuses if the engine's part of the plug-in isn't active."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        current_options()
        _require_live_engine()
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(HintedAgentLoopWorker)


def _require_live_engine() -> None:
    """Check that VeRL would build our engine in a process like this one.

    Raises:
        TrainerConfigError: VeRL would build its own engine, and train on channel 1 alone.
    """
    try:
        found = EngineRegistry.get_engine_cls("language_model", BACKEND)
    except (AssertionError, ValueError) as error:
        raise TrainerConfigError(f"VeRL has no {BACKEND} engine here: {error}") from error
    if not issubclass(found, ComposerEngine):
        raise TrainerConfigError(
            f"VeRL would train with {found.__name__}, on channel 1 alone: the entry point "
            "'verl.plugins' of this package is not installed, is switched off "
            "(VERL_USE_EXTERNAL_PLUGINS), or failed (see the log)"
        )


def state_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the recorded state in a row's `extra_info`.

    Raises:
        DatasetError: the row was not made by `replay-train verl`.
    """
    info = row.get("extra_info")
    info = info.item() if hasattr(info, "item") else info
    missing = [name for name in ("prompt_ids", "hinted_ids") if name not in (info or {})]
    if missing:
        raise DatasetError(
            f"a row's extra_info has no {missing[0]}: the data must be written by "
            "`replay-train verl`, which renders prompts and hints"
        )
    return info  # type: ignore[return-value]
