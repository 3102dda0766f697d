"""The outer optimizer: one step per round on the mean pseudo-gradient θ_initial − θ_local.

Multiplications and additions are separate float32 operations in a fixed order, so that every
replica gets the same bits on any processor.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.errors import TrainerConfigError


@dataclass(frozen=True)
class OuterStep:
    """Gradient descent with (Nesterov) momentum, as in `torch.optim.SGD`.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1, line 14. The default momentum
    is lower than the paper's 0.9, which needs hundreds of rounds to pay off.
    """

    lr: float = 0.8
    momentum: float = 0.5
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise TrainerConfigError(
                f"outer lr={self.lr} must be positive, and momentum={self.momentum} must be in [0, 1)"
            )

    def apply(
        self,
        theta: NDArray[np.float32],
        velocity: NDArray[np.float32],
        pseudo_gradient: NDArray[np.float32],
    ) -> None:
        """Update the parameters and their velocity in place."""
        step = pseudo_gradient
        if self.momentum:
            velocity *= np.float32(self.momentum)
            velocity += pseudo_gradient
            step = velocity
            if self.nesterov:
                step = velocity * np.float32(self.momentum)
                step += pseudo_gradient
        theta -= step * np.float32(self.lr)


OUTER_PRESETS = {
    "nesterov": OuterStep(0.8, 0.5),
    "average": OuterStep(1.0, 0.0),
    "diloco": OuterStep(0.7, 0.9),
}
"""The presets: `nesterov` for training from scratch, `average` for fine-tuning, `diloco` as in the
paper (many rounds)."""


def outer_preset(name: str) -> OuterStep:
    """Return the outer optimizer of a preset.

    Raises:
        TrainerConfigError: The preset is unknown.
    """
    if name not in OUTER_PRESETS:
        raise TrainerConfigError(f"outer preset {name!r}: choose one of {', '.join(OUTER_PRESETS)}")
    return OUTER_PRESETS[name]
