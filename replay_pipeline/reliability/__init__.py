"""Estimate from agreement who is right how often, and where another question is worth its price.

Start with `model.py`. `ballots.py` defines the observations, and `precision.py` corrects the
estimates by checked pairs.
"""

from replay_pipeline.reliability.ballots import AGENT, Ballot, BallotBox, Verdicts
from replay_pipeline.reliability.calibration import Calibration, calibrated
from replay_pipeline.reliability.model import Beliefs, Reliability, fit, posterior
from replay_pipeline.reliability.precision import Precision, PrecisionEvidence, draw, draw_next
from replay_pipeline.reliability.strengths import Strength, shared_errors, strengths
from replay_pipeline.reliability.wilson import wilson_interval

__all__ = [
    "AGENT",
    "Ballot",
    "BallotBox",
    "Beliefs",
    "Calibration",
    "Precision",
    "PrecisionEvidence",
    "Reliability",
    "Strength",
    "Verdicts",
    "calibrated",
    "draw",
    "draw_next",
    "fit",
    "posterior",
    "shared_errors",
    "strengths",
    "wilson_interval",
]
