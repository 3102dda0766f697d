"""Preference pairs: where teachers agree on an action that the student did not take.

Start with `extract.py`. `actions/votes.py` defines a consensus, `natural.py` finds pairs without
teachers, and `report.py` counts everything.
"""

from replay_pipeline.pairs.extract import extract_dpo_pairs, extract_pairs
from replay_pipeline.pairs.on_policy import WITH_CONSENSUS, OnPolicyReport, on_policy_pairs
from replay_pipeline.pairs.report import PairReport
from replay_pipeline.pairs.rows import (
    outcomes_table,
    pairs_table,
    positives_table,
)
from replay_pipeline.storage.pair_rows import pairs_of
from replay_pipeline.types import family_of_model

__all__ = [
    "WITH_CONSENSUS",
    "OnPolicyReport",
    "PairReport",
    "extract_dpo_pairs",
    "extract_pairs",
    "family_of_model",
    "on_policy_pairs",
    "outcomes_table",
    "pairs_of",
    "pairs_table",
    "positives_table",
]
