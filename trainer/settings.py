"""One settings file for every engine: what it says, and which of it an engine understands.

The file is that of `python -m trainer`. Its `trl` section holds the three channels and the usual
numbers of a run: `SharedSettings`, from which `ComposerConfig` (TRL) and `PluginOptions` (VeRL) are
derived. What only one engine knows goes to `engines.<name>` and is left alone by the others.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from trainer.data.evaluation import EvaluationOptions
from trainer.data.preflight import PreflightOptions
from trainer.errors import TrainerConfigError
from trainer.losses.channels import ReplayOptions, SDPOOptions

__all__ = [
    "ENGINE_NAMES",
    "RunConfig",
    "SharedSettings",
    "TeacherOptions",
    "TinyOptions",
    "overlaid",
    "section_of",
    "typed",
    "without_engines",
]

logger = logging.getLogger(__name__)

Section = TypeVar("Section")

HOSTS_OF_TRL = frozenset({"trl", "monarch"})
"""Engines that run TRL itself, and so know every field of the `trl` section."""

ENGINE_NAMES = ("trl", "monarch", "verl", "prime_rl", "tinker")
"""What may stand under `engines`."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "sft": {},
}
"""Policy objectives by our names, in TRL's words. `sft` is no policy gradient and reads no rollouts:
cross-entropy per token of the actions that `sft_on` names."""

MAX_EPOCHS = 10
"""How often a small dataset is shown, where steps follow from `pair_visits`."""

NOT_IN_FILE = {"is_in_file": False}
"""Metadata of a field that is no entry of a settings file."""


