"""A state and its results as plain text."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches, unified_diff
from typing import Any

from replay_pipeline.actions import Action, agreement_level, canonical_action
from replay_pipeline.actions.native import NativeForm
from replay_pipeline.errors import ConfigError
from replay_pipeline.pages.pairs import read_trials
from replay_pipeline.pages.sides import native_sides, over_lines, shown_prefix
from replay_pipeline.types import DPOPair, TeacherAction, TraceState

_RULE = "─" * 72


def show_state(
    state_id: str,
    *,
    pairs: Iterable[DPOPair] = (),
    outcomes: Iterable[Mapping[str, Any]] = (),
    teacher_actions: Iterable[TeacherAction] = (),
    states: Iterable[TraceState] = (),
    max_prefix_chars: int = 2_000,
) -> str:
    """Describe one state: its prefix, every answer, the outcome, and the pair.

    Args:
        state_id: The state's id, or the beginning of it if only one state matches.
        pairs: Pairs to look in.
        outcomes: Rows of the table `outcomes`.
        teacher_actions: Answers to list.
        states: States to look in. If the state isn't there, answers are shown unchanged.
        max_prefix_chars: The most characters of the prefix to show.

    Raises:
        ConfigError: no state, or more than one, has this id.
    """
    pairs, outcomes, rows = list(pairs), list(outcomes), list(teacher_actions)
    known = {s["state_id"]: s for s in states}
    state_id = _resolved(
        state_id,
        [*known, *(p["state_id"] for p in pairs), *(str(o["state_id"]) for o in outcomes)],
    )
    state = known.get(state_id)
    own_pairs = [pair for pair in pairs if pair["state_id"] == state_id]
    lines = [f"state {state_id}"]
    outcome = next((o for o in outcomes if o["state_id"] == state_id), None)
    if outcome is not None:
        lines.append(_outcome_line(outcome))
    messages = state["messages"] if state else []
    if not state and own_pairs:
        messages = own_pairs[0].get("state_messages", [])
    for message in shown_prefix(messages, max_chars=max_prefix_chars):
        lines += ["", f"[{message['role']}]", message["text"]]
    trials = read_trials((outcome or {}).get("trials_json"))
    if state is not None:
        student = canonical_action(state["student_action"], cwd=state.get("cwd"))
        lines += [_RULE, f"student ({state.get('student_model') or 'unknown model'})"]
        form = NativeForm(messages, state.get("tools"), state.get("cwd"))
        lines += [*_action_lines(form, student), *_trial_lines(trials.get(student.render()))]
        for note in ("outcome", "hint"):
            if state.get(note):
                lines.append(f"  {note}: {state[note]}")
        answers = [row for row in rows if row.state_id == state_id]
        lines += _answer_lines(answers, state, student, trials, form)
    for pair in own_pairs:
        lines += [_RULE, *_pair_lines(pair)]
    return "\n".join(lines) + "\n"


def _resolved(wanted: str, known: Sequence[str]) -> str:
    ids = dict.fromkeys(known)
    if wanted in ids:
        return wanted
    starting = [one for one in ids if wanted and one.startswith(wanted)]
    if len(starting) == 1:
        return starting[0]
    if starting:
        raise ConfigError(
            f"several states begin with {wanted!r}: {', '.join(starting[:5])}; give more characters"
        )
    near = get_close_matches(wanted, list(ids), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"no state {wanted!r} in this data{hint}")


def _outcome_line(outcome: Mapping[str, Any]) -> str:
    parts = [f"{outcome['outcome']}"]
    if outcome.get("level"):
        parts.append(f"level {outcome['level']}")
    if outcome.get("n_asked") is not None:
        agreeing, valid, asked = (outcome.get(k) for k in ("n_agreeing", "n_valid", "n_asked"))
        parts.append(f"{agreeing} agree of {valid} valid, {asked} asked")
    if outcome.get("is_tie"):
        parts.append("a tie")
    if outcome.get("near_level"):
        parts.append(f"would agree at level {outcome['near_level']}")
    return " · ".join(parts)


def _answer_lines(
    rows: list[TeacherAction],
    state: TraceState,
    student: Action,
    trials: Mapping[str, Mapping[str, str]],
    form: NativeForm,
) -> list[str]:
    lines: list[str] = []
    for row in sorted(rows, key=lambda row: row.teacher):
        head = f"{row.teacher} ({row.model or 'unknown model'}, ${row.cost_usd:.4f})"
        if row.action is None:
            lines += ["", f"{head}: failed, {row.error_code}: {row.error_message}"]
            continue
        action = canonical_action(row.action, cwd=state.get("cwd"), tools=state.get("tools"))
        if action.is_valid:
            found = agreement_level(action, student)
            note = f"same as the student at level {found}" if found else "not the student's action"
        else:
            note = f"invalid, {action.invalid_reason}"
        lines += ["", f"{head}: {note}", *_action_lines(form, action)]
        lines += _trial_lines(trials.get(action.render()))
    return lines


def _trial_lines(trial: Mapping[str, str] | None) -> list[str]:
    """Return what became of an action: the diff of the files, else what its tool answered."""
    if trial is None:
        return []
    shown = trial.get("diff") or trial.get("answer", "")
    return [f"  tried: {trial['result']}", *(f"    {line}" for line in shown.split("\n") if line)]


def _action_lines(form: NativeForm, action: Action) -> list[str]:
    return [f"  {line}" for line in over_lines(form.message(action)).split("\n")]


def _pair_lines(pair: DPOPair) -> list[str]:
    facts = [f"pair from {pair.get('source', 'consensus')}"]
    if teachers := pair.get("teachers_agreeing"):
        facts.append(f"chosen by {', '.join(teachers)}")
    if (p_better := pair.get("p_better")) is not None:
        facts.append(f"right with probability {p_better:.2f}")
    if (is_right := pair.get("is_checked_right")) is not None:
        facts.append("checked: right" if is_right else "checked: wrong")
    trials = {side: pair.get(f"{side}_trial") for side in ("chosen", "rejected")}
    facts += [f"{side}, tried: {trial}" for side, trial in trials.items() if trial]
    rejected, chosen = native_sides(pair)
    left = over_lines(rejected, pair["rejected"]).split("\n")
    right = over_lines(chosen, pair["chosen"]).split("\n")
    diff = unified_diff(left, right, "rejected", "chosen", n=99, lineterm="")
    return [" · ".join(facts), *diff]
