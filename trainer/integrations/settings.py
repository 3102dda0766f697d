"""One settings file for every engine: what it says, and which of it an engine understands.

The file is that of `python -m trainer`. Its `trl` section holds the three channels and the usual
numbers of a run; other engines read the same names. What only one engine knows goes to
`engines.<name>` and is left alone by the others.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from trainer.errors import TrainerConfigError
from trainer.losses.channels import ReplayOptions, SDPOOptions

__all__ = [
    "ENGINE_NAMES",
    "EngineSettings",
    "SharedSettings",
    "overlaid",
    "read_settings",
    "replay_options",
    "sdpo_options",
    "without_engines",
]

logger = logging.getLogger(__name__)

Section = TypeVar("Section")

ENGINE_NAMES = ("trl", "monarch", "verl", "prime_rl")
"""What may stand under `engines`."""

FILE_NAMES = (
    "dataset",
    "output",
    "revision",
    "model",
    "tiny",
    "rollouts",
    "reward",
    "agreement",
    "outer",
    "outer_options",
    "resume_from",
    "evaluation",
    "trl",
    "engines",
)
"""What may stand in a settings file."""

HOSTS_OF_TRL = frozenset({"trl", "monarch"})
"""Engines that run TRL itself, and so know every field of the `trl` section."""

SPEED_ONLY = frozenset(
    {
        "disable_tqdm",
        "head",
        "logging_steps",
        "max_packed_tokens",
        "pair_forward",
        "report_to",
        "reuse_prefix",
        "use_cpu",
    }
)
"""Fields of the `trl` section that change speed or looks there, and nothing that is learnt."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """The fields of the `trl` section that every engine reads, with TRL's defaults."""

    objective: str | None = None
    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    policy_weight: float = 1.0
    jsd_beta: float = 0.5
    sdpo_wrapper: str = "none"
    sdpo_estimator: str = "full"
    sdpo_top_k: int | None = None
    sdpo_token_clip: float | None = None
    entropy_opd_h_max: float | None = None
    taid_t_start: float = 0.4
    taid_t_end: float = 1.0
    taid_alpha: float = 5e-4
    teacher: str = "auto"
    teacher_ema_rate: float = 0.05
    dpo_variant: str = "simpo"
    dpo_beta: float = 0.1
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0
    pairs_per_step: int = 4
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 256
    render_tools: bool = True
    max_steps: int = -1
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_generations: int = 2
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 256
    temperature: float = 1.0
    activation_checkpointing: bool = True
    seed: int = 42


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """A settings file as an engine other than TRL sees it."""

    engine: str
    dataset: str
    output: str
    revision: str | None = None
    model: str | None = None
    rollouts: str = "student"
    reward: str = "consensus"
    outer: str = "none"
    shared: SharedSettings = field(default_factory=SharedSettings)
    own: dict[str, Any] = field(default_factory=dict)
    """The section `engines.<engine>`."""
    unused: tuple[str, ...] = ()
    """Settings of the file that this engine has no use for."""

    @property
    def sdpo(self) -> SDPOOptions:
        """Channel 2 as the loss core knows it."""
        return sdpo_options(self.shared)

    @property
    def replay(self) -> ReplayOptions:
        """Channel 3 as the loss core knows it."""
        return replay_options(self.shared)


def sdpo_options(trl: Any) -> SDPOOptions:
    """Channel 2 from the fields of a `trl` section; the logits' temperature is the sampling one.

    Raises:
        TrainerConfigError: a value out of range.
    """
    return SDPOOptions(
        jsd_beta=trl.jsd_beta,
        temperature=trl.temperature,
        wrapper=trl.sdpo_wrapper,
        taid_t=trl.taid_t_start if trl.sdpo_wrapper == "taid" else None,
        entropy_opd_h_max=trl.entropy_opd_h_max,
        estimator=trl.sdpo_estimator,
        top_k=trl.sdpo_top_k,
        token_clip=trl.sdpo_token_clip,
    )


def replay_options(trl: Any) -> ReplayOptions:
    """Channel 3 from the fields of a `trl` section.

    Raises:
        TrainerConfigError: unknown variant.
    """
    return ReplayOptions(
        variant=trl.dpo_variant,
        dpo_beta=trl.dpo_beta,
        simpo_beta=trl.simpo_beta,
        simpo_gamma=trl.simpo_gamma,
    )


def without_engines(values: Mapping[str, Any]) -> dict[str, Any]:
    """The file as TRL reads it: what it says for other engines is left out.

    Raises:
        TrainerConfigError: `engines` names none that there is.
    """
    _check_engines(values)
    return {name: value for name, value in values.items() if name != "engines"}