@dataclass(kw_only=True)
class SharedSettings:
    """The three channels and the numbers of a run, by the names of the `trl` section."""

    objective: str | None = None
    """Policy objective: grpo, bnpo, dr_grpo, dapo, gspo, cispo, sapo, luspo or vespo, or `sft`,
    cross-entropy on recorded actions; none: the engine's own."""
    sft_on: str = "chosen"
    """Actions that `objective: sft` learns from: `chosen`, those of the pairs; `consensus`, the same
    and those of the positives, of which the preference loss charges nothing; or `recorded`, what the
    agent did at the states of both."""
    alpha_sdpo: float = 0.0
    """Weight of hint-conditioned self-distillation; 0: off."""
    beta_replay: float = 0.0
    """Weight of channel 3; 0: off."""
    replay: str = "pairs"
    """What channel 3 learns from: `pairs`, by a preference loss; or `distill`, what the frozen `teachers`
    of the run find likely at each token of the rollouts, by the divergence of channel 2 (`jsd_beta`)."""
    policy_weight: float = 1.0
    """Weight of the policy objective in the sum."""
    jsd_beta: float = 0.5
    """0 is KL(teacher || student), 1 is KL(student || teacher)."""
    sdpo_wrapper: str = "none"
    """What stands in for the plain divergence: none, taid or entropy_opd."""
    sdpo_estimator: str = "full"
    """Form of the divergence: full, topk, teacher_topk or sampled."""
    sdpo_top_k: int | None = None
    """Support of the divergence."""
    sdpo_token_clip: float | None = None
    """Cap on each vocabulary entry of the divergence."""
    entropy_opd_h_max: float | None = None
    """Entropy (nats) at which the gate is fully open; none: log V."""
    taid_t_start: float = 0.4
    """First weight of the teacher in TAID's target."""
    taid_t_end: float = 1.0
    """Last weight of the teacher in TAID's target."""
    taid_alpha: float = 5e-4
    """Adaptive step of TAID."""
    teacher: str = "auto"
    """Whom channel 2 follows: who sees the hint (ema, base, live, or auto: base under PEFT, else ema),
    or `recorded`: the dataset's teachers, by the token probabilities of their answers."""
    teacher_ema_rate: float = 0.05
    """Share of the student in the teacher after each step."""
    dpo_variant: str = "simpo"
    """Preference loss: dpo, dpo_norm or simpo."""
    dpo_beta: float = 0.1
    """Scale of dpo and dpo_norm."""
    simpo_beta: float = 2.0
    """Scale of SimPO."""
    simpo_gamma: float = 1.0
    """Target margin of SimPO."""
    rpo_alpha: float = 0.0
    """Weight of the chosen side's own log-likelihood per token, added to any preference loss, so
    that the difference is not bought by making both sides unlikely."""
    group_pairs_by: str = "session"
    """Which pairs are drawn together: those of a `session`, which share their prompts' tokens; or those
    of the same two `actions`, of which one state prefers the one and another state the other, so that a
    step learns from the prompts and not from what the actions look like (all others by session)."""
    pairs_per_step: int = 4
    """Pairs of one optimizer step, over all processes."""
    head: str = "auto"
    """LM head of channels 1 and 2: fused, reference, or auto (fused where it is exact)."""
    pair_forward: str = "auto"
    """Pairs as a prefix tree (packed), one by one (padded), or auto."""
    max_packed_tokens: int = 32768
    """Packed tokens of one pass; more pairs take more passes."""
    share_prefixes: bool = True
    """Whether completions, hinted contexts and packed pairs share the tokens of a trace."""
    reuse_prefix: bool = True
    """Whether a live teacher goes on from the student's key-value cache."""
    max_prompt_tokens: int = 1024
    """Budget of a rendered prompt."""
    prompt_window: str = "decision"
    """What a prompt beyond the budget keeps: `decision`, the system message, the last request and
    what the sides name, with the newest steps; or `tail`, its last tokens alone."""
    max_response_tokens: int = 256
    """Longest response of a pair."""
    render_tools: bool = True
    """Whether the tools' schemas are put into prompts."""
    max_steps: int = -1
    pair_visits: int = 0
    """Where `max_steps` is not set: how often pairs are shown in all, from which the steps follow.
    A small dataset is shown ten times at most, a large one at least once. 0: the engine's epochs."""
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0.0
    """Below one: a share of `max_steps`."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_generations: int = 2
    """Rollouts of a group, over which rewards become advantages."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 512
    temperature: float = 1.0
    """Of sampling, and of the logits in all log-probabilities of channels 1 and 2."""
    activation_checkpointing: bool | None = None
    """Whether activations are computed again in the backward pass; none: as the engine does."""
    seed: int = 42

    @property
    def is_sft(self) -> bool:
        """Return whether the policy objective is cross-entropy on recorded actions, and has a weight."""
        return self.objective == "sft" and self.policy_weight > 0

    @property
    def is_distill(self) -> bool:
        """Return whether channel 3 has a weight and follows frozen teachers."""
        return self.beta_replay > 0 and self.replay == "distill"

    @property
    def has_preference(self) -> bool:
        """Return whether channel 3 has a weight and is the preference loss."""
        return self.beta_replay > 0 and self.replay == "pairs"

    @property
    def has_policy(self) -> bool:
        """Return whether channel 1 has a weight and is a policy objective."""
        return self.policy_weight > 0 and not self.is_sft

    @property
    def needs_rollouts(self) -> bool:
        """Return whether a channel with a weight reads rollouts; pairs alone need none."""
        return self.alpha_sdpo > 0 or self.has_policy or self.is_distill

    def steps_for(self, n_pairs: int) -> int:
        """Return the optimizer steps of a run on so many pairs."""
        if self.max_steps > 0 or self.pair_visits == 0 or n_pairs == 0:
            return self.max_steps
        n_shown = min(max(self.pair_visits, n_pairs), MAX_EPOCHS * n_pairs)
        return -(-n_shown // self.pairs_per_step)

    @property
    def sdpo(self) -> SDPOOptions:
        """Return the options of channel 2 for the loss functions.

        Raises:
            TrainerConfigError: a value is out of range.
        """
        return SDPOOptions(
            jsd_beta=self.jsd_beta,
            temperature=self.temperature,
            wrapper=self.sdpo_wrapper,  # type: ignore[bad-argument-type]
            taid_t=self.taid_t_start if self.sdpo_wrapper == "taid" else None,
            entropy_opd_h_max=self.entropy_opd_h_max,
            estimator=self.sdpo_estimator,  # type: ignore[bad-argument-type]
            top_k=self.sdpo_top_k,
            token_clip=self.sdpo_token_clip,
        )

    @property
    def preference(self) -> ReplayOptions:
        """Return the options of channel 3's preference loss for the loss functions.

        Raises:
            TrainerConfigError: the variant is unknown.
        """
        return ReplayOptions(
            variant=self.dpo_variant,  # type: ignore[bad-argument-type]
            dpo_beta=self.dpo_beta,
            simpo_beta=self.simpo_beta,
            simpo_gamma=self.simpo_gamma,
            rpo_alpha=self.rpo_alpha,
        )

    @property
    def is_fused(self) -> bool:
        """Return whether the head of channels 1 and 2 is fused: wherever that is exact."""
        return self.head != "reference" and self.sdpo.is_plain

    def _check_sft(self) -> None:
        if self.sft_on != "chosen" and not self.is_sft:
            raise TrainerConfigError(f"sft_on={self.sft_on!r} needs objective=sft")
        if self.sft_on == "recorded" and self.beta_replay > 0:
            raise TrainerConfigError(
                "sft_on='recorded' needs beta_replay=0: it imitates the actions that the preference "
                "loss makes unlikely"
            )

    def check(self) -> None:
        """Refuse values out of range, and a run in which no channel has a weight.

        Raises:
            TrainerConfigError: the message names the field.
        """
        choices = {
            "teacher": ("auto", "ema", "base", "live", "recorded"),
            "head": ("auto", "fused", "reference"),
            "pair_forward": ("auto", "packed", "padded"),
            "prompt_window": ("decision", "tail"),
            "group_pairs_by": ("session", "actions"),
            "sft_on": ("chosen", "consensus", "recorded"),
            "replay": ("pairs", "distill"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise TrainerConfigError(f"{name}={getattr(self, name)!r} is not {_any_of(known)}")
        if self.teacher == "recorded" and self.sdpo_estimator not in ("full", "teacher_topk"):
            raise TrainerConfigError(
                f"sdpo_estimator={self.sdpo_estimator!r}: a recorded teacher has only its own top-k; remove this setting"
            )
        if not 0.0 < self.teacher_ema_rate <= 1.0:
            raise TrainerConfigError(f"teacher_ema_rate={self.teacher_ema_rate} is not in (0, 1]")
        for name in ("alpha_sdpo", "beta_replay", "policy_weight"):
            if getattr(self, name) < 0:
                raise TrainerConfigError(f"{name}={getattr(self, name)} is negative")
        if self.policy_weight == self.alpha_sdpo == self.beta_replay == 0:
            raise TrainerConfigError(
                "all three channels are off: raise policy_weight, alpha_sdpo or beta_replay"
            )
        self._check_sft()
        if self.pairs_per_step < 1:
            raise TrainerConfigError(f"pairs_per_step={self.pairs_per_step} must be at least 1")
        if self.head == "fused" and not self.sdpo.is_plain:
            raise TrainerConfigError(
                "head='fused' computes the plain divergence over the full vocabulary: for TAID, "
                "the entropy gate, top-k, sampled tokens or a clip use head='reference'"
            )
        if self.is_distill:
            self._check_distill()
        _ = self.sdpo, self.preference  # each checks its own values

    def _check_distill(self) -> None:
        if self.sdpo_wrapper == "taid":
            raise TrainerConfigError(
                "sdpo_wrapper=taid with replay=distill: TAID's target is channel 2's; choose none or "
                "entropy_opd"
            )
        if self.sdpo_estimator != "full" or self.sdpo_top_k is not None:
            raise TrainerConfigError(
                "sdpo_estimator and sdpo_top_k with replay=distill: this compares all tokens that trainee and teacher share; remove both settings"
            )


def _any_of(names: tuple[str, ...]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1]))


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """The model that is built when none is named."""

    vocab_size: int = 1024
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 4
    is_mimetic: bool = False
    """Whether attention starts out handing on what it looks at, which speeds learning to read."""
    pretraining_steps: int = 0
    """Steps that teach it what actions look like, both sides of the pairs alike, before the run."""


@dataclass(frozen=True, kw_only=True)
class PeftOptions:
    """LoRA: small matrices beside frozen ones."""

    rank: int = 16
    alpha: int = 32
    """The adapter counts alpha / rank times."""
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    """Names of the adapted modules, or `all-linear`, or `attention`: those of attention layers."""
    layers: str | None = None
    """First and last adapted layer, as `12-29`, or how many of the last, as `last 10`, or which
    share, as `last 60%`; none: all."""
    merge: bool = True
    """Whether `checkpoint` becomes the merged model; the adapter is saved in any case."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """A frozen model that `trl.replay: distill` follows."""

    model: str
    """Folder or Hub id: of its tokenizer, and without `url` of its weights."""
    revision: str | None = None
    """Revision of a model from the Hub."""
    url: str | None = None
    """Base URL, to `/v1`, of a server that gives log-probabilities of a prompt's tokens: vLLM, or
    `python -m trainer serve`. None: the weights are loaded here."""
    name: str | None = None
    """What requests to the server call it; none: as `model`."""
    top_k: int = 20
    """Likeliest tokens that the server is asked for at each place."""
    accuracy: float | None = None
    """How often it is right, from 0 to 1, as `replay-pipeline pairs` says. Teachers have weights in
    this proportion; none, for all of them: equal ones."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, as its settings file says it to one engine."""

    dataset: str
    """Published dataset: a folder or a Hub id."""
    output: str
    """Folder for metrics, plot, checkpoint, evaluation and report."""
    revision: str | None = None
    """Revision of a Hub dataset."""
    model: str | None = None
    """Folder or Hub id of a causal LM; none: a tiny one made on the spot."""
    model_revision: str | None = None
    """Revision of a model from the Hub."""
    dtype: str = "float32"
    """Of the weights: float32, bfloat16 or float16."""
    attention: str | None = None
    """Attention of transformers: sdpa, eager, flash_attention_2, …; none: the model's own choice."""
    quantize: str = "none"
    """`4bit` or `8bit` loads the frozen weights quantized (QLoRA; needs bitsandbytes and `peft`)."""
    trust_remote_code: bool = False
    """Whether a model may bring code of its own, which is then run."""
    teachers: list[TeacherOptions] | None = None
    """Frozen models that `trl.replay: distill` follows."""
    peft: PeftOptions | None = None
    """Trains LoRA adapters instead of all weights."""
    push_to_hub: str | None = None
    """Repository `org/name` that the trained model is pushed to, private, with its card."""
    preflight: PreflightOptions = field(default_factory=PreflightOptions)
    """What is put up with before a run is refused."""
    tiny: TinyOptions = field(default_factory=TinyOptions)
    rollouts: str = "student"
    """`student`: the student's recorded decisions. `contrast`: at each state the student's and the
    teachers' action. `generate`: samples from the policy."""
    reward: str = "consensus"
    """The built-in reward, or `package.module:function(message, row) -> float`."""
    agreement: str | None = None
    """`package.module:function(a, b) -> level` for the consensus rate; none: the built-in one."""
    outer: str = "none"
    """Joins replicas of this run: `none`, `object_store` or `torchft`."""
    outer_options: dict[str, Any] = field(default_factory=dict)
    """How they are joined: fields of `OuterOptions`."""
    resume_from: str | None = None
    """Checkpoint folder of an earlier run to go on from; `last`: the newest complete checkpoint in
    the output folder of a run with the same settings and dataset, if there is one."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    trl: dict[str, Any] = field(default_factory=dict)
    """Fields of `SharedSettings`; under TRL, all of `ComposerConfig`, and so of `GRPOConfig`."""
    engine: str = field(default="trl", metadata=NOT_IN_FILE)
    """Who reads the file."""
    own: dict[str, Any] = field(default_factory=dict, metadata=NOT_IN_FILE)
    """The section `engines.<engine>`."""

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            TrainerConfigError: the message names the field.
        """
        choices = {
            "rollouts": ("student", "contrast", "generate"),
            "dtype": ("float32", "bfloat16", "float16"),
            "quantize": ("none", "4bit", "8bit"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise TrainerConfigError(f"{name}={getattr(self, name)!r} is not {_any_of(known)}")
        if self.model is None and (self.dtype != "float32" or self.attention is not None):
            name = "attention" if self.attention is not None else "dtype"
            raise TrainerConfigError(
                f"{name}={getattr(self, name)}: without `model`, the trainer makes a tiny model in float32; set `model`, or remove this setting"
            )
        if self.dtype != "float32" and self.peft is None and self.engine in HOSTS_OF_TRL:
            raise TrainerConfigError(
                f"dtype={self.dtype} trains all weights in {self.dtype}, which rounds steps at usual learning rates to zero. Keep the weights in float32 (dtype: float32; on a GPU, trl.bf16 still computes in bfloat16), or train adapters (peft.rank=16)"
            )
        if self.quantize != "none" and (self.peft is None or self.model is None):
            raise TrainerConfigError(
                f"quantize={self.quantize}: quantized weights can't be trained; name a model and add adapters (peft.rank=16)"
            )
        self.shared.check()
        self._check_teachers()

    def _check_teachers(self) -> None:
        """Refuse teachers that nobody follows, none where some are, and weights of some alone.

        Raises:
            TrainerConfigError: teachers and the other settings do not fit together.
        """
        if self.shared.is_distill != bool(self.teachers):
            raise TrainerConfigError(
                "teachers and trl.replay=distill belong together: name the frozen models, "
                "teachers=[{model: FOLDER}], and trl.replay=distill with trl.beta_replay above 0"
            )
        told = [teacher.accuracy for teacher in self.teachers or ()]
        if any(one is None for one in told) and any(one is not None for one in told):
            raise TrainerConfigError("teachers: set `accuracy` for all of them or for none")
        if wrong := [one for one in told if one is not None and not 0.0 < one <= 1.0]:
            raise TrainerConfigError(f"teachers: accuracy={wrong[0]} is not in (0, 1]")
        if self.shared.temperature != 1.0 and any(one.url for one in self.teachers or ()):
            raise TrainerConfigError(
                f"trl.temperature={self.shared.temperature} with a teacher at a url: servers score at "
                "temperature 1; set trl.temperature=1.0"
            )

    @cached_property
    def shared(self) -> SharedSettings:
        """Return the part of the `trl` section that every engine reads."""
        known = {entry.name for entry in fields(SharedSettings)}
        return SharedSettings(**{name: self.trl[name] for name in known & set(self.trl)})


def without_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the engines' own parts, which are checked first.

    Raises:
        TrainerConfigError: `engines` names none that there is.
    """
    engines = mapping_of("engines", values.get("engines"))
    if unknown := sorted(set(engines) - set(ENGINE_NAMES)):
        raise TrainerConfigError(
            f"engines.{unknown[0]}: there is no such engine; known are {', '.join(ENGINE_NAMES)}"
        )
    for name, section in engines.items():
        mapping_of(f"engines.{name}", section)
    if engines.get("trl"):
        raise TrainerConfigError(
            f"engines.trl.{next(iter(engines['trl']))}: settings of TRL belong in the section trl"
        )
    return {name: value for name, value in values.items() if name != "engines"}


def section_of(section: type[Section], values: Any, prefix: str) -> Section:
    """Build a dataclass from the mapping that a settings file has for it.

    Raises:
        TrainerConfigError: a name is unknown, or a value has another type.
    """
    return section(**typed(section, values, prefix))


def typed(section: type, values: Any, prefix: str) -> dict[str, Any]:
    """Return the values of a section the types of the dataclass's fields.

    YAML 1.1 reads `1e-5` as text: here it becomes the number that it was meant to be.

    Args:
        section: the dataclass.
        values: its section of the file; `None` is an empty one.
        prefix: what stands before a field's name in messages.

    Raises:
        TrainerConfigError: a name is unknown, or a value cannot have the field's type.
    """
    values = mapping_of(prefix.rstrip("."), values)
    hints = get_type_hints(section)
    known = {entry.name for entry in fields(section) if entry.metadata != NOT_IN_FILE}
    if unknown := sorted(set(values) - known):
        raise TrainerConfigError(f"unknown setting {prefix}{unknown[0]}")
    converted: dict[str, Any] = {}
    for name, value in values.items():
        kinds = [hints[name], *get_args(hints[name])]
        inner = next((kind for kind in kinds if is_dataclass(kind)), None)
        listed = next((kind for kind in kinds if get_origin(kind) is list), None)
        if isinstance(value, list) and listed and is_dataclass(one := get_args(listed)[0]):
            converted[name] = [
                section_of(one, entry, f"{prefix}{name}[{i}].") for i, entry in enumerate(value)
            ]
            continue
        if inner is not None and (value is not None or inner is hints[name]):
            converted[name] = section_of(inner, value, f"{prefix}{name}.")
            continue
        if value is None and type(None) not in get_args(hints[name]):
            continue  # an empty entry of a file says nothing
        try:
            # Strict for truth values alone: they would pass for numbers.
            converted[name] = TypeAdapter(hints[name]).validate_python(
                value, strict=isinstance(value, bool)
            )
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise TrainerConfigError(f"{prefix}{name}={value!r}: {reason}") from error
    return converted


def mapping_of(name: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping | None):
        raise TrainerConfigError(f"{name}: expected a section of settings, not {values!r}")
    return values or {}


def overlaid(
    config: dict[str, Any], settings: RunConfig, *, reserved: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Put `engines.<engine>` over an engine's configuration; dots reach into sections.

    Raises:
        TrainerConfigError: a key goes through a value that is not a section.
    """
    for key, value in settings.own.items():
        if key in reserved:
            continue
        section: Any = config
        *outer, last = key.split(".")
        for name in outer:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise TrainerConfigError(
                    f"engines.{settings.engine}: {key} goes through {name}, which is not a section"
                )
        section[last] = value
    return config
