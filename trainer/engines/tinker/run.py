"""`python -m trainer tinker`: a run whose weights and gradients are behind the Tinker API."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tinker
import torch
from transformers import get_scheduler

from trainer.data.budget import sides_of
from trainer.data.dataset import load_preference_data
from trainer.data.rewards import load_reward, parse_action
from trainer.data.sampler import PairSampler
from trainer.engines.handover import (
    check_startable,
    make_renderer,
    n_states_of_step,
    require_hints,
)
from trainer.engines.settings_file import read_settings
from trainer.engines.tinker.datums import (
    SIDES,
    SampledResponse,
    distillation_datums,
    distillation_loss,
    pair_datums,
    pair_loss,
    policy_datums,
    sampled_distillation_datums,
)
from trainer.engines.tinker.meter import bound_of_step, cost_usd, wait
from trainer.engines.tokenized_pairs import TokenizedPairs, fitting_rows, write_pairs
from trainer.errors import (
    AlignmentError,
    DatasetError,
    EnvironmentFailedError,
    TrainerConfigError,
    TrainingStoppedError,
)
from trainer.folders import sole_writer
from trainer.hints import hint_for_row
from trainer.losses.channels import DEFAULT_TOP_K
from trainer.outer.background import in_background
from trainer.settings import RunConfig, section_of

logger = logging.getLogger(__name__)

OPENING_S = 60.0
EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(kw_only=True)
class TinkerOptions:
    """The settings under `engines.tinker`. The key comes from `TINKER_API_KEY`."""

    base_url: str | None = None
    """A server with the protocol. By default, `TINKER_BASE_URL`, else Thinking Machines' own."""
    lora_rank: int = 32
    save_every: int = 0
    """Steps between saved states. With 0, only the end is saved."""
    usd_per_million: dict[str, float] = field(default_factory=dict)
    """The model's prices for a million tokens `sampled`, `prefilled`, and `trained`, from the
    service's price list. Not needed for your own server."""
    max_usd: float = 10.0
    """Ceiling in dollars. No step starts that could exceed it."""


