"""Pairs that a session holds without any teacher: branches given up, actions the user rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replay_pipeline.actions import Action, agreement_level, agrees_at, canonical_action
from replay_pipeline.types import AgreementLevel, TraceState

_ABANDONED = ("rewound", "retracted")
_MAX_STEPS_TO_ACCEPTED = 3
_CHANGING = frozenset({"Edit", "MultiEdit", "Write", "NotebookEdit"})


@dataclass(frozen=True, slots=True)
class NaturalPair:
    """A state's preference found in the record itself."""

    state: TraceState
    chosen: Action
    rejected: Action
    level: AgreementLevel | None
    """How close the two sides are."""
    source: str


def natural_pairs(states: Sequence[TraceState], level: AgreementLevel) -> Iterator[NaturalPair]:
    """Pairs from rewinds and rejections; each fact gives one pair, however often it is recorded.

    A rewind: of two actions at the same prefix the abandoned one is rejected. A rejection: the
    user refused an action, and soon after another attempt with the same tool went through: a
    change of a file or an action on the same object within three steps, anything else at once.

    Args:
        states: In any order; steps of a session are put in order by `turn_idx`.
        level: Actions that agree at this level or stricter make no pair.
    """
    seen: set[tuple[str, int, str, str]] = set()
    sessions: dict[str, list[TraceState]] = {}
    for state in states:
        if (session := state.get("session_id")) is not None:
            sessions.setdefault(session, []).append(state)
        for chosen, rejected in _rewinds(state):
            if (pair := _pair(state, chosen, rejected, level, "rewind")) is None:
                continue
            fact = (
                state.get("session_id") or "",
                len(state["messages"]),
                pair.chosen.render(),
                pair.rejected.render(),
            )
            if fact not in seen:
                seen.add(fact)
                yield pair
    for steps in sessions.values():
        yield from _rejections(steps, level)


def _rewinds(state: TraceState) -> Iterator[tuple[Action, Action]]:
    alternatives = state.get("alternatives") or []
    if not alternatives:
        return
    cwd, tools = state.get("cwd"), state.get("tools")
    recorded = canonical_action(state["student_action"], cwd=cwd, tools=tools)
    others = [canonical_action(message, cwd=cwd, tools=tools) for message in alternatives]
    if state.get("outcome") in _ABANDONED:
        yield others[-1], recorded
    else:
        yield from ((recorded, other) for other in others)


def _rejections(steps: list[TraceState], level: AgreementLevel) -> Iterator[NaturalPair]:
    steps = sorted(steps, key=lambda state: state.get("turn_idx", 0))
    for place, state in enumerate(steps):
        if state.get("outcome") != "user_rejected":
            continue
        rejected = canonical_action(
            state["student_action"], cwd=state.get("cwd"), tools=state.get("tools")
        )
        others = [later for later in steps[place + 1 :] if later.get("outcome") != "user_rejected"]
        for number, later in enumerate(others[:_MAX_STEPS_TO_ACCEPTED]):
            accepted = canonical_action(
                later["student_action"], cwd=later.get("cwd"), tools=later.get("tools")
            )
            if later.get("outcome") != "ok" or not _is_redone(
                accepted, rejected, at_once=not number
            ):
                continue
            if (pair := _pair(state, accepted, rejected, level, "rejection")) is not None:
                yield pair
            break


def _is_redone(accepted: Action, rejected: Action, *, at_once: bool) -> bool:
    """Whether `accepted` is another attempt at what `rejected` was meant to do."""
    found = agreement_level(accepted, rejected)
    if not accepted.calls or found is None:
        return False
    return at_once or agrees_at("target", found) or set(accepted.tools) <= _CHANGING


def _pair(
    state: TraceState, chosen: Action, rejected: Action, level: AgreementLevel, source: str
) -> NaturalPair | None:
    if not (chosen.is_valid and rejected.is_valid):
        return None
    found = agreement_level(chosen, rejected)
    return None if agrees_at(level, found) else NaturalPair(state, chosen, rejected, found, source)
