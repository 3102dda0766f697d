"""The figures of a replay for its receipt."""

from collections import Counter
from typing import Any

from replay_pipeline.errors import TeacherAuthError
from replay_pipeline.types import ReplayReport

NOT_ASKED = ("budget", "stopped", "teacher_stopped", "ledger_failed")
"""Reasons for which a question waits for the next run. All other reasons are gates."""

_REFUSALS = frozenset({"key_rejected", "forbidden", "credit_exhausted"})


def replay_facts(report: ReplayReport) -> dict[str, Any]:
    """Return the figures of a replay as plain JSON values."""
    answered = [row for row in report.actions if row.error_code is None]
    errors = Counter(row.error_code for row in report.actions if row.error_code is not None)
    return {
        "n_states": report.n_states,
        "n_sent": report.n_sent,
        "n_cached": report.n_cached,
        "n_answers": len(answered),
        "n_failed": len(report.actions) - len(answered),
        "n_rehearsed": sum(row.is_rehearsal for row in answered),
        "errors": dict(errors),
        "spent_usd": report.spent_usd,
        "newly_spent_usd": report.newly_spent_usd,
        "unknown_usd": report.unknown_usd,
        "stopped_teachers": report.stopped_teachers,
        "held_until": report.held_until,
        "n_disputed": report.n_disputed,
        "max_total_usd": report.max_total_usd,
        "forecast_usd": report.forecast_usd,
        "stop_reason": report.stop_reason,
        "is_complete": report.stop_reason == "completed"
        and not report.n_open
        and not report.skipped.get("teacher_stopped"),
        "skipped": report.skipped,
        "coverage": report.coverage,
        "asked_by": report.asked_by,
        "cost_by_teacher_usd": report.cost_by_teacher_usd,
        "latency_s": sorted(round(row.latency_s, 3) for row in answered),
        "tokens": {
            name: sum(getattr(row, f"n_{name}_tokens") or 0 for row in answered)
            for name in ("prompt", "cached", "completion", "reasoning")
        },
    }


def refuse_if_nobody_answers(report: ReplayReport) -> None:
    """Raise an error if no teacher of a run could be used.

    Raises:
        TeacherAuthError: the endpoints refused access, and no teacher gave an action.
    """
    refusals = [row for row in report.actions if row.error_code in _REFUSALS]
    if refusals and not any(row.action for row in report.actions):
        raise TeacherAuthError(
            f"no teacher could be asked: {refusals[0].teacher}: {refusals[0].error_message}"
        )
