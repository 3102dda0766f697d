"""The actors: trainer, generator, rewarder, and the store through which replicas exchange weights.

Each actor runs code that also works without Monarch: the TRL run, the model's own `generate`, the
reward of the settings, and the object store of the outer loop. Messages contain plain data.
Generators read the policy's weights from the trainer's memory.
"""

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer, RDMATcpFallbackWarning
from transformers import GenerationConfig

from trainer.data.dataset import load_preference_data
from trainer.data.rewards import as_trl_reward, load_reward
from trainer.engines.settings_file import read_settings
from trainer.errors import TrainerConfigError, TrainerError
from trainer.model.loading import load_model, load_tokenizer
from trainer.model.scoring import chunked_response_logps
from trainer.outer.environment import ReplicaPlace
from trainer.outer.object_store import MemoryStore, ObjectStore
from trainer.outer.parameters import ParameterVector

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended: with a report, or with a user's error that no restart can fix."""

    report: dict[str, Any] | None = None
    error: TrainerError | None = None


class TrainerActor(Actor):
    """One rank of a replica, which runs the normal TRL run with remote helpers."""

    def __init__(
        self,
        values: dict[str, Any],
        place: ReplicaPlace,
        store: Any,
        generators: Any,
        rewarders: Any,
    ) -> None:
        """Keep the settings and the meshes of the helpers; `None`: the run's own."""
        self.values, self.place = values, place
        self.store, self.generators, self.rewarders = store, generators, rewarders

    @endpoint
    def train(self, resume_from: str | None) -> RankOutcome:
        """Run to the end. A wrong setting or dataset is an outcome, and any other error raises."""
        try:
            return RankOutcome(report=self._run(resume_from))
        except TrainerError as error:
            return RankOutcome(error=error)

    def _run(self, resume_from: str | None) -> dict[str, Any]:
        # TRL takes seconds to load, and the controller and the other actors do without.
        from trainer.trl.run import RunParts, run  # noqa: PLC0415

        if self.values.get("model") is None:
            torch.set_num_threads(1)  # the products of a tiny model only lose by sharing
        config = read_settings(self.values | {"resume_from": resume_from})
        rollout = None if self.generators is None else RemoteGeneration(self.generators)
        reward = None if self.rewarders is None else remote_reward(self.rewarders)
        store = None if self.store is None else RemoteStore(self.store)
        parts = RunParts(place=self.place, store=store, reward=reward, rollout=rollout)
        return run(config, parts=parts)


class GeneratorActor(Actor):
    """The sampler of completions. It reads the policy's weights when its own are older."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Load the same model as the trainer does."""
        config = read_settings(values)
        if config.model is None:
            torch.set_num_threads(1)
        data = load_preference_data(config.dataset, revision=config.revision)
        seed = int(config.trl.get("seed", 42))
        self.tokenizer = load_tokenizer(config, data)
        self.model = load_model(config, self.tokenizer, seed=seed)
        self.model.eval()
        self.weights = ParameterVector(self.model)
        self.version: int | None = None

    @endpoint
    async def generate(
        self,
        version: int,
        weights: RDMABuffer,
        signature: str,
        prompt_ids: list[list[int]],
        sampling: dict[str, Any],
        seed: int,
    ) -> list[tuple[list[int], list[float]]]:
        """Sample a completion of each prompt from the given version, with log-probs of its tokens.

        Raises:
            TrainerConfigError: the trainer has other parameters than this model.
        """
        if version != self.version:
            if signature != self.weights.signature:
                raise TrainerConfigError("generator and trainer have different parameters")
            flat = torch.empty(self.weights.n)
            await weights.read_into(flat.view(torch.uint8))
            self.weights.write(flat.numpy())
            self.version = version
        return self._sample(prompt_ids, sampling, seed)

    @torch.no_grad()
    def _sample(
        self, prompt_ids: list[list[int]], sampling: dict[str, Any], seed: int
    ) -> list[tuple[list[int], list[float]]]:
        batch = self.tokenizer.pad({"input_ids": prompt_ids}, padding_side="left")
        ids_BP = torch.tensor(batch["input_ids"])
        torch.manual_seed(seed)
        ids_BT = self.model.generate(
            input_ids=ids_BP,
            attention_mask=torch.tensor(batch["attention_mask"]),
            generation_config=GenerationConfig(**sampling),
        )
        completions = [
            _until_end(row, sampling["eos_token_id"])
            for row in ids_BT[:, ids_BP.size(1) :].tolist()
        ]
        sampled = []
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            ids = torch.tensor([prompt + completion])
            mask = torch.tensor([[0] * len(prompt) + [1] * len(completion)])
            logps = chunked_response_logps(
                self.model, ids, None, mask, temperature=sampling["temperature"]
            )
            sampled.append((completion, logps.tolist()))
        return sampled


def _until_end(ids: list[int], end: int | list[int]) -> list[int]:
    """Return the tokens up to and including the first that ends a turn."""
    ends = {end} if isinstance(end, int) else set(end)
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


