"""What came of a question, as a row: a paid answer, a failure, or a lost call; and of a run, as figures."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from replay_pipeline.errors import TeacherAuthError
from replay_pipeline.replay.buy.lanes import LaneQuestion
from replay_pipeline.replay.dialects.prices import usd
from replay_pipeline.replay.dialects.replies import Answer, Failure
from replay_pipeline.replay.dialects.servers import dialect_of
from replay_pipeline.replay.money.calls import LostCall
from replay_pipeline.types import (
    ONLY_LOOKED,
    ReplayReport,
    TeacherAction,
    TeacherSpec,
    family_of_model,
)

_MOST_BYTES_PER_TOKEN = 6.0
_LEAST_BYTES_CHECKED = 8192


def due(lost: Iterable[LostCall]) -> datetime:
    """Return the time by which the last of these calls has surely ended."""
    return max((each.due_at for each in lost), default=datetime.now(UTC))


def has_too_short_a_limit(lost: Sequence[LostCall], teacher: TeacherSpec) -> bool:
    """Return whether calls exceeded a teacher's time limit, and the limit hasn't been raised since.

    Then every further call would be lost too, and paid for. An endpoint that keeps its answers is
    asked once more, since it may have the answer by now.
    """
    timed_out = [each for each in lost if each.error_code == "no_reply"]
    most = 2 if dialect_of(teacher).name == "openrouter" else 1
    longest = max((each.due_at - each.sent_at for each in timed_out), default=timedelta())
    return len(timed_out) >= most and timedelta(seconds=teacher.timeout_s) <= longest


def checked(task: LaneQuestion, answer: Answer, wrong: Failure | None) -> Answer:
    """Flag an answer from another model, or to a prompt that the server silently cut, as Ollama does.

    A chat template without tool support silently drops the tools (SmolLM2's, Gemma's).
    """
    if wrong is not None:
        return replace(answer, error_code=wrong.code, error_message=wrong.message)
    n_tokens, size = answer.usage.n_prompt_tokens, task.question.size
    if (
        n_tokens is None
        or answer.is_replayed
        or dialect_of(task.teacher).is_whole
        or n_tokens > size.n_bytes / _MOST_BYTES_PER_TOKEN
        or size.n_bytes < _LEAST_BYTES_CHECKED
    ):
        return answer
    seen = f"the server read {n_tokens} tokens of a prompt of {size.n_bytes} bytes"
    if n_tokens > (size.n_bytes - size.n_tool_bytes) / _MOST_BYTES_PER_TOKEN:
        why = "its chat template drops the tools; serve the model with one that knows tools"
    else:
        why = "raise its context length (Ollama: OLLAMA_CONTEXT_LENGTH) or choose a window"
    return replace(answer, error_code="prompt_truncated", error_message=f"{seen}: {why}")


def by_its_model(row: TeacherAction, *, is_asked: bool) -> TeacherAction:
    """Let an answer of another model than the asked one vote as its own family.

    A gateway that falls back to a third model would else make one model several voters. Nothing is
    known of that model's terms either.
    """
    if is_asked or row.action is None:
        return row
    return replace(row, family=family_of_model(row.model), is_distillable=None)


def plausible(task: LaneQuestion, n_tokens: int | None) -> int | None:
    """Return a count of prompt tokens only if it can be that of the whole prompt."""
    least = task.question.size.n_bytes / _MOST_BYTES_PER_TOKEN
    return n_tokens if n_tokens is not None and n_tokens >= least else None


def answered_row(task: LaneQuestion, answer: Answer, cost: int, **made: Any) -> TeacherAction:
    """Make the row of a paid answer. `made` says how the call was made."""
    usage = answer.usage
    return replace(
        answer_row(task, **made),
        action=answer.action,
        model=answer.model or task.teacher.model,
        provider=answer.provider,
        finish_reason=answer.finish_reason,
        cost_usd=usd(cost),
        n_prompt_tokens=usage.n_prompt_tokens,
        n_completion_tokens=usage.n_completion_tokens,
        n_cached_tokens=usage.n_cached_tokens,
        n_reasoning_tokens=usage.n_reasoning_tokens,
        generation_id=answer.generation_id,
        error_code=answer.error_code,
        error_message=answer.error_message,
        gate=task.gate,
        propensity=task.propensity,
    )


def failed_row(task: LaneQuestion, failure: Failure, **made: Any) -> TeacherAction:
    """Make the row of a call that got no answer and cost nothing."""
    return answer_row(task, error_code=failure.code, error_message=failure.message, **made)


def lost_row(task: LaneQuestion) -> TeacherAction:
    """Make the row of a question whose calls were lost."""
    code = task.lost[-1].error_code
    return answer_row(
        task,
        n_attempts=len(task.lost),
        error_code="outcome_unknown",
        error_message=f"a call was sent and no reply came back{f' ({code})' if code else ''}"
        "; it counts at its full reservation until it is asked again "
        "(replay-pipeline status --lost)",
    )


def unexpected(error: Exception) -> dict[str, str]:
    """Return the fields of a row for an unexpected error."""
    return {
        "error_code": "unexpected",
        "error_message": f"{type(error).__name__}: {error}"[:500],
    }


def answer_row(task: LaneQuestion, **more: Any) -> TeacherAction:
    """Make the row of a question, with `more` of its fields."""
    return TeacherAction(
        state_id=task.state_id,
        teacher=task.teacher.name,
        model=task.teacher.model,
        family=task.teacher.vendor,
        request_sha=task.question.sha,
        is_distillable=task.teacher.is_distillable,
        **more,
    )


NOT_ASKED = ("budget", "stopped", "teacher_stopped", "ledger_failed")
"""Reasons for which a question waits for the next run. All other reasons are gates."""

_REFUSALS = frozenset({"key_rejected", "forbidden", "credit_exhausted"})


def replay_facts(report: ReplayReport) -> dict[str, Any]:
    """Return the figures of a replay as plain JSON values."""
    answered = [row for row in report.actions if row.error_code is None]
    looked = [row for row in report.actions if row.error_code in ONLY_LOOKED]
    failed = [row for row in report.actions if row.error_code not in (None, *ONLY_LOOKED)]
    told = {each.name: getattr(report, each.name) for each in fields(report)}
    del told["actions"], told["n_open"]
    return {
        **told,
        "n_answers": len(answered),
        "n_failed": len(failed),
        "n_only_looked": len(looked),
        "n_rehearsed": sum(row.is_rehearsal for row in answered),
        "errors": dict(Counter(row.error_code for row in failed)),
        "only_looked": dict(Counter(row.error_code for row in looked)),
        "looks_answered_by": dict(
            Counter(
                told.source for row in report.actions for look in row.looks for told in look.answers
            )
        ),
        "failed_usd": round(sum(row.cost_usd for row in failed) + report.unknown_usd, 9),
        "is_complete": report.stop_reason in ("completed", "mostly_failed")
        and not report.n_open
        and not report.skipped.get("teacher_stopped"),
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
