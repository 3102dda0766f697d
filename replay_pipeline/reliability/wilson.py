"""The interval of a share: one formula for everything that counts how often something was so."""

import math

Z = 1.959964
"""Of the normal distribution, 95 % lies within so many standard deviations."""


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `n` (Wilson 1927); all of [0, 1] where `n` is 0.

    Args:
        share: the share, from 0 to 1.
        n: how many were looked at; weights may leave a broken number.
    """
    if not n:
        return 0.0, 1.0
    z2 = Z**2 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
