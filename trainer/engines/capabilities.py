"""The capabilities of each engine for the three channels, and a check before a run starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.settings import OBJECTIVES, RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainingEngine:
    """The capabilities of one engine. The first entry of a tuple is the default, and the choice of `auto`."""

    name: str
    title: str
    objectives: Mapping[str, Mapping[str, Any]]
    """The engine's names of policy objectives, by our names. Channel 1 is always the engine's own code."""
    rollouts: tuple[str, ...]
    estimators: tuple[str, ...]
    """Supported forms of channel 2. All but `sampled` compare distributions."""
    wrappers: tuple[str, ...] = ("none", "taid", "entropy_opd")
    teachers: tuple[str, ...] = ("live",)
    outer: tuple[str, ...] = ("none",)

    @property
    def sees_logits(self) -> bool:
        """Return whether the loss sees the logits of both models. Otherwise a server scores the hinted context.

        Such a server has the current policy and scores at temperature 1. TAID's target then moves
        only with the step.
        """
        return "full" in self.estimators

    @property
    def is_sampled(self) -> bool:
        """Return whether channel 2 sees only the log-probabilities of sampled tokens."""
        return self.estimators == ("sampled",)


TRL = TrainingEngine(
    name="trl",
    title="TRL",
    objectives=OBJECTIVES,
    rollouts=("student", "generate"),
    estimators=("full", "topk", "teacher_topk", "sampled"),
    teachers=("ema", "base", "live"),
    outer=("none", "object_store", "torchft"),
)

VERL = TrainingEngine(
    name="verl",
    title="VeRL",
    objectives={
        "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
        "dapo": {"loss_agg_mode": "token-mean", "clip_ratio_high": 0.28},
        "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
        "gspo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "gspo"}},
        "cispo": {
            "loss_agg_mode": "token-mean",
            "policy_loss": {"loss_mode": "cispo"},
            "clip_ratio_low": 1.0,
            "clip_ratio_high": 4.0,
        },
        "sapo": {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": {"loss_mode": "sapo"}},
    },
    rollouts=("generate",),
    estimators=("teacher_topk",),
)

PRIME_RL = TrainingEngine(
    name="prime_rl",
    title="PRIME-RL",
    objectives={"grpo": {}},
    rollouts=("generate",),
    estimators=("sampled",),
    wrappers=("none",),
)

ENGINES: dict[str, TrainingEngine] = {
    "trl": TRL,
    "monarch": replace(TRL, name="monarch", title="Monarch", outer=("none",)),
    "verl": VERL,
    "prime_rl": PRIME_RL,
}
"""Engines by their name in settings and in `engines.<name>`."""


def check(settings: RunConfig) -> TrainingEngine:
    """Return the engine of these settings, if it supports all of them.

    Raises:
        TrainerConfigError: it doesn't. The message lists every problem and what to change.
    """
    engine = ENGINES[settings.engine]
    problems = [*_run_problems(engine, settings), *_channel_problems(engine, settings)]
    if problems:
        raise TrainerConfigError(
            f"{engine.title} cannot run these settings:\n  - " + "\n  - ".join(problems)
        )
    return engine


def _run_problems(engine: TrainingEngine, settings: RunConfig) -> Iterator[str]:
    objective = settings.shared.objective
    if objective is not None and objective not in engine.objectives:
        yield f"trl.objective={objective}: choose {', '.join(sorted(engine.objectives))}"
    if settings.rollouts not in engine.rollouts:
        yield (
            f"rollouts={settings.rollouts}: {engine.title} samples from the policy itself; set "
            f"rollouts={engine.rollouts[0]}"
        )
    if settings.outer not in engine.outer:
        yield f"outer={settings.outer}: the outer loop runs under TRL; set outer=none"


def _channel_problems(engine: TrainingEngine, settings: RunConfig) -> Iterator[str]:
    shared = settings.shared
    if shared.alpha_sdpo == 0:
        return
    why = "the teacher's scores come from an inference server as its top-k"
    if engine.is_sampled:
        why = "the loss sees the sampled tokens' log-probs, never logits"
    for name, known, reason in (
        ("sdpo_estimator", engine.estimators, why),
        ("sdpo_wrapper", engine.wrappers, f"it needs distributions, and {why}"),
        (
            "teacher",
            (*engine.teachers, "auto"),
            "the inference server that scores hinted contexts holds the current policy",
        ),
    ):
        if (value := getattr(shared, name)) not in known:
            yield f"trl.{name}={value}: {reason}; set trl.{name}={known[0]}"
    if engine.sees_logits:
        return
    if shared.sdpo_wrapper == "taid" and "taid" in engine.wrappers and shared.taid_alpha != 0:
        yield (
            f"trl.taid_alpha={shared.taid_alpha}: {engine.title} moves TAID's target by the step "
            "alone; set trl.taid_alpha=0"
        )
    if shared.temperature != 1.0:
        yield (
            f"trl.temperature={shared.temperature} with channel 2: the inference server scores at "
            "temperature 1; set trl.temperature=1.0"
        )
    is_sampled = engine.is_sampled or shared.sdpo_estimator == "sampled"
    if is_sampled and shared.jsd_beta != 1.0:
        yield (
            f"trl.jsd_beta={shared.jsd_beta}: from sampled tokens only KL(student || teacher) can "
            "be estimated; set trl.jsd_beta=1.0"
        )
    if is_sampled and shared.sdpo_token_clip is not None:
        yield "trl.sdpo_token_clip: there is no vocabulary entry to cap; take it out"