def train_with_tinker(
    values: Mapping[str, Any], *, should_stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Train for `trl.max_steps` steps, and return the place of the weights and the number of requests.

    Raises:
        TrainerConfigError: Tinker doesn't support the settings.
        FolderInUseError: another run writes into the output folder.
        DatasetError: a channel has a weight, but the dataset has no data for it.
        EnvironmentFailedError: the service refused, or did not answer.
        TrainingStoppedError: the run was asked to stop, and its state is saved.
    """
    settings = read_settings(values, "tinker")
    check_startable(settings)
    options = section_of(TinkerOptions, settings.own, "engines.tinker.")
    n_steps, most = settings.shared.max_steps, cost_of_step(settings, options)
    with (
        sole_writer(Path(settings.output)),
        _translated(),
        _service(options, should_stop) as service,
    ):
        run = TinkerRun(settings, options, service, should_stop)
        for step in range(n_steps):
            spent = cost_usd(run.counts, options.usd_per_million)
            is_spent = spent + most > options.max_usd
            if should_stop() or is_spent:
                path = run.save(f"step-{step}")
                why = f", as ${spent:.2f} of max_usd={options.max_usd:g} are spent" * is_spent
                raise TrainingStoppedError(
                    f"stopped after {step} steps{why}; the state is at {path}"
                )
            run.step(step)
        return run.finish()


def cost_of_step(settings: RunConfig, options: TinkerOptions) -> float:
    """Return the most that one step can cost, in dollars, and log the most for the whole run.

    Raises:
        TrainerConfigError: the service's prices are missing, or not even one step fits.
    """
    prices = options.usd_per_million
    kinds = {"sampled", "prefilled", "trained"}
    if set(prices) - kinds or (options.base_url is None and set(prices) != kinds):
        raise TrainerConfigError(
            "engines.tinker.usd_per_million must give the prices sampled, prefilled, and trained, as on the service's price list. For your own server, set base_url"
        )
    most = cost_usd(bound_of_step(settings.shared), prices)
    if most > options.max_usd:
        raise TrainerConfigError(
            f"one step may cost ${most:.2f}, more than engines.tinker.max_usd={options.max_usd:g}"
        )
    if prices:
        logger.warning(
            "%d steps cost at most $%.2f; no step starts above max_usd=%g",
            settings.shared.max_steps, most * settings.shared.max_steps, options.max_usd,
        )  # fmt: skip
    return most


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except tinker.TinkerError as error:
        raise EnvironmentFailedError(f"Tinker: {error}") from error


@contextmanager
def _service(options: TinkerOptions, should_stop: Callable[[], bool]) -> Iterator[Any]:
    if address := options.base_url:
        # The client itself would try for five minutes and say nothing.
        try:
            httpx.get(f"{address}/api/v1/healthz", timeout=30)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise EnvironmentFailedError(
                f"Tinker: no server answers at {address}: {error}"
            ) from error
    # It opens a session, for which it would try for five minutes as well.
    opening = in_background(lambda: tinker.ServiceClient(base_url=options.base_url))
    service, status = wait(opening, should_stop, patience_s=OPENING_S), "errored"
    try:
        yield service
        status = "success"
    finally:
        # Older clients have no `close`, and open servers no such request: the session then lapses.
        with suppress(AttributeError, tinker.NotFoundError):
            service.close(status).result()


class TinkerRun:
    """The run, which samples, scores, and trains one step at a time."""

    def __init__(
        self,
        settings: RunConfig,
        options: TinkerOptions,
        service: Any,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Render the dataset, and have the server make a LoRA of the base model.

        Raises:
            DatasetError: a channel has a weight, but the dataset has no data for it.
        """
        self.settings, self.options, self.shared = settings, options, settings.shared
        self.folder = Path(settings.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.counts: Counter[str] = Counter()
        data = load_preference_data(settings.dataset, revision=settings.revision)
        self.renderer = make_renderer(settings)
        self.states: list[Any] = fitting_rows(data.prompts, self.renderer)
        if not self.states:
            raise DatasetError(f"{settings.dataset} has no `prompts` to roll out from")
        require_hints(settings, sum(hint_for_row(row) is not None for row in self.states))
        self.reward = load_reward(settings.reward)
        self.pairs: TokenizedPairs | None = None
        if self.shared.beta_replay > 0:
            path = self.folder / "pairs.parquet"
            write_pairs(path, data.pairs, self.renderer)
            self.pairs = TokenizedPairs(path)
        self._order = PairSampler(
            len(self.states), batch_size=n_states_of_step(self.shared), seed=self.shared.seed
        )
        self._rates = learning_rates(settings)
        self._should_stop = should_stop
        self.training = self._done(
            in_background(
                lambda: service.create_lora_training_client(
                    base_model=str(settings.model), rank=options.lora_rank, seed=self.shared.seed
                )
            )
        )
        self._sampler = self._reference_sampler = self._published()
        self._reference: dict[int, tuple[float, float]] = {}
        self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")

    def step(self, step: int) -> dict[str, float]:
        """Make one optimizer step of all three channels, and return and write its metrics."""
        shared = self.shared
        if step > 0:
            self._sampler = self._published()
        rollouts, metrics = self.rollouts(step)
        futures = self.backward(rollouts, step)
        if futures:
            rate = self._rates[step]
            adam = tinker.AdamParams(
                learning_rate=rate,
                beta2=0.999,
                eps=1e-8,
                weight_decay=shared.weight_decay,
                grad_clip_norm=shared.max_grad_norm,
            )
            # Submitted before the gradients are waited for: the server goes on without a pause.
            futures_of_step = {**futures, "optimizer": self.training.optim_step(adam)}
            for name, future in futures_of_step.items():
                answer = self._done(future)
                if name != "optimizer":
                    metrics |= _metrics_of(name, answer)
            metrics["train/learning_rate"] = rate
        else:
            self.counts["steps_without_gradient"] += 1
        self._metrics.write(json.dumps({"step": step + 1, **metrics}) + "\n")
        self._metrics.flush()
        if self.options.save_every and (step + 1) % self.options.save_every == 0:
            self.save(f"step-{step + 1}")
        return metrics

    def backward(self, rollouts: Sequence[SampledResponse], step: int) -> dict[str, Any]:
        """Let the server accumulate the gradients of each channel with data."""
        shared, futures = self.shared, {}
        policy = policy_datums(
            rollouts,
            objective=shared.objective or "grpo",
            weight=shared.policy_weight,
            max_completion_length=shared.max_completion_length,
        )
        if policy:
            self._count_trained(policy)
            futures["policy"] = self.training.forward_backward(policy, "importance_sampling")
        is_hinted = any(rollout.teacher_logps_RK is not None for rollout in rollouts)
        if is_hinted and shared.sdpo_estimator == "sampled":
            datums = sampled_distillation_datums(rollouts, weight=shared.alpha_sdpo)
            self._count_trained(datums)
            futures["sdpo"] = self.training.forward_backward(datums, "importance_sampling")
        elif is_hinted:
            progress = step / max(shared.max_steps - 1, 1)
            options = shared.sdpo
            if options.wrapper == "taid":
                start, end = shared.taid_t_start, shared.taid_t_end
                options = options.at(start + (end - start) * progress)
            datums = distillation_datums(rollouts)
            self._count_trained(datums, n_passes=2)
            futures["sdpo"] = self.training.forward_backward_custom(
                datums,
                distillation_loss(rollouts, options, weight=shared.alpha_sdpo),
            )
        if self.pairs is not None:
            sampler = self.pairs.sampler(batch_size=shared.pairs_per_step, seed=shared.seed)
            drawn = sampler.step(step)
            rows = [self.pairs.rows[i] for i in drawn]
            reference = self._reference_of(drawn) if shared.preference.needs_reference else None
            datums = pair_datums(rows)
            self._count_trained(datums, n_passes=2)
            futures["replay"] = self.training.forward_backward_custom(
                datums,
                pair_loss(rows, reference, shared.preference, weight=shared.beta_replay),
            )
        return futures

    def _count_trained(self, datums: Sequence[Any], *, n_passes: int = 1) -> None:
        self.counts["trained_tokens"] += n_passes * sum(d.model_input.length for d in datums)

    def rollouts(self, step: int) -> tuple[list[SampledResponse], dict[str, float]]:
        """Sample groups at the step's states, with advantages and hinted scores.

        Raises:
            AlignmentError: the server returned a different number of log-probs than of tokens.
        """
        shared = self.shared
        states = [self.states[i] for i in self._order.step(step)]
        prompts = [
            self.renderer.prompt_ids(row["prompt"], row.get("tools"), sides=sides_of(row))
            for row in states
        ]
        self.counts["prefilled_tokens"] += sum(map(len, prompts))
        sampled = [
            self._sampler.sample(
                prompt=tinker.ModelInput.from_ints(prompt),
                num_samples=shared.num_generations,
                sampling_params=tinker.SamplingParams(
                    max_tokens=shared.max_completion_length,
                    temperature=shared.temperature,
                    seed=shared.seed + step * len(states) + k,
                    stop=[int(self.renderer.tokenizer.eos_token_id)],
                ),
            )
            for k, prompt in enumerate(prompts)
        ]
        found: list[SampledResponse] = []
        rewards: list[float] = []
        scored: list[tuple[SampledResponse, int, Any]] = []
        for row, prompt, future in zip(states, prompts, sampled, strict=True):
            group: list[SampledResponse] = []
            own: list[float] = []
            for sequence in self._done(future).sequences:
                ids = [int(i) for i in sequence.tokens]
                self.counts["sampled_tokens"] += len(ids)
                if not ids:
                    self.counts["empty_rollouts"] += 1
                    continue
                logprobs = [float(value) for value in sequence.logprobs or []]
                if len(logprobs) != len(ids):
                    raise AlignmentError(f"{len(logprobs)} log-probs for {len(ids)} sampled tokens")
                group.append(
                    SampledResponse(prompt_ids=prompt, response_ids=ids, logprobs=logprobs)
                )
                text = self.renderer.tokenizer.decode(ids, skip_special_tokens=True)
                own.append(float(self.reward(parse_action(text), row)))
            for rollout, advantage in zip(group, self._advantages(own), strict=True):
                rollout.advantage = advantage
            hint = hint_for_row(row) if shared.alpha_sdpo > 0 else None
            if hint is not None:
                hinted = self.renderer.prompt_ids(
                    row["prompt"], row.get("tools"), hint=hint.text, sides=sides_of(row)
                )
                scored += [(r, len(hinted), self._score(hinted, r.response_ids)) for r in group]
            found += group
            rewards += own
        for rollout, n_hinted, future in scored:
            self._keep_scores(rollout, n_hinted, self._done(future))
        self.counts["rollouts"] += len(found)
        self.counts["hinted_rollouts"] += len(scored)
        return found, {
            "reward/mean": sum(rewards) / max(len(rewards), 1),
            "rollouts/count": float(len(found)),
            "rollouts/hinted": float(len(scored)),
        }

    def _advantages(self, rewards: list[float]) -> list[float]:
        """Return reward minus the group's mean, over its standard deviation but for `dr_grpo`."""
        if len(rewards) < 2:
            return [0.0] * len(rewards)
        values = torch.tensor(rewards, dtype=torch.float64)
        centred = values - values.mean()
        if self.shared.objective != "dr_grpo":
            centred = centred / (values.std() + EPSILON)
        return centred.tolist()

    # -- channel 2 -------------------------------------------------------------------------------

    def _score(self, prompt_ids: list[int], response_ids: list[int]) -> Any:
        """Ask the policy of this step about a response behind another prompt: one prefill."""
        ids = [*prompt_ids, *response_ids]
        self.counts["prefilled_tokens"] += len(ids)
        prompt = tinker.ModelInput.from_ints(ids)
        if self.shared.sdpo_estimator == "sampled":
            return self._sampler.compute_logprobs(prompt)
        return self._sampler.sample(
            prompt=prompt,
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=self.shared.sdpo_top_k or DEFAULT_TOP_K,
        )

    def _keep_scores(self, rollout: SampledResponse, n_hinted: int, answer: Any) -> None:
        n_response = len(rollout.response_ids)
        is_sampled = self.shared.sdpo_estimator == "sampled"
        if is_sampled:
            rows = _of_response(answer, n_hinted + n_response, n_response)
            ids = [[i] for i in rollout.response_ids]
            logps = [[value] for value in rows]
        else:
            found = answer.topk_prompt_logprobs or []
            rows = _of_response(found, n_hinted + n_response, n_response)
            width = min((len(row) for row in rows if row), default=0)
            ids = [[i for i, _ in row[:width]] for row in rows if row]
            logps = [[value for _, value in row[:width]] for row in rows if row]
        if len(ids) != n_response:
            raise AlignmentError(f"{n_response - len(ids)} of {n_response} tokens have no top-k")
        rollout.teacher_ids_RK = torch.tensor(ids)
        rollout.teacher_logps_RK = torch.tensor(logps)

    # -- channel 3 -------------------------------------------------------------------------------

    def _reference_of(self, drawn: Sequence[int]) -> list[tuple[float, float]]:
        """Score each pair once, with the policy that the run began with, when it is first drawn."""
        assert self.pairs is not None
        new = [i for i in drawn if i not in self._reference]
        asked = []
        for i in new:
            for side in SIDES:
                ids = [*self.pairs.rows[i]["prompt_ids"], *self.pairs.rows[i][side]]
                self.counts["prefilled_tokens"] += len(ids)
                prompt = tinker.ModelInput.from_ints(ids)
                asked.append((i, side, self._reference_sampler.compute_logprobs(prompt)))
        sums: dict[tuple[int, str], float] = {}
        for i, side, future in asked:
            row = self.pairs.rows[i]
            n_response = len(row[side])
            logps = _of_response(
                self._done(future), len(row["prompt_ids"]) + n_response, n_response
            )
            sums[i, side] = sum(logps)
        self._reference |= {i: (sums[i, SIDES[0]], sums[i, SIDES[1]]) for i in new}
        return [self._reference[i] for i in drawn]

    # -- weights ---------------------------------------------------------------------------------

    def _published(self) -> Any:
        return self._done(in_background(self.training.save_weights_and_get_sampling_client))

    def _done(self, future: Any) -> Any:
        """Return what a future of the client comes to; its calls that block have none of theirs."""
        answer = wait(future, self._should_stop)
        return wait(answer, self._should_stop) if hasattr(answer, "result") else answer

    def save(self, name: str) -> str:
        """Save weights and optimizer, and return the server's path."""
        return str(self._done(self.training.save_state(name)).path)

    def finish(self) -> dict[str, Any]:
        """Save the state and the weights for sampling, and return the report."""
        self._metrics.close()
        if self.shared.alpha_sdpo > 0 and self.counts["hinted_rollouts"] == 0:
            logger.warning("channel sdpo did nothing: no state that was drawn has a hint")
        return {
            "state": self.save("final"),
            "sampler": str(self._done(self.training.save_weights_for_sampler("final")).path),
            "cost_usd": cost_usd(self.counts, self.options.usd_per_million),
            "metrics": str(self.folder / "metrics.jsonl"),
            "steps": self.shared.max_steps,
            "pairs": len(self.pairs or ()),
            **self.counts,
        }


def _metrics_of(channel: str, answer: Any) -> dict[str, float]:
    """Read a channel's loss and what its own loss function says; SkyRL names no sum of losses."""
    metrics = {k: float(v) for k, v in (answer.metrics or {}).items()}
    named = {k: v for k, v in metrics.items() if k.startswith(f"{channel}/")}
    if "loss:sum" in metrics:
        return named | {f"{channel}/loss": metrics["loss:sum"]}
    terms = [sum(out["elementwise_loss"].data) for out in answer.loss_fn_outputs]
    # Of a custom loss the server knows only its linear part.
    return named or {f"{channel}/loss": float(sum(terms))}


def _of_response(scores: Sequence[Any], n_tokens: int, n_response: int) -> list[Any]:
    """Take a response's scores out of those of a whole prompt, whose first token has none.

    SkyRL's JAX backend leaves that first entry out, so it is counted from the end.

    Raises:
        AlignmentError: the server scored another number of tokens than the prompt has.
    """
    found = list(scores)[-n_response:]
    if len(scores) not in (n_tokens, n_tokens - 1) or None in found:
        raise AlignmentError(
            f"the server scored {len(scores)} of a prompt's {n_tokens} tokens: for channel 2, and "
            "for a reference in channel 3, it must offer prompt log-probs, and their top-k for "
            "sdpo_estimator=teacher_topk"
        )
    return found


def learning_rates(settings: RunConfig) -> list[float]:
    """Return the learning rate of every step, by the schedule of the settings.

    Raises:
        TrainerConfigError: the schedule is unknown.
    """
    shared = settings.shared
    warmup = shared.warmup_steps
    n_warmup = int(warmup * shared.max_steps) if warmup < 1 else int(warmup)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=shared.learning_rate)
    try:
        schedule = get_scheduler(
            shared.lr_scheduler_type,
            optimizer,
            num_warmup_steps=n_warmup,
            num_training_steps=shared.max_steps,
        )
    except ValueError as error:
        raise TrainerConfigError(f"trl.lr_scheduler_type: {error}") from error
    rates = []
    for _ in range(shared.max_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates
