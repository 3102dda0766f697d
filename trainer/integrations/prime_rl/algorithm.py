"""The orchestrator's half: GRPO, hint-conditioned reference KL, and replayed pairs as credit.

PRIME-RL's algorithms annotate message graphs: advantages, reference log-probs and loss weights per
token. That is all that three channels need, so this is a subclass of its GRPO and no change of the
trainer. What a pipeline function does is PRIME-RL's business (`Pipeline`); nothing here imports it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trainer.errors import AlignmentError, DatasetError, TrainerConfigError
from trainer.hints import hint_for_row
from trainer.integrations.pairs import TokenizedPairs, read_reference, write_reference
from trainer.losses.channels import ReplayOptions
from trainer.losses.credit import replay_credit

logger = logging.getLogger(__name__)

OWN_NOTES = (
    "entropies",
    "is_content",
    "logprobs",
    "renderer_token_ids",
    "routed_experts",
    "sampling_mask",
    "trainer_logprobs",
)
"""What nodes of a message graph note per token besides what algorithms write."""

Score = Callable[[list[int]], Any]
"""Awaitable log-probs of every token given those before it; 0 for the first."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What PRIME-RL provides to an algorithm, by our names."""

    trainable_traces: Callable[[list[Any]], Iterable[Any]]
    branches: Callable[[Any], Iterable[Any]]
    assign_reference: Callable[[Any, list[float]], None]
    hint_ids: Callable[[Any, str], list[int]]
    """From the algorithm and a hint to the ids of a leading system message."""


@dataclass(frozen=True, kw_only=True)
class ChannelOptions:
    """The parameters of `[orchestrator.algo]` with `type = "three_channels"`."""

    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    policy_weight: float = 1.0
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    pairs: str = ""
    """Tokenized pairs, as `trainer.integrations.pairs.write_pairs` makes them."""
    pairs_per_step: int = 4
    groups_per_step: int = 1
    """Groups of rollouts in one batch: each brings its part of the step's pairs."""
    reference: str = ""
    """File for the reference log-probs of all pairs; written before the first step."""
    seed: int = 42


class ThreeChannels:
    """Mixed into PRIME-RL's GRPO algorithm by `register`."""

    pipeline: ClassVar[Pipeline]

    def __init__(self, config: Any, clients: Any) -> None:
        """Build GRPO, then read the pairs.

        Raises:
            DatasetError: channel 3 has a weight, and there is no pair.
        """
        super().__init__(config, clients)  # type: ignore[call-arg]
        self.options = options_of(config)
        self._score: Score = clients.score
        self._pairs = TokenizedPairs(self.options.pairs) if self.options.beta_replay > 0 else None
        self._reference: list[list[float]] | None = None
        self._n_groups = self._n_rl_tokens = self._n_hints = 0

    async def setup(self) -> None:
        """Score all pairs under the policy as it is before the first step, if a variant needs it."""
        await super().setup()  # type: ignore[misc]
        if self._pairs is not None and self.options.replay.needs_reference:
            self._reference = await self._reference_logps(self._pairs)

    async def score_episode(self, episode: Any) -> None:
        """Channel 2: what the live policy says of each response once it has read the hint.

        Raises:
            DatasetError: the task's data has no `hint`.
            AlignmentError: the server answered with another number of log-probs.
        """
        await super().score_episode(episode)  # type: ignore[misc]
        if self.options.alpha_sdpo == 0:
            return
        for trace in self.pipeline.trainable_traces([episode]):
            hint = self._hint(trace)
            if hint is None:
                continue
            self._n_hints += 1
            before = self.pipeline.hint_ids(self, hint)
            for branch in self.pipeline.branches(trace):
                scored = await self._scored([*before, *branch.token_ids])
                self.pipeline.assign_reference(branch, scored[len(before) :])
                for node in branch.nodes:
                    if any(node.mask):
                        weights = [self.options.alpha_sdpo if kept else 0.0 for kept in node.mask]
                        node.loss_weights = {**(node.loss_weights or {}), "ref_kl": weights}

    async def score_group(self, episodes: list[Any]) -> None:
        """Channel 1 as GRPO does it, then this group's part of the step's pairs."""
        await super().score_group(episodes)  # type: ignore[misc]
        for trace in self.pipeline.trainable_traces(episodes):
            for node in trace.nodes:
                if node.advantages is not None:
                    node.advantages = [self.options.policy_weight * a for a in node.advantages]
                self._n_rl_tokens += sum(node.mask)
        step, part = divmod(self._n_groups, self.options.groups_per_step)
        self._n_groups += 1
        if step == 0 and part == self.options.groups_per_step - 1:
            self._say_what_was_silent()
        if self._pairs is not None:
            await self._add_pairs(episodes, self._pairs, step, part)

    # -- channel 2 -------------------------------------------------------------------------------

    def _hint(self, trace: Any) -> str | None:
        data = trace.task.data
        if not hasattr(data, "hint"):
            raise DatasetError(
                f"alpha_sdpo={self.options.alpha_sdpo} and the task's data has no `hint`: take the "
                "taskset of trainer.integrations.verifiers.taskset, or give yours that field"
            )
        hint = hint_for_row({"hint": data.hint})
        return hint.text if hint else None

    async def _scored(self, ids: list[int]) -> list[float]:
        scored = list(await self._score(ids))
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

    async def _add_pairs(
        self, episodes: list[Any], pairs: TokenizedPairs, step: int, part: int
    ) -> None:
        options = self.options
        sampler = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed)
        mine = sampler.part(step, part=part, n_parts=options.groups_per_step)
        if not mine:
            return
        sides = [(i, side) for i in mine for side in ("chosen_ids", "rejected_ids")]
        logps = await self._response_logps(pairs, sides)
        self._n_rl_tokens += sum(len(row) for row in logps)
        credits = self._credits(mine, pairs, logps, step)
        carriers = ((e, t) for e in episodes for t in self.pipeline.trainable_traces([e]))
        home, template = next(carriers, (None, None))
        if home is None:
            raise TrainerConfigError("a group without a trainable trace cannot carry pairs")
        for (i, side), row, credit in zip(sides, logps, credits, strict=True):
            home.traces.append(
                recorded_trace(
                    template, pairs.rows[i]["prompt_ids"], pairs.rows[i][side], row, credit
                )
            )

    def _credits(
        self, mine: Sequence[int], pairs: TokenizedPairs, logps: list[list[float]], step: int
    ) -> list[float]:
        """Advantage of each side: the pairwise gradient of the step's weighted mean, times beta.

        PRIME-RL divides by all rl tokens of a batch, which nobody knows while a group is scored:
        the mean over the groups so far stands in for it.
        """
        options = self.options
        sums = torch.tensor([sum(row) for row in logps], dtype=torch.float64)
        lengths = torch.tensor([len(row) for row in logps], dtype=torch.float64)
        references = (None, None)
        if self._reference is not None:
            kept = torch.tensor([self._reference[i] for i in mine], dtype=torch.float64)
            references = (kept[:, 0], kept[:, 1])
        by_side = replay_credit(
            sums[0::2], sums[1::2], lengths[0::2], lengths[1::2], *references, options.replay
        )
        sampler = pairs.sampler(batch_size=options.pairs_per_step, seed=options.seed)
        total_weight = sum(pairs.rows[i]["weight"] for i in sampler.step(step))
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
        """Summed log-probs of both sides, from the file or from the policy as it starts."""
        kept = read_reference(self.options.reference, pairs)
        if kept is not None:
            return kept
        sides = [(i, side) for i in range(len(pairs)) for side in ("chosen_ids", "rejected_ids")]
        sums = [sum(row) for row in await self._response_logps(pairs, sides)]
        logps = [[sums[k], sums[k + 1]] for k in range(0, len(sums), 2)]
        write_reference(self.options.reference, pairs, logps)
        return logps