class RemoteGeneration:
    """TRL's `rollout_func` over a mesh of generators, with exact importance ratios.

    The policy's parameters are in one buffer of the trainer, which generators read. A version is
    the optimizer step that made it. Samples depend only on the seed and the step, so a resumed run
    samples the same.
    """

    def __init__(self, generators: Any) -> None:
        """Keep the mesh; the buffer is made with the first batch, when the model is known."""
        self.generators = generators
        self._view: ParameterVector | None = None
        self._flat: torch.Tensor | None = None
        self._handle: RDMABuffer | None = None
        self._version: int | None = None
        self._n_calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample: prompts and completions as ids, with the log-probs of the completions."""
        version = trainer.state.global_step
        self._publish(trainer, version)
        assert self._view is not None
        prompt_ids = [
            trainer.processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
            for prompt in prompts
        ]
        sampled = self._ask(
            prompt_ids,
            version=version,
            sampling=trainer.generation_config.to_dict(),
            seed=_seed_of(
                trainer.args.seed, version, self._n_calls, trainer.accelerator.process_index
            ),
        )
        self._n_calls += 1
        for row, (_, logps) in zip(trainer.rollout_rows, sampled, strict=True):
            row["old_logps"] = logps
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [ids for ids, _ in sampled],
            "logprobs": [logps for _, logps in sampled],
        }

    def _publish(self, trainer: Any, version: int) -> None:
        """Copy the policy into the buffer once per version.

        Raises:
            TrainerConfigError: the parameters are sharded.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise TrainerConfigError(
                "generators read whole parameters from each rank: set engines.monarch.generators=0 "
                "under FSDP and DeepSpeed"
            )
        if self._view is None:
            self._view = ParameterVector(trainer.accelerator.unwrap_model(trainer.model))
            self._flat = torch.empty(self._view.n)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RDMATcpFallbackWarning)
                self._handle = RDMABuffer(self._flat.view(torch.uint8))
        if version != self._version:
            assert self._flat is not None
            self._flat.copy_(torch.from_numpy(self._view.read()))
            self._version, self._n_calls = version, 0

    def _ask(
        self, prompt_ids: list[list[int]], *, version: int, sampling: dict[str, Any], seed: int
    ) -> list[tuple[list[int], list[float]]]:
        """Return every generator with its share of the prompts, all at once."""
        assert self._view is not None
        n = len(self.generators)
        size = -(-len(prompt_ids) // n)
        futures = [
            self.generators.slice(procs=k).generate.call_one(
                version,
                self._handle,
                self._view.signature,
                prompt_ids[k * size : (k + 1) * size],
                sampling,
                seed + k,
            )
            for k in range(n)
            if prompt_ids[k * size : (k + 1) * size]
        ]
        return [pair for future in futures for pair in future.get()]


def _seed_of(*parts: int) -> int:
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part) % (1 << 62)
    return seed


class RewarderActor(Actor):
    """The scorer of completions, with the reward of the settings."""

    def __init__(self, reward: str) -> None:
        """Load it once."""
        self.reward = as_trl_reward(load_reward(reward))

    @endpoint
    def score(self, completions: list[Any], columns: dict[str, list[Any]]) -> list[float]:
        """Return one reward for each completion."""
        return self.reward(completions, **columns)


def remote_reward(rewarders: Any) -> Any:
    """Make a reward in TRL's convention that a mesh of rewarders computes. Each batch asks one of them."""

    @functools.wraps(as_trl_reward(lambda _message, _row: 0.0))
    def reward(completions: list[Any], **columns: Any) -> list[float]:
        rows = {
            name: column
            for name, column in columns.items()
            if isinstance(column, list) and len(column) == len(completions)
        }
        return rewarders.score.choose(completions, rows).get()

    return reward


class StoreActor(Actor):
    """The object store of the outer loop, in the memory of one process of the mesh."""

    def __init__(self) -> None:
        """Start empty."""
        self.objects = MemoryStore()

    @endpoint
    def call(self, verb: str, *arguments: Any) -> Any:
        """Call one method of the store."""
        return getattr(self.objects, verb)(*arguments)


class RemoteStore(ObjectStore):
    """An `ObjectStore` whose objects are in a `StoreActor`."""

    def __init__(self, mesh: Any) -> None:
        """Keep the mesh of the one actor."""
        self._mesh = mesh

    def _asked(self, verb: str, key: str, request: Callable[[], Any]) -> Any:  # noqa: ARG002
        # An actor that has died holds nothing any more: there is no use in trying again.
        return request()

    def _put(self, key: str, data: bytes) -> None:
        self._call("put", key, bytes(data))

    def _create(self, key: str, data: bytes) -> bool:
        return self._call("put_if_absent", key, bytes(data))

    def _get(self, key: str) -> bytes | None:
        return self._call("get", key)

    def _keys(self, prefix: str) -> list[str]:
        return self._call("keys", prefix)

    def _delete(self, keys: list[str]) -> None:
        self._call("delete", keys)

    def _call(self, verb: str, *arguments: Any) -> Any:
        return self._mesh.call.call_one(verb, *arguments).get()
