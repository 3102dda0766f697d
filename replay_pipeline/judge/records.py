"""Build the records of pairs and positives."""

from typing import Any

from replay_pipeline.actions import Action
from replay_pipeline.actions.votes import Consensus
from replay_pipeline.judge.answers import Answers, Side
from replay_pipeline.judge.natural import NaturalPair
from replay_pipeline.storage.pair_rows import pair_id_of
from replay_pipeline.types import REHEARSAL, DPOPair, TraceState


def consensus_pair(
    state: TraceState,
    side: Side,
    answers: Answers,
    consensus: Consensus,
    **facts: Any,
) -> DPOPair:
    """Return the pair of the consensus and the agent's action, with `facts` added."""
    pair: dict[str, Any] = {
        **_shared(state),
        **_sides(state, consensus.action, side.action),
        "n_teachers_agreeing": consensus.n_families,
        "n_teachers_asked": answers.asked,
        "n_teachers_valid": len(answers.voting),
        "teachers_agreeing": _names(consensus),
        "agreement_level": consensus.level,
        "source": _source(consensus),
        "rejected_source": side.source,
        "shares_vendor": any(vote.family == side.family for vote in consensus.votes),
        "is_distillable": _is_distillable(consensus),
        "cost_usd": answers.cost_usd,
        **facts,
    }
    return _without_none(pair)


def natural_pair(found: NaturalPair) -> DPOPair:
    """Return the pair that the record itself makes."""
    pair: dict[str, Any] = {
        **_shared(found.state),
        **_sides(found.state, found.chosen, found.rejected),
        "n_teachers_agreeing": 0,
        "n_teachers_asked": 0,
        "n_teachers_valid": 0,
        "teachers_agreeing": [],
        "margin": 0,
        "source": found.source,
        "rejected_source": "recorded",
        "shares_vendor": False,
        "cost_usd": 0.0,
    }
    return _without_none(pair)


def positive_row(
    state: TraceState, side: Side, answers: Answers, consensus: Consensus
) -> dict[str, Any]:
    """Return the row of a state where the agent took the consensus action."""
    shared = _shared(state)
    del shared["hint"]
    return {
        **shared,
        "action": side.action.render(),
        "action_message": side.action.to_message(),
        "n_teachers_agreeing": consensus.n_families,
        "n_teachers_asked": answers.asked,
        "teachers_agreeing": _names(consensus),
        "agreement_level": consensus.level,
        "is_distillable": _is_distillable(consensus),
        "cost_usd": answers.cost_usd,
    }


def _shared(state: TraceState) -> dict[str, Any]:
    """Return what a pair or positive takes over from its state."""
    return {
        "state_id": state["state_id"],
        "session_id": state.get("session_id"),
        "conversation": state.get("conversation"),
        "cwd": state.get("cwd"),
        "state_messages": state["messages"],
        "tools": state.get("tools"),
        "hint": state.get("hint"),
        "outcome": state.get("outcome"),
        "student_model": state.get("student_model"),
    }


def _sides(state: TraceState, chosen: Action, rejected: Action) -> dict[str, Any]:
    """Return both sides as text and as messages, and the id of the pair that they make."""
    return {
        "pair_id": pair_id_of(state["state_id"], chosen.render(), rejected.render()),
        "chosen": chosen.render(),
        "rejected": rejected.render(),
        "chosen_action": chosen.to_message(),
        "rejected_action": rejected.to_message(),
    }


def _names(consensus: Consensus) -> list[str]:
    """Name the teachers that agree, those of a rehearsal as such: the mark goes with the row."""
    return [
        f"{REHEARSAL}:{row.teacher}"
        if row.is_rehearsal and not row.teacher.startswith(REHEARSAL)
        else row.teacher
        for row in (vote.row for vote in consensus.votes)
    ]


def _source(consensus: Consensus) -> str:
    """Return where a pair comes from; one made-up vote is enough to make all of it play."""
    return REHEARSAL if any(vote.row.is_rehearsal for vote in consensus.votes) else "consensus"


def _is_distillable(consensus: Consensus) -> bool | None:
    """Return whether every agreeing teacher allows training on its answers; `None` if not known."""
    known = [vote.row.is_distillable for vote in consensus.votes]
    if False in known:
        return False
    return None if None in known else True


def _without_none(pair: dict[str, Any]) -> Any:
    return {key: value for key, value in pair.items() if value is not None}