def options_of(config: Any) -> ChannelOptions:
    """The options in an algorithm's configuration.

    Raises:
        TrainerConfigError: no channel has a weight, or a value is out of range.
    """
    names = [name for name in ChannelOptions.__dataclass_fields__ if name != "replay"]
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    replay = {
        name: getattr(config, name)
        for name in ("dpo_beta", "simpo_beta", "simpo_gamma")
        if hasattr(config, name)
    }
    options = ChannelOptions(
        **values, replay=ReplayOptions(variant=getattr(config, "dpo_variant", "simpo"), **replay)
    )
    if options.alpha_sdpo == options.beta_replay == options.policy_weight == 0:
        raise TrainerConfigError("[orchestrator.algo]: all three channels have weight 0")
    if min(options.alpha_sdpo, options.beta_replay, options.policy_weight) < 0:
        raise TrainerConfigError("[orchestrator.algo]: a channel has a negative weight")
    if options.groups_per_step < 1 or options.pairs_per_step < 1:
        raise TrainerConfigError(
            "[orchestrator.algo]: groups_per_step and pairs_per_step: at least 1"
        )
    return options


def recorded_trace(
    template: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    logprobs: Sequence[float],
    credit: float,
) -> Any:
    """A trace of one recorded response, in the image of a sampled one.

    Its behaviour log-probs are the policy's own, so that the importance ratio is 1.
    """
    asked = next(node for node in template.nodes if not node.sampled)
    said = next(node for node in template.nodes if node.sampled)
    prompt = recorded_node(asked, prompt_ids, is_trained=False)
    response = recorded_node(said, response_ids, is_trained=True).model_copy(
        update={
            "parent": 0,
            "logprobs": list(logprobs),
            "advantages": [credit] * len(response_ids),
        }
    )
    return template.model_copy(
        update={"nodes": [prompt, response], "info": {"replayed_pair": True}, "rewards": {}}
    )


def recorded_node(template: Any, token_ids: Sequence[int], *, is_trained: bool) -> Any:
    """The node with other tokens, and nothing left of what was noted per token of its own."""
    known: dict[str, Any] = getattr(type(template), "model_fields", {})
    blank = {
        name: known[name].get_default(call_default_factory=True)
        for name in OWN_NOTES
        if name in known
    }
    return template.model_copy(
        update=blank
        | {
            "parent": None,
            "token_ids": list(token_ids),
            "mask": [is_trained] * len(token_ids),
            "advantages": None,
            "reference_logprobs": None,
            "loss_weights": None,
        }
    )