def _check_engines(values: Mapping[str, Any]) -> None:
    engines = values.get("engines") or {}
    if not isinstance(engines, Mapping):
        raise TrainerConfigError("engines: expected a section for each engine")
    unknown = sorted(set(engines) - set(ENGINE_NAMES))
    if unknown:
        raise TrainerConfigError(
            f"engines.{unknown[0]}: there is no such engine; known are {', '.join(ENGINE_NAMES)}"
        )
    for name, section in engines.items():
        if not isinstance(section, Mapping | None):
            raise TrainerConfigError(f"engines.{name}: expected a section, not {section!r}")
    if engines.get("trl"):
        raise TrainerConfigError(
            f"engines.trl.{next(iter(engines['trl']))}: what TRL is told stands in the section trl"
        )


def overlaid(
    config: dict[str, Any], settings: EngineSettings, *, reserved: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """An engine's configuration with `engines.<engine>` put over it; dots reach into sections.

    Raises:
        TrainerConfigError: a key goes through a value that is no section.
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
                    f"engines.{settings.engine}: {key} goes through {name}, which is no section"
                )
        section[last] = value
    return config


def read_settings(values: Mapping[str, Any], engine: str) -> EngineSettings:
    """What a settings file says to `engine`; nothing of it is dropped in silence.

    Raises:
        TrainerConfigError: a missing field, or one that the engine does not know.
    """
    _check_engines(values)
    if unknown := sorted(set(values) - set(FILE_NAMES)):
        raise TrainerConfigError(f"unknown setting {unknown[0]}")
    if not isinstance(values.get("trl"), Mapping | None):
        raise TrainerConfigError(f"trl: expected a section, not {values['trl']!r}")
    trl = dict(values.get("trl") or {})
    shared_names = {entry.name for entry in fields(SharedSettings)}
    unused: list[str] = []
    if engine not in HOSTS_OF_TRL:
        unused = _unused(values, trl, shared_names, engine)
    for name in ("dataset", "output"):
        if not values.get(name):
            raise TrainerConfigError(f"{name} must be set")
    shared = _section("trl", SharedSettings, {k: trl[k] for k in set(trl) & shared_names})
    _check_weights(shared)
    taken = ("dataset", "output", "revision", "model", "rollouts", "reward", "outer")
    settings = EngineSettings(
        engine=engine,
        shared=shared,
        own=dict((values.get("engines") or {}).get(engine) or {}),
        unused=tuple(unused),
        **{name: values[name] for name in taken if values.get(name) is not None},
    )
    for name in settings.unused:
        logger.info("%s: %s is not used", engine, name)
    return settings


def _unused(
    values: Mapping[str, Any], trl: Mapping[str, Any], shared_names: set[str], engine: str
) -> list[str]:
    """Settings that change nothing under `engine`; those that would, are refused."""
    foreign = sorted(set(trl) - shared_names - SPEED_ONLY)
    if foreign:
        raise TrainerConfigError(
            f"trl.{foreign[0]} has no counterpart in {engine}: take it out, and say what you want "
            f"in {engine}'s own words under engines.{engine}"
        )
    for name in ("outer_options", "resume_from"):
        if values.get(name):
            raise TrainerConfigError(f"{name} has no counterpart in {engine}: take it out")
    about_evaluation = [name for name in ("agreement", "evaluation", "tiny") if values.get(name)]
    return sorted(f"trl.{name}" for name in set(trl) & SPEED_ONLY) + about_evaluation


def _section(name: str, section: type[Section], values: Mapping[str, Any]) -> Section:
    """A dataclass from YAML's values: `3e-3` is text there, and a whole number may be a float."""
    converted: dict[str, Any] = {}
    for entry in fields(section):  # type: ignore[arg-type]
        if entry.name not in values:
            continue
        value, default = values[entry.name], entry.default
        if isinstance(default, float) and not isinstance(value, bool):
            try:
                value = float(value)
            except (TypeError, ValueError) as error:
                raise TrainerConfigError(f"{name}.{entry.name}={value!r} is no number") from error
        elif isinstance(default, bool) != isinstance(value, bool) and default is not None:
            raise TrainerConfigError(f"{name}.{entry.name}={value!r} is not true or false")
        elif isinstance(default, int) and not isinstance(value, int):
            raise TrainerConfigError(f"{name}.{entry.name}={value!r} is no whole number")
        converted[entry.name] = value
    return section(**converted)


def _check_weights(shared: SharedSettings) -> None:
    for name in ("alpha_sdpo", "beta_replay", "policy_weight"):
        if getattr(shared, name) < 0:
            raise TrainerConfigError(f"trl.{name}={getattr(shared, name)} is negative")
    if shared.policy_weight == shared.alpha_sdpo == shared.beta_replay == 0:
        raise TrainerConfigError(
            "all three channels are off: raise policy_weight, alpha_sdpo or beta_replay"
        )
    if shared.pairs_per_step < 1:
        raise TrainerConfigError(f"trl.pairs_per_step={shared.pairs_per_step}: at least 1")
