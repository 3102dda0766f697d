"""Ask each teacher three tiny questions, to find out what its price list doesn't say.

A chat template may silently drop tools, a server may report no usage, and a cache may never hit.
The questions go through a normal replay, under a ceiling and booked in the ledger.
"""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

from replay_pipeline.replay.ask.asking import Asking, AskingOptions
from replay_pipeline.replay.ask.run import estimate, replay_in_thread
from replay_pipeline.replay.buy.estimates import Estimate
from replay_pipeline.replay.dialects.client import run_apart
from replay_pipeline.replay.dialects.endpoints import teacher_keys
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.types import Message, TeacherAction, TeacherSpec, Tool, TraceState

MAX_COMPLETION_TOKENS = 16
_LEAST_BYTES_A_TOKEN = 8
"""Fewer tokens than one for so many bytes of tools, and they are not in the prompt."""
_CREDIBLE = 0.02
"""A bill that is off by a larger share than this was made with other prices."""
_RULES = " ".join(
    f"Rule {n}: keep answers short, say what failed, and change nothing unasked." for n in range(70)
)
"""Long enough (a thousand tokens and some) for a prompt cache to take it in."""
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an entry of the catalogue by its number. " * 8,
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "Number of the entry."}},
            "required": ["number"],
        },
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The results of three test questions to one teacher. `None` means unknown."""

    teacher: str
    cost_usd: float
    has_tools: bool | None = None
    """Whether the prompt grows when tools are sent with it."""
    has_usage: bool | None = None
    is_cached: bool | None = None
    """Whether the second of two prompts with the same beginning hit the cache."""
    is_price_right: bool | None = None
    """Whether it charged what its tokens cost by the known price."""
    problem: str | None = None
    """Why it gave no answer or no useful one, or None if all is well."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


def probe_estimate(teachers: Sequence[TeacherSpec], **options: Unpack[AskingOptions]) -> Estimate:
    """Return the estimated cost of a probe of these teachers. Raises the errors of `estimate`."""
    return estimate(_states(), teachers, **_tiny(options))


def probe_teachers(
    teachers: Sequence[TeacherSpec],
    *,
    ledger: str | Path | None = None,
    **options: Unpack[AskingOptions],
) -> list[Probe]:
    """Ask every teacher three tiny questions, and report the results.

    Args:
        teachers: the teachers to ask.
        ledger: as for `replay_states`.
        options: how to ask, see `Asking`.

    Raises:
        ConfigError: a teacher, key or option is wrong; raised before any cost.
        PriceError: a teacher's price is not known; raised before any cost.
    """
    states, options = _states(), _tiny(options)
    asking = Asking.of(**options)
    prices = run_apart(asking.fetch_prices(teachers, keys=teacher_keys(teachers)))
    # One after the other, the second prompt finds in the cache what the first one left there.
    limit = estimate(states, teachers, **options).bound_usd * 1.5
    report = replay_in_thread(states, teachers, max_total_usd=limit, ledger=ledger, **options)
    by_teacher: dict[str, dict[str, TeacherAction]] = {}
    for row in report.actions:
        by_teacher.setdefault(row.teacher, {})[row.state_id] = row
    ids = [state["state_id"] for state in states]
    return [
        _seen(teacher, [by_teacher.get(teacher.name, {}).get(i) for i in ids], prices[teacher.name])
        for teacher in teachers
    ]


def _tiny(options: AskingOptions) -> AskingOptions:
    return {
        **options,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "window": "full",
        "gates": (),
    }


def _states() -> list[TraceState]:
    """Make three questions of one session: without tools, with tools, and one that goes on."""
    name = f"probe-{uuid.uuid4().hex[:12]}"
    first: list[Message] = [
        {"role": "system", "content": _RULES},
        {"role": "user", "content": f"Say ok. ({name})"},
    ]
    more: list[Message] = [
        *first,
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Say ok again."},
    ]
    student: Message = {"role": "assistant", "content": "ok"}
    return [
        {
            "state_id": f"{name}-{n}", "session_id": name, "messages": messages,
            "student_action": student, "tools": tools,
        }
        for n, (messages, tools) in enumerate([(first, []), (first, [_TOOL]), (more, [_TOOL])])
    ]  # fmt: skip


def _seen(teacher: TeacherSpec, rows: list[TeacherAction | None], price: Price) -> Probe:
    cost = sum(row.cost_usd for row in rows if row)
    answers = [row for row in rows if row is not None and row.finish_reason is not None]
    if len(answers) < len(rows):
        failed = next((row for row in rows if row is not None and row.error_message), None)
        reason = failed.error_message if failed else "it was not asked: the ceiling was reached"
        return Probe(teacher=teacher.name, cost_usd=cost, problem=reason)
    plain, tooled, second = answers
    if plain.n_prompt_tokens is None or tooled.n_prompt_tokens is None:
        problem = "it reports no usage: its cost is booked at the bound, and nothing can be learned"
        return Probe(teacher=teacher.name, cost_usd=cost, has_usage=False, problem=problem)
    n_tools = tooled.n_prompt_tokens - plain.n_prompt_tokens
    has_tools = n_tools >= len(str(_TOOL)) // _LEAST_BYTES_A_TOKEN
    return Probe(
        teacher=teacher.name,
        cost_usd=cost,
        has_tools=has_tools,
        has_usage=True,
        is_cached=None if second.n_cached_tokens is None else second.n_cached_tokens > 0,
        is_price_right=_is_price_right(answers, price),
        problem=None
        if has_tools
        else f"{n_tools} tokens of tools reach the model: its chat template drops them, so it can "
        "only answer in words; serve it with a template that knows tools",
    )


def _is_price_right(rows: Sequence[TeacherAction], price: Price) -> bool:
    """Return whether the bill lies between all prompts read from the cache and all written to it."""
    n_prompt = sum(row.n_prompt_tokens or 0 for row in rows)
    n_cached = sum(row.n_cached_tokens or 0 for row in rows)
    n_completion = sum(row.n_completion_tokens or 0 for row in rows)
    cost = sum(row.cost_usd for row in rows)
    least = usd(price.cost_nano(n_prompt, n_completion, n_cached_tokens=n_cached))
    most = usd(
        price.cost_nano(
            n_prompt, n_completion, n_cached_tokens=n_cached, n_written_tokens=n_prompt - n_cached
        )
    )
    return least * (1 - _CREDIBLE) - 1e-8 <= cost <= max(least, most) * (1 + _CREDIBLE) + 1e-8
