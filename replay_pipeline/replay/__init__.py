"""Replay: put recorded states to teacher models, under a budget that can't be passed."""

from replay_pipeline.replay.ask.asking import AskingOptions
from replay_pipeline.replay.ask.control import control, openrouter_name
from replay_pipeline.replay.ask.outcomes import NOT_ASKED, refuse_if_nobody_answers, replay_facts
from replay_pipeline.replay.ask.run import (
    estimate,
    replay_in_thread,
    replay_states,
    replay_trace,
    replay_trace_sync,
)
from replay_pipeline.replay.buy.estimates import Estimate
from replay_pipeline.replay.buy.policy import parse_gates
from replay_pipeline.replay.dialects.endpoints import check_teachers
from replay_pipeline.replay.money.database import exists as has_ledger
from replay_pipeline.replay.money.status import (
    counted_usd,
    ledger_status,
    lost_calls,
    spent_since,
)

__all__ = [
    "NOT_ASKED",
    "AskingOptions",
    "Estimate",
    "check_teachers",
    "control",
    "counted_usd",
    "estimate",
    "has_ledger",
    "ledger_status",
    "lost_calls",
    "openrouter_name",
    "parse_gates",
    "refuse_if_nobody_answers",
    "replay_facts",
    "replay_in_thread",
    "replay_states",
    "replay_trace",
    "replay_trace_sync",
    "spent_since",
]
