"""Who is right, how often, and where that is worth a question: from who agreed with whom.

Start with `model.py`; `ballots.py` says what is looked at, `precision.py` how checks correct it.
"""

from replay_pipeline.reliability.ballots import AGENT, Ballot, BallotBox, Verdicts
from replay_pipeline.reliability.model import Beliefs, Reliability, fit, posterior
from replay_pipeline.reliability.precision import Precision, PrecisionEvidence, draw
from replay_pipeline.reliability.strengths import Strength, shared_errors, strengths
from replay_pipeline.reliability.wilson import wilson_interval

__all__ = [
    "AGENT",
    "Ballot",
    "BallotBox",
    "Beliefs",
    "Precision",
    "PrecisionEvidence",
    "Reliability",
    "Strength",
    "Verdicts",
    "draw",
    "fit",
    "posterior",
    "shared_errors",
    "strengths",
    "wilson_interval",
]
