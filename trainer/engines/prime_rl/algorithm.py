"""The orchestrator's part: GRPO, hint-conditioned reference KL, and replayed pairs as credit.

PRIME-RL's algorithms annotate message graphs with advantages, reference log-probs, and loss weights
per token. The three channels need only these, so this is a subclass of its GRPO, and the trainer
doesn't change. `register` imports this module after it has extended the union of configurations.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prime_rl.orchestrator.algo import GRPOAlgorithm
from prime_rl.orchestrator.algo.base import iter_trainable_traces
from prime_rl.orchestrator.algo.routing import assign_reference_logprobs
from prime_rl.orchestrator.trajectories import iter_trainable_branches
from prime_rl.orchestrator.utils import episode_group_id
from renderers.base import create_renderer, load_tokenizer
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage

from trainer.data.hints import hint_for_row
from trainer.engines.handover import TokenizedPairs, read_reference, write_reference
from trainer.errors import AlignmentError, DatasetError, TrainerConfigError
from trainer.losses.channels import PREFERENCE_NUMBERS, ReplayOptions, replay_credit

logger = logging.getLogger(__name__)

REPLAYED = "replayed_pair"
"""Agent name of a replayed trace. PRIME-RL's metrics are by agent, so pairs don't mix with rollouts."""
SIDES = ("chosen_ids", "rejected_ids")


@dataclass
class Replayed:
    """The pairs that joined one group of rollouts."""

    step: int
    indices: tuple[int, ...]
    traces: list[Any] = field(default_factory=list)
    """The traces of the pairs in order: chosen, rejected, chosen, …."""


class ThreeChannelAlgorithm(GRPOAlgorithm):
    """PRIME-RL's GRPO with channels 2 and 3. Its options are those of `register.config_class`."""

    def __init__(self, config: Any, policy_pool: Any) -> None:
        super().__init__(config, policy_pool)
        if config.alpha_sdpo == config.beta_replay == config.policy_weight == 0:
            raise TrainerConfigError("[orchestrator.algo]: all three channels have weight 0")
        self.options = config
        self._preference = ReplayOptions(
            variant=config.dpo_variant,
            **{name: getattr(config, name) for name in PREFERENCE_NUMBERS},
        )
        self._pairs = TokenizedPairs(self.options.pairs) if self.options.beta_replay > 0 else None
        self._reference: list[list[float]] | None = None
        self._renderer: Any = None
        self._replayed: dict[str, Replayed] = {}
        self._n_drawn = self._n_groups = self._n_rl_tokens = self._n_hints = 0

    async def setup(self) -> None:
        """Score all pairs with the first policy, if a variant of the loss needs it."""
        await super().setup()
        if self.options.alpha_sdpo > 0:
            self._renderer = create_renderer(
                load_tokenizer(self.policy_pool.model_name), self.policy_pool.train_client.renderer
            )
        if self._pairs is not None and self._preference.needs_reference:
            self._reference = await self._reference_logps(self._pairs)

    async def score_episode(self, episode: Any) -> None:
        """Score each response for channel 2: its log-probabilities when the live policy has the hint.

        The group's pairs join its first episode here. The orchestrator counts a group's traces
        before it scores the group, so later additions would never reach the trainer.
        """
        await super().score_episode(episode)
        if self.options.alpha_sdpo > 0:
            for _, trace in iter_trainable_traces([episode]):
                await self._score_behind_hint(trace)
        if self._pairs is not None and episode_group_id(episode) not in self._replayed:
            self._bring_pairs(episode, self._pairs)

    async def score_group(self, episodes: list[Any]) -> None:
        """Score channel 1 by GRPO on the rollouts alone, then add the credit of the pairs."""
        rollouts = [
            episode.model_copy(
                update={"traces": [t for t in episode.traces if t.agent.name != REPLAYED]}
            )
            for episode in episodes
        ]
        await super().score_group(rollouts)
        for _, trace in iter_trainable_traces(rollouts):
            for node in trace.nodes:
                if node.advantages is not None:
                    node.advantages = [self.options.policy_weight * a for a in node.advantages]
                    # Tokens without credit are taken out of the batch before it is shipped.
                    self._n_rl_tokens += sum(a != 0.0 for a in node.advantages)
        self._n_groups += 1
        if self._n_groups == self.options.groups_per_step:
            self._say_what_was_silent()
        replayed = self._replayed.pop(episode_group_id(episodes[0]), None)
        if replayed is not None and replayed.indices and self._pairs is not None:
            await self._score_pairs(replayed, self._pairs)

    # -- channel 2 -------------------------------------------------------------------------------

    async def _score_behind_hint(self, trace: Any) -> None:
        data = trace.task.data
        if not hasattr(data, "hint"):
            raise DatasetError(
                f"alpha_sdpo={self.options.alpha_sdpo} and the task's data has no `hint`: use the taskset of trainer.engines.verifiers.taskset, or add that field to your own"
            )
        hint = hint_for_row({"hint": data.hint})
        if hint is None:
            return
        self._n_hints += 1
        message = {"role": "system", "content": hint}
        before = self._renderer.render_ids([message], add_generation_prompt=False)
        for branch, _ in iter_trainable_branches(trace):
            scored = await self._scored([*before, *branch.token_ids])
            assign_reference_logprobs(branch, scored[len(before) :])
            for node in branch.nodes:
                if any(node.mask):
                    weights = [self.options.alpha_sdpo if kept else 0.0 for kept in node.mask]
                    node.loss_weights = {**(node.loss_weights or {}), "ref_kl": weights}

    async def _scored(self, ids: list[int]) -> list[float]:
        scored = list(await self.policy_pool.score(ids))
        if len(scored) != len(ids):
            raise AlignmentError(
                f"the inference server scored {len(scored)} of {len(ids)} tokens: it must be vLLM "
                "with prompt_logprobs"
            )
        return scored

    def _say_what_was_silent(self) -> None:
        if self.options.alpha_sdpo > 0 and self._n_hints == 0:
            logger.warning(
                "channel sdpo did nothing in the first step: none of its rows has a hint"
            )

    # -- channel 3 -------------------------------------------------------------------------------

    def _bring_pairs(self, episode: Any, pairs: TokenizedPairs) -> None:
        options = self.options
        step, part = divmod(self._n_drawn, options.groups_per_step)
        self._n_drawn += 1
        sampler = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed)
        drawn = tuple(sampler.part(step, part=part, n_parts=options.groups_per_step))
        replayed = Replayed(step=step, indices=drawn)
        template = next(trace for _, trace in iter_trainable_traces([episode]))
        for i in drawn:
            for side in SIDES:
                trace = recorded_trace(template, pairs.rows[i]["prompt_ids"], pairs.rows[i][side])
                trace.info = {"pair": i, "side": side.removesuffix("_ids")}
                replayed.traces.append(trace)
        episode.traces.extend(replayed.traces)
        self._replayed[episode_group_id(episode)] = replayed

    async def _score_pairs(self, replayed: Replayed, pairs: TokenizedPairs) -> None:
        sides = [(i, side) for i in replayed.indices for side in SIDES]
        logps = await self._response_logps(pairs, sides)
        self._n_rl_tokens += sum(len(row) for row in logps)
        credits = self._credits(replayed, pairs, logps)
        for trace, row, credit in zip(replayed.traces, logps, credits, strict=True):
            response = trace.nodes[-1]
            # The policy's own log-probs, so that the importance ratio is 1.
            response.logprobs = row
            response.advantages = [credit] * len(row)

    def _credits(
        self, replayed: Replayed, pairs: TokenizedPairs, logps: list[list[float]]
    ) -> list[float]:
        """Return advantage of each side: the pairwise gradient of the step's weighted mean, times beta.

        PRIME-RL divides by all rl tokens of a batch, which nobody knows while a group is scored:
        the mean over the groups so far stands in for it.
        """
        options, mine = self.options, replayed.indices
        sums = torch.tensor([sum(row) for row in logps], dtype=torch.float64)
        lengths = torch.tensor([len(row) for row in logps], dtype=torch.float64)
        references = (None, None)
        if self._reference is not None:
            kept = torch.tensor([self._reference[i] for i in mine], dtype=torch.float64)
            references = (kept[:, 0], kept[:, 1])
        by_side = replay_credit(
            sums[0::2], sums[1::2], lengths[0::2], lengths[1::2], *references, self._preference
        )
        sampler = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed)
        total_weight = sum(pairs.rows[i]["weight"] for i in sampler.step(replayed.step))
        weights = torch.tensor([pairs.rows[i]["weight"] for i in mine], dtype=torch.float64)
        n_rl_tokens = self._n_rl_tokens / self._n_groups * options.groups_per_step
        scale = options.beta_replay * n_rl_tokens * weights / total_weight
        return (torch.stack(by_side, -1) * scale[:, None]).flatten().tolist()

    async def _response_logps(
        self, pairs: TokenizedPairs, sides: Sequence[tuple[int, str]]
    ) -> list[list[float]]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._scored([*pairs.rows[i]["prompt_ids"], *pairs.rows[i][side]])
                    )
                    for i, side in sides
                ]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several
        return [
            task.result()[len(pairs.rows[i]["prompt_ids"]) :]
            for task, (i, _) in zip(tasks, sides, strict=True)
        ]

    async def _reference_logps(self, pairs: TokenizedPairs) -> list[list[float]]:
        """Return summed log-probs of both sides, from the file or from the policy as it starts."""
        kept = read_reference(self.options.reference, pairs)
        if kept is not None:
            return kept
        sides = [(i, side) for i in range(len(pairs)) for side in SIDES]
        sums = [sum(row) for row in await self._response_logps(pairs, sides)]
        logps = [[sums[k], sums[k + 1]] for k in range(0, len(sums), 2)]
        write_reference(self.options.reference, pairs, logps)
        return logps


def recorded_trace(template: Any, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Any:
    """Build a trace of one recorded response for the task of a sampled one, with its own id."""
    n_prompt, n_response = len(prompt_ids), len(response_ids)
    prompt = MessageNode(
        message=UserMessage(content="(recorded prompt)"),
        token_ids=list(prompt_ids),
        mask=[False] * n_prompt,
    )
    response = MessageNode(
        parent=0,
        message=AssistantMessage(content="(recorded response)"),
        sampled=True,
        token_ids=list(response_ids),
        mask=[True] * n_response,
        logprobs=[0.0] * n_response,
    )
    return type(template)(
        task=template.task,
        agent=template.agent.model_copy(update={"name": REPLAYED}),
        nodes=[prompt, response],
        is_completed=True,
        ok=True,
    )
