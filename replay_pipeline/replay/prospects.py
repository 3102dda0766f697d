"""How many right pairs a replay should bring: assumed at first, then from the answers that are there."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replay_pipeline.families import family_of_model
from replay_pipeline.reliability import AGENT, Ballot, BallotBox, fit
from replay_pipeline.reliability.ballots import kind_of_state
from replay_pipeline.reliability.worth import MOST_PLANNED, Rule, Worth
from replay_pipeline.replay.asking import Asking
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState

_ASSUMED = (0.05, 0.75)
"""Right pairs per state that everybody is asked at, before anything is known: teachers as strong as the
agent bring the one, far stronger ones the other."""
_MIN_STATES = 20
_SPREAD = 0.15
"""By which share of itself an estimate may be off beside chance: states need not be alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect:
    """Right pairs per state that everybody is asked at, as an interval."""

    low: float = _ASSUMED[0]
    high: float = _ASSUMED[1]
    n_states: int = 0
    """States whose answers it rests on; 0: it is assumed."""
    words: tuple[str, ...] = ()
    """Whether these teachers can teach this agent."""


def prospect(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    rows: Mapping[int, Sequence[TeacherAction]],
    asking: Asking,
) -> Prospect:
    """Return how many right pairs a state should bring.

    Accuracies by kind of decision come from the answers there are; the kinds are counted over all
    states, so that it does not matter which of them were asked.

    Args:
        states: all of them.
        teachers: those that would be asked.
        rows: answers by number of their state.
        asking: how a run would ask.
    """
    gates = asking.gating()
    families = list(dict.fromkeys(teacher.vendor for teacher in teachers))[:MOST_PLANNED]
    box = BallotBox(families, level=asking.level)
    ballots: list[Ballot] = []
    kinds: Counter[str] = Counter()
    for number, state in enumerate(states):
        if family_of_model(state.get("student_model")) in families and len(families) < 2:
            continue
        kinds[kind_of_state(state)] += 1
        if not (answered := rows.get(number)):
            continue
        poll = gates.poll(state)
        for row in answered:
            poll.add(row)
        ballot = box.ballot(state, poll.student, poll.votes) if poll.votes else None
        if ballot is not None:
            ballots.append(ballot)
    if len(ballots) < _MIN_STATES:
        return Prospect()
    model = fit(ballots, (AGENT, *families))
    rule = Rule(asking.agreement_threshold, asking.min_p_better)
    worth = Worth(model, [1.0] * len(families), rule)
    n_all = kinds.total()
    share = sum(n / n_all * worth.right_pairs(model.kind(kind)) for kind, n in kinds.items())
    half = 2 * math.sqrt(share * (1 - share) / len(ballots)) + _SPREAD * share
    return Prospect(
        low=round(max(0.0, share - half), 4),
        high=round(min(1.0, share + half), 4),
        n_states=len(ballots),
        words=tuple(model.words()),
    )
