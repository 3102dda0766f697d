"""The settings file for every engine.

`replay-train` reads this file. Its `trl` section has the three channels and the usual numbers
of a run: `SharedSettings`, from which `ComposerConfig` (TRL) and `PluginOptions` (VeRL) are
derived. Settings of only one engine go to `engines.<name>`, and the others ignore them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from trainer.data.evaluation import EvaluationOptions
from trainer.data.preflight import PreflightOptions
from trainer.errors import TrainerConfigError
from trainer.losses.channels import PREFERENCE_NUMBERS, ReplayOptions, SDPOOptions

logger = logging.getLogger(__name__)

Section = TypeVar("Section")

HOSTS_OF_TRL = frozenset({"trl", "monarch"})
"""Engines that run TRL, and so know every field of the `trl` section."""

ENGINE_NAMES = ("trl", "monarch", "verl", "prime_rl")
"""The names that may be under `engines`."""

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
"""TRL's names of policy objectives, by our names. `sft` isn't a policy gradient and reads no
rollouts. It is the cross-entropy per token of the actions that `sft_on` names."""

MAX_EPOCHS = 10
"""How often a small dataset is shown, if the number of steps follows from `pair_visits`."""

NOT_IN_FILE = {"is_in_file": False}
"""Metadata of a field that can't be in a settings file."""


