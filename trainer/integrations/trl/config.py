"""Settings of the three-channel trainer on top of TRL's own."""

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from trainer.errors import TrainerConfigError
from trainer.integrations.settings import replay_options, sdpo_options
from trainer.integrations.trl.forward import uses_fused_head

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
}
"""Policy objectives by name: the settings of TRL that make them."""


@dataclass
class ComposerConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus the weights and options of channels 2 and 3."""

    objective: str | None = field(
        default=None,
        metadata={"help": f"Policy objective: {', '.join(OBJECTIVES)}. None: TRL's loss_type."},
    )
    alpha_sdpo: float = field(
        default=0.0, metadata={"help": "Weight of hint-conditioned self-distillation. 0: off."}
    )
    beta_replay: float = field(
        default=0.0, metadata={"help": "Weight of the preference loss on pairs. 0: off."}
    )
    policy_weight: float = field(
        default=1.0, metadata={"help": "Weight of the policy objective in the sum."}
    )
    jsd_beta: float = field(
        default=0.5, metadata={"help": "0: KL(teacher||student), 1: KL(student||teacher)."}
    )
    sdpo_wrapper: str = field(default="none", metadata={"help": "none, taid or entropy_opd."})
    sdpo_estimator: str = field(
        default="full", metadata={"help": "full, topk, teacher_topk or sampled."}
    )
    sdpo_top_k: int | None = field(default=None, metadata={"help": "Support of the divergence."})
    sdpo_token_clip: float | None = field(
        default=None, metadata={"help": "Cap on each vocabulary entry of the divergence."}
    )
    entropy_opd_h_max: float | None = field(
        default=None, metadata={"help": "Entropy (nats) of a fully open gate. None: log V."}
    )
    taid_t_start: float = field(default=0.4, metadata={"help": "First weight of the teacher."})
    taid_t_end: float = field(default=1.0, metadata={"help": "Last weight of the teacher."})
    taid_alpha: float = field(default=5e-4, metadata={"help": "Adaptive step of TAID."})
    teacher: str = field(
        default="auto",
        metadata={"help": "ema, base, live, or auto: base under PEFT, else ema."},
    )
    teacher_ema_rate: float = field(
        default=0.05, metadata={"help": "Share of the student in the teacher after each step."}
    )
    dpo_variant: str = field(default="simpo", metadata={"help": "dpo, dpo_norm or simpo."})
    dpo_beta: float = field(default=0.1, metadata={"help": "Scale of dpo and dpo_norm."})
    simpo_beta: float = field(default=2.0, metadata={"help": "Scale of SimPO."})
    simpo_gamma: float = field(default=1.0, metadata={"help": "Target margin of SimPO."})
    pairs_per_step: int = field(
        default=4, metadata={"help": "Pairs in one optimizer step, over all processes."}
    )
    head: str = field(
        default="auto",
        metadata={
            "help": "LM head of channels 1 and 2: fused, reference, or auto (fused if exact)."
        },
    )
    pair_forward: str = field(
        default="auto",
        metadata={"help": "Pairs as a prefix tree (packed), one by one (padded), or auto."},
    )
    max_packed_tokens: int = field(
        default=32768, metadata={"help": "Packed tokens of one pass; more pairs take more passes."}
    )
    reuse_prefix: bool = field(
        default=True, metadata={"help": "Let a live teacher go on from the student's cache."}
    )
    max_prompt_tokens: int = field(
        default=1024, metadata={"help": "Budget of a rendered prompt; oldest messages go first."}
    )
    max_response_tokens: int = field(default=256, metadata={"help": "Longest response of a pair."})
    render_tools: bool = field(
        default=True, metadata={"help": "Put the tools' schemas into prompts of pairs."}
    )

    def __post_init__(self) -> None:
        """Turn the objective's name into TRL's settings, and check ours.

        Raises:
            TrainerConfigError: an unknown name or a value out of range.
        """
        self._apply_objective()
        self._check()
        # TRL still sets the old names, which transformers answers with a deprecation warning.
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()

    def _apply_objective(self) -> None:
        if self.objective is not None:
            if self.objective not in OBJECTIVES:
                raise TrainerConfigError(
                    f"objective={self.objective!r} is not one of {', '.join(OBJECTIVES)}"
                )
            defaults = GRPOConfig.__dataclass_fields__
            for name, value in OBJECTIVES[self.objective].items():
                # What the user set away from TRL's default wins over the menu.
                if name == "loss_type" or getattr(self, name) == defaults[name].default:
                    setattr(self, name, value)

    def _check(self) -> None:
        if self.teacher not in ("auto", "ema", "base", "live"):
            raise TrainerConfigError(f"teacher={self.teacher!r} is not auto, ema, base or live")
        if not 0.0 < self.teacher_ema_rate <= 1.0:
            raise TrainerConfigError(f"teacher_ema_rate={self.teacher_ema_rate} is not in (0, 1]")
        for name in ("alpha_sdpo", "beta_replay", "policy_weight"):
            if getattr(self, name) < 0:
                raise TrainerConfigError(f"{name}={getattr(self, name)} is negative")
        if self.pairs_per_step < 1:
            raise TrainerConfigError(f"pairs_per_step={self.pairs_per_step} must be at least 1")
        if self.pair_forward not in ("auto", "packed", "padded"):
            raise TrainerConfigError(
                f"pair_forward={self.pair_forward!r} is not auto, packed or padded"
            )
        uses_fused_head(self.head, sdpo_options(self))
        replay_options(self)
