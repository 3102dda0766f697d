"""The confidence interval of a share."""

import math

Z = 1.959964
"""95 % of a normal distribution lies within this many standard deviations."""


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `n` (Wilson 1927), or [0, 1] if `n` is 0.

    Args:
        share: the share, from 0 to 1.
        n: number of observations. Weights may make it a fraction.
    """
    if not n:
        return 0.0, 1.0
    z2 = Z**2 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
