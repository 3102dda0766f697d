"""Calibrate claimed probabilities against checked pairs, with two numbers.

The log-odds of a claim are shifted and scaled to predict the checks best: Platt (1999),
"Probabilistic outputs for support vector machines". Priors keep the claims unchanged if few pairs
were checked. A pair that was more likely to be drawn counts less (Hajek's estimator).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_CHECKED = 5
"""The fewest checked pairs that correct the claims."""
_SHIFT_SD, _SLOPE_SD = 1.5, 0.5
"""Prior standard deviations of the two numbers around 0 and 1."""
_SUREST = 1e-4
_N_STEPS = 25


@dataclass(frozen=True, slots=True)
class Calibration:
    """A correction of claims by checked pairs."""

    shift: float = 0.0
    slope: float = 1.0
    n_checked: int = 0
    """Number of checked pairs behind it."""

    def of(self, p: float) -> float:
        """Return the calibrated probability for a claim of `p`."""
        if not self.n_checked:
            return p
        return float(_expit(self.shift + self.slope * _logit(np.array(p))))


def calibrated(checks: Sequence[tuple[float, bool, float]]) -> Calibration:
    """Return the most likely calibration, or none if too few pairs were checked.

    Args:
        checks: for each checked pair its claim, whether it is right, and its chance of being drawn.
    """
    if len(checks) < FEWEST_CHECKED:
        return Calibration()
    p, y, chance = (np.array(each, dtype=float) for each in zip(*checks, strict=True))
    weights = 1 / chance
    # As many as would tell as much if all had been drawn with one chance (Kish 1965).
    weights *= weights.sum() / (weights**2).sum()
    x = np.stack([np.ones_like(p), _logit(p)], axis=1)
    mean, precision = np.array([0.0, 1.0]), np.array([_SHIFT_SD, _SLOPE_SD]) ** -2.0
    found = mean.copy()
    for _ in range(_N_STEPS):
        said = _expit(x @ found)
        slope = x.T @ (weights * (y - said)) - precision * (found - mean)
        curve = (x * (weights * said * (1 - said))[:, None]).T @ x + np.diag(precision)
        step = np.linalg.solve(curve, slope)
        found += np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < 1e-9:
            break
    # A surer claim is never worth less.
    return Calibration(float(found[0]), max(0.0, float(found[1])), len(checks))


def _logit(p: np.ndarray) -> np.ndarray:
    kept = np.clip(p, _SUREST, 1 - _SUREST)
    return np.log(kept / (1 - kept))


def _expit(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
