"""The records of an extraction: rows of outcomes, pairs and positives, and their tables."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pyarrow as pa

from replay_pipeline.actions import Action, canonical_action
from replay_pipeline.actions.difference import ActionDifference
from replay_pipeline.actions.votes import Consensus
from replay_pipeline.judge.answers import Case
from replay_pipeline.judge.judgment import Judgment
from replay_pipeline.judge.natural import NaturalPair
from replay_pipeline.judge.vain import looked_in_vain
from replay_pipeline.storage.pair_rows import json_or_none, pair_id_of, row_of_pair
from replay_pipeline.storage.tables import table_of
from replay_pipeline.types import REHEARSAL, DPOPair, Look, TeacherAction, TraceState, Trial


def outcome_row(judgment: Judgment) -> dict[str, Any]:
    """Return the row of a judged state in the table `outcomes`."""
    case, at, consensus = judgment.case, judgment.standing, judgment.consensus
    is_against = consensus is not None and judgment.outcome != "agreement"
    row: dict[str, Any] = {
        "state_id": case.state["state_id"],
        "session_id": case.state.get("session_id"),
        "outcome": judgment.outcome,
        "level": consensus.level if consensus else None,
        "student_level": judgment.student_level,
        "near_level": judgment.near_level,
        "n_asked": len(case.asked),
        "n_valid": len(case.voting),
        "n_failed": len(case.failed),
        "n_invalid": len(case.invalid),
        "n_own_family": sum(vote.family == case.family for vote in case.valid),
        "n_agreeing": at.n_leading,
        "n_against": at.n_against if is_against else None,
        "margin": at.margin if is_against else at.n_leading - at.n_next,
        "is_tie": judgment.is_tie,
        "invalid_reason": case.agent.invalid_reason,
        "why": judgment.why,
        "looked_in_vain": looked_in_vain(case.state) or None,
    }
    if case.trials:
        row["trials"] = {action: _told(trial) for action, trial in case.trials.items()}
    return row


def consensus_pair(
    judgment: Judgment,
    consensus: Consensus,
    differs: ActionDifference,
    is_same: Callable[[Action, Action], bool],
) -> DPOPair:
    """Return the pair of the consensus and the agent's action."""
    case = judgment.case
    actions = {vote.action for vote in consensus.votes}
    evidence = _evidence(case, consensus.action)
    if not all(is_same(*two) for two in combinations(actions, 2)):
        # No rule says that the votes are the same, but what they did when they were tried.
        evidence.append("execution")
    trials = {
        "chosen_trial": case.trial(consensus.action),
        "rejected_trial": case.trial(case.agent),
    }
    pair: dict[str, Any] = {
        **_shared(case.state),
        **_sides(case.state, consensus.action, case.agent),
        "n_teachers_agreeing": consensus.n_families,
        "n_teachers_asked": len(case.asked),
        "n_teachers_valid": len(case.voting),
        "n_looks": min(len(vote.row.looks) for vote in consensus.votes) or None,
        "teachers_agreeing": _names(consensus),
        "agreement_level": consensus.level,
        "source": _source(consensus),
        "rejected_source": "recorded",
        "shares_vendor": any(vote.family == case.family for vote in consensus.votes),
        "is_distillable": _is_distillable(consensus),
        "cost_usd": case.cost_usd,
        "n_against": judgment.standing.n_against,
        "margin": judgment.standing.margin,
        "control_mismatch": case.has_control_left,
        **{name: trial.in_words() for name, trial in trials.items() if trial is not None},
        "evidence": evidence or None,
        "difference": differs.names(),
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
    case: Case,
    consensus: Consensus,
    action: Action,
    kind: str,
    p_chosen_right: float,
    looks: Sequence[Look] = (),
) -> dict[str, Any]:
    """Return the row of a positive: a state, looks that the action needs, and the action that teachers chose."""
    shared = _shared(case.state)
    del shared["hint"]
    return {
        **shared,
        "action": action.render(),
        "action_message": action.to_message(),
        "kind": kind,
        "p_chosen_right": p_chosen_right,
        "n_teachers_agreeing": consensus.n_families,
        "n_teachers_asked": len(case.asked),
        **_looked(looks),
        "teachers_agreeing": _names(consensus),
        "agreement_level": consensus.level,
        "is_distillable": _is_distillable(consensus),
        "cost_usd": case.cost_usd,
    }


def continuation_rows(
    states: Iterable[TraceState], steps: Iterable[TeacherAction]
) -> list[dict[str, Any]]:
    """Return the rows of teachers' steps behind their votes: what to imitate, judged by nobody."""
    by_state: dict[str, list[TeacherAction]] = defaultdict(list)
    for step in steps:
        by_state[step.state_id].append(step)
    rows = []
    for state in states if by_state else ():
        for step in by_state.get(state["state_id"], ()):
            action = canonical_action(
                step.action or {}, cwd=state.get("cwd"), tools=state.get("tools") or None
            )
            if not (action.is_valid and all(look.is_known for look in step.looks)):
                continue
            row = {
                **_shared(state),
                "action": action.render(),
                "action_message": action.to_message(),
                "kind": "continuation",
                "n_teachers_agreeing": 1,
                "n_teachers_asked": 1,
                **_looked(step.looks),
                "teachers_agreeing": [_name(step)],
                "is_distillable": step.is_distillable,
                "cost_usd": step.cost_usd,
            }
            del row["hint"]
            rows.append(row)
    return rows


def _looked(looks: Sequence[Look]) -> dict[str, Any]:
    if not looks:
        return {}
    added = [message for look in looks for message in look.messages()]
    return {"n_looks": len(looks), "looks_json": json_or_none(added)}


def pairs_table(pairs: Iterable[DPOPair], name: str = "dpo_pairs") -> pa.Table:
    """Return pairs as the table `dpo_pairs`, or one like it. `pairs_of` reads them back."""
    return table_of([row_of_pair(pair) for pair in pairs], name)


def positives_table(positives: Iterable[Mapping[str, Any]], name: str = "positives") -> pa.Table:
    """Return the states at which teachers and student agree as the table `positives`, or one like it."""
    return table_of([row_of_pair(positive) for positive in positives], name)


def outcomes_table(outcomes: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return one row per state as the table `outcomes`."""
    rows = [{**each, "trials_json": json_or_none(each.get("trials"))} for each in outcomes]
    return table_of(rows, "outcomes")


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
    return [_name(vote.row) for vote in consensus.votes]


def _name(row: TeacherAction) -> str:
    is_marked = row.teacher.startswith(REHEARSAL)
    return f"{REHEARSAL}:{row.teacher}" if row.is_rehearsal and not is_marked else row.teacher


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


def _evidence(case: Case, chosen: Action) -> list[str]:
    """Return what was tried that speaks for the chosen side."""
    better, worse = case.trial(chosen), case.trial(case.agent)
    is_fixed = better is not None and better.check == "fixed"
    return ["check"] if is_fixed and worse is not None and worse.check != "fixed" else []


def _told(trial: Trial) -> dict[str, str]:
    told = {"result": trial.in_words(), "answer": trial.answer, "diff": trial.diff}
    return {name: text for name, text in told.items() if text}
