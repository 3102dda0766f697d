"""The trainer's half of PRIME-RL's adapter: its default loss, on inputs that were looked at first.

`[trainer.loss]` names `policy_loss` by its dotted path. It changes no number: it fails at the first
step where a channel would be silent, because PRIME-RL calls a field by another name.
"""

import functools
from collections.abc import Callable
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.integrations.prime_rl.contract import DefaultLoss, LossOutputs

REQUIRED = (
    "trainer_logprobs",
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "loss_mask",
    "loss_weights",
)


def policy_loss(inputs: Any, **options: float) -> LossOutputs:
    """Compute PRIME-RL's default loss on one sequence: channel 1, and channel 3 as credit.

    `options` are those of its default loss. Channel 2 is a component of its own, weighted token by
    token.

    Raises:
        TrainerConfigError: the inputs are of no version that this adapter knows.
    """
    missing = [name for name in REQUIRED if not hasattr(inputs, name)]
    if missing:
        found = sorted(name for name in vars(inputs) if not name.startswith("_"))
        raise TrainerConfigError(
            f"PRIME-RL's LossInputs has no {missing[0]} but {', '.join(found)}: this adapter knows "
            "version 0.8; see trainer/integrations/prime_rl/contract.py"
        )
    return default_loss(**options)(inputs)


@functools.lru_cache(maxsize=8)
def default_loss(**options: float) -> Callable[[Any], Any]:
    """Give PRIME-RL's own default loss where it is installed, the recorded one elsewhere."""
    try:
        from prime_rl.configs.trainer import DefaultLossConfig  # noqa: PLC0415
        from prime_rl.trainer.rl.loss import setup_rl_loss_fn  # noqa: PLC0415
    except ImportError:
        return DefaultLoss(**options)
    return setup_rl_loss_fn(DefaultLossConfig(**options))
