"""Loss functions from tensors to a scalar, independent of any training framework."""

from trainer.losses.compose import LossComponents, compose_loss
from trainer.losses.divergence import generalized_jsd_loss
from trainer.losses.entropy_opd import entropy_aware_opd_loss
from trainer.losses.preference import dpo_loss, simpo_loss
from trainer.losses.taid import TAIDScheduler, taid_loss

__all__ = [
    "LossComponents",
    "TAIDScheduler",
    "compose_loss",
    "dpo_loss",
    "entropy_aware_opd_loss",
    "generalized_jsd_loss",
    "simpo_loss",
    "taid_loss",
]
