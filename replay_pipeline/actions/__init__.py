"""The canonical form of an agent's actions, and the rules for when two actions are the same.

All functions are pure: they run no command, and touch no file and no network. Every input takes
bounded time. Read `canonical.py` (what an action is), then `agreement.py` (when two agree).
"""

from replay_pipeline.actions.agreement import (
    LEVELS,
    TextComparator,
    agreement_level,
    agrees_at,
    differ_in_calls_alone,
)
from replay_pipeline.actions.canonical import Action, Call, canonical_action, parse_rendered
from replay_pipeline.actions.reward import LEVEL_CREDIT, consensus_reward

__all__ = [
    "LEVELS",
    "LEVEL_CREDIT",
    "Action",
    "Call",
    "TextComparator",
    "agreement_level",
    "agrees_at",
    "canonical_action",
    "consensus_reward",
    "differ_in_calls_alone",
    "parse_rendered",
]
