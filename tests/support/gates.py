"""What gates save and lose, on a complete set of answers: a run with enough money is played on them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replay_pipeline.replay import parse_gates
from replay_pipeline.replay.buy.buying import Buyer, Market
from replay_pipeline.replay.buy.places import place_of
from replay_pipeline.replay.buy.policy import Policy, Poll
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState

_Answers = Mapping[tuple[int, int], TeacherAction]
"""By number of state and teacher."""


def numbered(
    states: Sequence[TraceState], teachers: Sequence[TeacherSpec], actions: Iterable[TeacherAction]
) -> dict[tuple[int, int], TeacherAction]:
    """Return answers by the indexes of their state and teacher."""
    by_name = {(action.state_id, action.teacher): action for action in actions}
    return {
        (i, j): answer
        for i, state in enumerate(states)
        for j, teacher in enumerate(teachers)
        if (answer := by_name.get((state["state_id"], teacher.name))) is not None
    }


def bought(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    answers: _Answers,
    policy: Policy,
    *,
    max_total_usd: float | None = None,
) -> dict[tuple[int, int], float]:
    """Return the recorded answers that a policy would have bought, each with its propensity.

    Args:
        states: the states that were replayed.
        teachers: the teachers that were asked.
        answers: their answers, with the cost of each.
        policy: the rules for buying.
        max_total_usd: the ceiling. Without one, the money is unlimited.
    """
    costs: dict[int, list[float]] = defaultdict(list)
    for (_, teacher), answer in answers.items():
        costs[teacher].append(answer.cost_usd)
    mean = {teacher: sum(each) / len(each) for teacher, each in costs.items()}
    market = Market(
        places=[place_of(state, i) for i, state in enumerate(states)],
        teachers=teachers,
        cost_usd=lambda _, teacher, is_warm: mean[teacher],
        bound_usd=lambda state, teacher: answers[state, teacher].cost_usd,
        open_poll=lambda state: policy.poll(states[state]),
        is_open=lambda state, teacher: (state, teacher) in answers,
    )
    buyer = Buyer(market, policy)
    left = max_total_usd
    if left is None:
        left = 1.0 + 4 * sum(answer.cost_usd for answer in answers.values())
    found: dict[tuple[int, int], float] = {}
    polls: dict[int, Poll] = {}
    while choices := buyer.next_round(left):
        paid: dict[int, dict[int, float]] = defaultdict(dict)
        for choice in choices:
            answer = answers[choice.state, choice.teacher]
            found[choice.state, choice.teacher] = choice.propensity
            if choice.state not in polls:
                polls[choice.state] = market.open_poll(choice.state)
            polls[choice.state].add(answer)
            paid[choice.state][choice.teacher] = answer.cost_usd
            left -= answer.cost_usd
        for number, usd in sorted(paid.items()):
            buyer.file(number, polls[number], usd)
    return found


@dataclass(frozen=True)
class Measured:
    n_calls_saved: int
    saved_usd: float
    n_explored: int
    n_pairs: int
    """From asking every teacher."""
    n_pairs_lost: int


def measured(states, teachers, actions, gates, *, threshold=2):
    """Play gates on recorded answers, and compare with asking everybody."""
    answers = numbered(states, teachers, actions)
    policy = parse_gates(gates, threshold=threshold)
    chosen = bought(states, teachers, answers, policy)
    n_pairs = n_lost = 0
    for i, state in enumerate(states):
        full, seen = policy.poll(state), policy.poll(state)
        for j in range(len(teachers)):
            if (i, j) in answers:
                full.add(answers[i, j])
                if (i, j) in chosen:
                    seen.add(answers[i, j])
        n_pairs += full.makes_pair()
        n_lost += full.makes_pair() and not seen.makes_pair()
    saved = [answer for key, answer in answers.items() if key not in chosen]
    return Measured(
        len(saved),
        round(sum(answer.cost_usd for answer in saved), 9),
        sum(propensity < 1 for propensity in chosen.values()),
        n_pairs,
        n_lost,
    )