@dataclass(kw_only=True)
class SharedSettings:
    """The three channels and the numbers of a run, with the names of the `trl` section."""

    objective: str | None = None
    """Policy objective: grpo, bnpo, dr_grpo, dapo, gspo, cispo, sapo, luspo, vespo, or `sft`
    (cross-entropy on recorded actions). By default, the engine's own."""
    sft_on: str = "answers"
    """Actions that `objective: sft` learns from: `chosen` (those of the pairs), `consensus` (also
    those of the positives, which have no preference loss), `answers` (also what a teacher said and
    nobody confirmed), or `recorded` (the agent's actions at the states of pairs and positives). Rows
    weigh by `p_chosen_right`, or by `weight` where they don't have it."""
    alpha_sdpo: float = 0.0
    """Weight of hint-conditioned self-distillation. 0 turns it off."""
    beta_replay: float = 0.0
    """Weight of channel 3. 0 turns it off."""
    policy_weight: float = 1.0
    """Weight of the policy objective in the sum."""
    jsd_beta: float = 0.5
    """0 is KL(teacher || student), 1 is KL(student || teacher)."""
    sdpo_wrapper: str = "none"
    """Variant of the divergence: none (plain), taid, or entropy_opd."""
    sdpo_estimator: str = "full"
    """Form of the divergence: full, topk, teacher_topk, or sampled."""
    sdpo_top_k: int | None = None
    """Number of tokens that the divergence compares, for topk and teacher_topk."""
    sdpo_token_clip: float | None = None
    """Upper limit on each vocabulary entry's part of the divergence."""
    entropy_opd_h_max: float | None = None
    """Entropy (nats) at which the gate is fully open. By default, log V."""
    taid_t_start: float = 0.4
    """First weight of the teacher in TAID's target."""
    taid_t_end: float = 1.0
    """Last weight of the teacher in TAID's target."""
    taid_alpha: float = 5e-4
    """Adaptive step of TAID."""
    teacher: str = "auto"
    """Teacher of channel 2, the model that sees the hint: ema, base, live, or auto (base under
    PEFT, else ema)."""
    teacher_ema_rate: float = 0.05
    """Share of the student in the teacher after each step."""
    dpo_variant: str = "simpo"
    """Preference loss, by its name in `docs/losses.md`."""
    dpo_beta: float = 0.1
    """Scale of all variants with a reference."""
    simpo_beta: float = 2.0
    """Scale of SimPO."""
    simpo_gamma: float = 1.0
    """Target margin of SimPO."""
    rpo_alpha: float = 0.0
    """Weight of the chosen side's log-likelihood per token, added to any preference loss. It keeps
    the loss from making both sides unlikely."""
    label_smoothing: float = 0.1
    """Share of pairs whose sides are believed to be swapped, for `dpo_variant: robust`."""
    group_pairs_by: str = "session"
    """Pairs to draw together: those of a `session`, whose prompts share tokens, or those with the
    same two `actions` in opposite order. Then a step learns from the prompts and not from the looks
    of the actions. All other pairs are drawn by session."""
    pairs_per_step: int = 4
    """Pairs of one optimizer step, over all processes."""
    pair_forward: str = "auto"
    """How pairs run: as a prefix tree (packed), one by one (padded), or auto."""
    max_packed_tokens: int = 32768
    """Packed tokens per pass. More pairs take more passes."""
    max_prompt_tokens: int = 1024
    """Token budget of a rendered prompt."""
    prompt_window: str = "decision"
    """The part that a prompt beyond the budget keeps: `decision` (the system message, the last
    request, everything that the sides need, and the newest steps), or `tail` (only its last
    tokens)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Options of the model's chat template, such as `reasoning_effort: low`. By default, thinking is
    off, if the template has an option for it."""
    max_response_tokens: int = 256
    """Longest response of a pair."""
    render_tools: bool = True
    """Whether prompts contain the tools' schemas."""
    max_steps: int = -1
    pair_visits: int = 0
    """Total number of pairs to show, which decides the number of steps if `max_steps` isn't set. A
    small dataset is shown at most ten times, a large one at least once. With 0, the engine's epochs
    decide."""
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0.0
    """Warmup steps. A value below one is a share of `max_steps`."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_generations: int = 2
    """Rollouts per group. Advantages are computed within a group."""
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 512
    temperature: float = 1.0
    """Temperature of sampling, and of the logits in all log-probabilities of channels 1 and 2."""
    activation_checkpointing: bool | None = None
    """Whether to recompute activations in the backward pass. By default, the engine decides."""
    seed: int = 42

    @property
    def is_sft(self) -> bool:
        """Return whether the policy objective has a weight and is cross-entropy on recorded actions."""
        return self.objective == "sft" and self.policy_weight > 0

    @property
    def drawn(self) -> str:
        """Return whose rows a step draws: `sft_on`, or those of the pairs if nothing is imitated."""
        return self.sft_on if self.is_sft else "chosen"

    @property
    def rendering(self) -> dict[str, Any]:
        """Return how rows are rendered: the arguments of a `Renderer` beside its tokenizer."""
        return {
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_response_tokens": self.max_response_tokens,
            "with_tools": self.render_tools,
            "window": self.prompt_window,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def has_preference(self) -> bool:
        """Return whether channel 3 has a weight."""
        return self.beta_replay > 0

    @property
    def has_policy(self) -> bool:
        """Return whether channel 1 has a weight and is a policy objective."""
        return self.policy_weight > 0 and not self.is_sft

    @property
    def needs_rollouts(self) -> bool:
        """Return whether a channel with a weight reads rollouts. Pairs alone need none."""
        return self.alpha_sdpo > 0 or self.has_policy

    def steps_for(self, n_pairs: int) -> int:
        """Return the number of optimizer steps for a number of pairs."""
        if self.max_steps > 0 or self.pair_visits == 0 or n_pairs == 0:
            return self.max_steps
        n_shown = min(max(self.pair_visits, n_pairs), MAX_EPOCHS * n_pairs)
        return -(-n_shown // self.pairs_per_step)

    @property
    def sdpo(self) -> SDPOOptions:
        """Return the options of channel 2 for the loss functions."""
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
        """Return the options of channel 3's preference loss for the loss functions."""
        return ReplayOptions(
            variant=self.dpo_variant, **{name: getattr(self, name) for name in PREFERENCE_NUMBERS}
        )

    @property
    def is_fused(self) -> bool:
        """Return whether channel 2 needs no logits of a batch."""
        return self.sdpo.is_plain

    def _check_sft(self) -> None:
        if self.sft_on in ("chosen", "recorded") and not self.is_sft:
            raise TrainerConfigError(f"sft_on={self.sft_on!r} needs objective=sft")
        if self.sft_on == "recorded" and self.beta_replay > 0:
            raise TrainerConfigError(
                "sft_on='recorded' needs beta_replay=0: it imitates the actions that the preference "
                "loss makes unlikely"
            )

    def check(self) -> None:
        """Check that all values are in range, and that a channel has a weight.

        Raises:
            TrainerConfigError: the message names the field.
        """
        choices = {
            "teacher": ("auto", "ema", "base", "live"),
            "pair_forward": ("auto", "packed", "padded"),
            "prompt_window": ("decision", "tail"),
            "group_pairs_by": ("session", "actions"),
            "sft_on": ("chosen", "consensus", "answers", "recorded"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise TrainerConfigError(f"{name}={getattr(self, name)!r} is not {_any_of(known)}")
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
        _ = self.sdpo, self.preference  # each checks its own values


def _any_of(names: tuple[str, ...]) -> str:
    return " or ".join((", ".join(names[:-1]), names[-1]))


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """The tiny model that is built if you name no model."""

    vocab_size: int = 1024
    hidden_size: int = 64
    n_layers: int = 2
    n_heads: int = 4
    is_mimetic: bool = False
    """Whether attention starts by copying the tokens that it looks at, which speeds up learning to read."""
    pretraining_steps: int = 0
    """Steps before the run in which it learns the form of actions, from both sides of the pairs equally."""


@dataclass(frozen=True, kw_only=True)
class PeftOptions:
    """LoRA adapters: small trained matrices next to frozen ones."""

    rank: int = 16
    alpha: int = 32
    """The adapter is scaled by alpha / rank."""
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    """Names of the adapted modules, or `all-linear`, or `attention` for those of attention layers."""
    layers: str | None = None
    """Adapted layers: first and last (`12-29`), a number of the last (`last 10`), or a share (`last
    60%`). By default, all."""
    merge: bool = True
    """Whether `checkpoint` is the merged model. The adapter is saved in any case."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a whole run for one engine."""

    dataset: str
    """Published dataset: a folder or a Hub id."""
    output: str
    """Folder for metrics, plot, checkpoint, evaluation, and report."""
    revision: str | None = None
    """Revision of a Hub dataset."""
    model: str | None = None
    """Folder or Hub id of a causal LM. By default, a new tiny model."""
    model_revision: str | None = None
    """Revision of a model from the Hub."""
    dtype: str = "float32"
    """Type of the weights: float32, bfloat16, or float16."""
    attention: str | None = None
    """Attention implementation of transformers: sdpa, eager, flash_attention_2, …. By default, the
    model's own choice."""
    trust_remote_code: bool = False
    """Whether to run code that comes with a model."""
    peft: PeftOptions | None = None
    """LoRA adapters to train instead of all weights."""
    push_to_hub: str | None = None
    """Private repository `org/name` to which the trained model is pushed with its card."""
    preflight: PreflightOptions = field(default_factory=PreflightOptions)
    """The limits above which a run is refused."""
    tiny: TinyOptions = field(default_factory=TinyOptions)
    rollouts: str = "student"
    """Source of rollouts: `student` (the student's recorded decisions), or `generate` (samples from
    the policy)."""
    reward: str = "consensus"
    """The built-in reward, or `package.module:function(message, row) -> float`."""
    agreement: str | None = None
    """`package.module:function(a, b) -> level` for the consensus rate. By default, the built-in one."""
    outer: str = "none"
    """How to join replicas of this run: `none`, `object_store`, or `torchft`."""
    outer_options: dict[str, Any] = field(default_factory=dict)
    """Fields of `OuterOptions` for joining them."""
    resume_from: str | None = None
    """Checkpoint folder to continue from. `last` means the newest complete checkpoint in the output
    folder, if there is one from a run with the same settings and dataset."""
    again: bool = False
    """Whether `resume_from: last` starts a finished run anew. Otherwise it stays as it is."""
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    trl: dict[str, Any] = field(default_factory=dict)
    """Fields of `SharedSettings`. Under TRL, all fields of `ComposerConfig`, and so of `GRPOConfig`."""
    engine: str = field(default="trl", metadata=NOT_IN_FILE)
    """The engine that reads the file."""
    own: dict[str, Any] = field(default_factory=dict, metadata=NOT_IN_FILE)
    """The section `engines.<engine>`."""

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            TrainerConfigError: the message names the field.
        """
        choices = {
            "rollouts": ("student", "generate"),
            "dtype": ("float32", "bfloat16", "float16"),
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
                f"dtype={self.dtype} stores all weights in {self.dtype}. At usual learning rates, steps are then rounded to zero. Set dtype=float32 (on a GPU, trl.bf16 still computes in bfloat16), or train adapters (peft.rank=16)"
            )
        targets = self.peft.targets if self.peft else ()
        if "lm_head" in ([targets] if isinstance(targets, str) else targets):
            raise TrainerConfigError(
                "peft.targets=lm_head: log-probabilities are computed from the head's own weight, so an "
                "adapter on it would not be trained; remove it"
            )
        self.shared.check()

    @cached_property
    def shared(self) -> SharedSettings:
        """Return the part of the `trl` section that every engine reads."""
        known = {entry.name for entry in fields(SharedSettings)}
        return SharedSettings(**{name: self.trl[name] for name in known & set(self.trl)})


def without_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the engines' own parts, and return the settings without them.

    Raises:
        TrainerConfigError: `engines` names an unknown engine.
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
    """Build a dataclass from its mapping in a settings file."""
    return section(**typed(section, values, prefix))


def typed(section: type, values: Any, prefix: str) -> dict[str, Any]:
    """Return the values of a section, converted to the types of the dataclass's fields.

    YAML 1.1 reads `1e-5` as text. Here it becomes a number.

    Args:
        section: the dataclass.
        values: its section of the file. `None` means an empty section.
        prefix: text before a field's name in messages.

    Raises:
        TrainerConfigError: a name is unknown, or a value can't be converted to the field's type.
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
    """Return a section of settings, empty if it is None.

    Raises:
        TrainerConfigError: it is something else.
    """
    if not isinstance(values, Mapping | None):
        raise TrainerConfigError(f"{name}: expected a section of settings, not {values!r}")
    return values or {}


def overlaid(
    config: dict[str, Any], settings: RunConfig, *, reserved: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Apply `engines.<engine>` to an engine's configuration. Dots reach into sections.

    Raises:
        TrainerConfigError: a key goes through a value that isn't a section.
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
