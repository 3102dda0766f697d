"""The trainer's half of PRIME-RL's adapter: its default loss, called, on today's or older inputs.

`[trainer.loss]` names `policy_loss` by its dotted path. It changes no number of today's PRIME-RL: it
fails at the first step where a channel would be silent, and gives versions before 0.8, which have no
`ref_kl` component, their channel 2.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.integrations.prime_rl.contract import (
    DefaultLoss,
    LossInputs,
    LossOutputs,
    ref_kl_loss,
)

logger = logging.getLogger(__name__)

REQUIRED = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
OLD_REFERENCE = "teacher_logprobs"


def policy_loss(inputs: Any, *, alpha_sdpo: float = 0.0, **options: float) -> LossOutputs:
    """PRIME-RL's default loss on one sequence: channel 1, and channel 3 as credit.

    `options` are those of its default loss. `alpha_sdpo` is used by versions before 0.8 only; from
    then on channel 2 is a component of its own, weighted token by token.

    Raises:
        TrainerConfigError: the inputs are of no version that this adapter knows.
    """
    read = as_inputs(inputs)
    default = default_loss(**options)
    if not hasattr(inputs, OLD_REFERENCE):
        return default(inputs)
    outputs = DefaultLoss(**options)(read)
    if alpha_sdpo > 0:
        if read.ref_logprobs is None:
            raise TrainerConfigError(
                f"alpha_sdpo={alpha_sdpo} and LossInputs.{OLD_REFERENCE} is None: the orchestrator "
                "scored nothing; use PRIME-RL 0.8 with algo type 'three_channels'"
            )
        charge = ref_kl_loss(replace(read, loss_weights=None))
        outputs.loss = outputs.loss + alpha_sdpo * charge.loss
        outputs.metrics |= charge.metrics
    return outputs


def as_inputs(inputs: Any) -> LossInputs:
    """Inputs of any known version under today's field names.

    Raises:
        TrainerConfigError: a field is missing that no version does without.
    """
    missing = [name for name in REQUIRED if not hasattr(inputs, name)]
    if missing:
        found = sorted(name for name in vars(inputs) if not name.startswith("_"))
        raise TrainerConfigError(
            f"PRIME-RL's LossInputs has no {missing[0]} but {', '.join(found)}: this adapter knows "
            "versions 0.5 to 0.8; see trainer/integrations/prime_rl/contract.py"
        )
    reference = getattr(inputs, "ref_logprobs", None)
    if reference is None and hasattr(inputs, OLD_REFERENCE):
        _say_old()
        reference = getattr(inputs, OLD_REFERENCE)
    return LossInputs(
        **{name: getattr(inputs, name) for name in REQUIRED},
        ref_logprobs=reference,
        loss_weights=getattr(inputs, "loss_weights", None),
    )


@functools.lru_cache(maxsize=1)
def _say_old() -> None:
    logger.warning(
        "this PRIME-RL is older than 0.8: its %s is read as ref_logprobs, and channel 2 is added "
        "here, over the policy's tokens; upgrade to weigh it token by token",
        OLD_REFERENCE,
    )


@functools.lru_cache(maxsize=8)
def default_loss(**options: float) -> Callable[[Any], Any]:
    """PRIME-RL's own default loss where it is installed, the recorded contract elsewhere."""
    try:
        from prime_rl.configs.trainer import DefaultLossConfig  # noqa: PLC0415
        from prime_rl.trainer.rl.loss import setup_rl_loss_fn  # noqa: PLC0415
    except ImportError:
        return DefaultLoss(**options)
    return setup_rl_loss_fn(DefaultLossConfig(**options))
