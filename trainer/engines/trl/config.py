"""Settings of the three-channel trainer on top of TRL's own."""

from dataclasses import dataclass

from accelerate.utils import parse_flag_from_env
from trl.trainer.grpo_config import GRPOConfig

from trainer.errors import TrainerConfigError
from trainer.settings import OBJECTIVES, SharedSettings


@dataclass
class ComposerConfig(SharedSettings, GRPOConfig):  # type: ignore[inconsistent-inheritance]
    """TRL's `GRPOConfig` plus the weights and options of channels 2 and 3."""

    drift_weight: float = 0.0
    """Weight of KL(original || trained) per token, on general text and on recorded actions that need
    no change, unless the run imitates these. 0 turns it off. It keeps calls well formed, which a
    preference loss alone can spoil."""

    drift_tokens: int = 384
    """Most tokens per step on which the drift is measured, in whole texts and actions."""

    balance_pairs: bool = False
    """Whether pairs that the untouched model ranks right, and those that it ranks wrong, weigh the
    same in the preference loss. If all are of one kind, the loss is off. Otherwise, a model that is
    trained on its own mistakes learns to distrust itself, also where it is right."""

    fsdp: bool | str | None = None  # type: ignore[bad-override]
    """Whether to shard weights as `fsdp_config` says. (Upstream warns of text, and declares text.)"""

    logging_nan_inf_filter: bool = False
    """Whether the log replaces a NaN loss by a mean. If so, a diverging run isn't noticed, and
    every step waits for the device."""

    def __post_init__(self) -> None:
        """Turn the objective's name into TRL's settings, and check ours.

        Raises:
            TrainerConfigError: a name is unknown or a value out of range.
        """
        self._apply_objective()
        self.check()
        if self.torch_compile:
            raise TrainerConfigError(
                "torch_compile: the lengths of packed trees change with every step, so the model would be compiled again each time. Remove it (on CUDA, attention over trees is compiled anyway)"
            )
        if self.drift_weight > 0 and (self.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")):
            raise TrainerConfigError(
                "drift_weight does not support sharded models (FSDP), in which no rank has the original "
                "model: set it to 0"
            )
        # TRL still sets the old names, which transformers answers with a deprecation warning.
        if self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        super().__post_init__()

    def _apply_objective(self) -> None:
        if self.objective is None:
            return
        if self.objective not in OBJECTIVES:
            raise TrainerConfigError(
                f"objective={self.objective!r} is not one of {', '.join(OBJECTIVES)}"
            )
        for name, value in OBJECTIVES[self.objective].items():
            # What the user set away from TRL's default wins over the menu.
            default = GRPOConfig.__dataclass_fields__[name].default
            if name == "loss_type" or getattr(self, name) == default:
                setattr(self, name, value)
