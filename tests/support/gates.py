"""What gates save and lose, on a complete set of answers: a run with enough money is played on them."""

from dataclasses import dataclass

from replay_pipeline.replay import parse_gates
from replay_pipeline.replay.buy.measuring import bought, numbered


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
