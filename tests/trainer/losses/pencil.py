"""Probabilities and divergences that are worked out with a pencil."""

import math

import torch
from torch import Tensor

EVEN, SURE = [0.5, 0.5], [0.75, 0.25]
FORWARD = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
"""KL(SURE || EVEN)"""
REVERSE = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
"""KL(EVEN || SURE)"""
MIDDLE = 0.5 * (
    0.75 * math.log(0.75 / 0.625)
    + 0.25 * math.log(0.25 / 0.375)
    + 0.5 * math.log(0.5 / 0.625)
    + 0.5 * math.log(0.5 / 0.375)
)
"""JSD of the two; their mixture is 5/8 and 3/8."""


def log(rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def kl_terms(p, q) -> list[float]:
    return [a * math.log(a / b) for a, b in zip(p, q, strict=True)]


def kl(p, q) -> float:
    return sum(kl_terms(p, q))
