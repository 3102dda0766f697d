"""How likely the two sides of a pair are right and wrong, as real models' answers have shown it.

Which of two actions is right was learned where it is known: from answers of models to questions with tools
that the questions' makers scored. Two logistic regressions of a few coefficients each (`belief.toml`) say
how likely the chosen side is right, and, if it is, how likely the rejected side is wrong. They look at the votes
and at what the sides differ in (`actions/difference.py`), never at a teacher's name: teachers that can be exchanged
get the same weights. What the session tells comes on top, by its likelihood ratio.

`python benchmarks/real_models.py ANSWERS QUESTIONS --learn` makes the file.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

import msgspec

from replay_pipeline.actions.difference import ActionDifference
from replay_pipeline.types import FAILURES, Outcome

LEAST_LESSON = 0.84
"""What is agreed on is a lesson if it is right with at least this probability: so nearly .94 of the lessons are right."""
SUREST = 0.95
"""No probability is above this or below one minus it without a check."""
VOTES = ("always", "unanimous", "three or more agree", "somebody sides with the agent")
"""What doesn't depend on the difference."""
_AGREEMENT = (0.75, 0.97, 0.9)
"""The least and the most agreement of an agent among those that were learned from, and a usual one. Less, as with
coding agents that have a choice of right actions, says nothing."""
_WRITTEN = ("text", "shorter", "longer", "adds", "omits", "list", "number", "value")
"""Facts that mean more where a value doesn't come from the prompt."""
_UNSCORED = frozenset({"looks", "coding", "words"})
"""Differences between actions whose like nobody has scored: what was learned of arguments of functions says nothing of
commands, edits, and texts."""
_UNSCORED_WRONG = 0.05
"""How likely an action that differs from a right one is wrong there. Of 103 that we read where nothing had failed, none
was; four models at the same prompts took the same first action in 4 of 462 comparisons, and solved as much."""
_FAILED = 100.0
"""How much more often a wrong action than a right one is refused by its tool, its shell, or the user: of 38 such
actions that we read, 33 were wrong."""
_SHELL_REFUSES = re.compile(
    r"^(?:exit code \d+\s+)?(?:\(eval\):(?:\w+:)?\d+: |(?:/\S*/)?(?:ba|z|da)?sh: |.*: command not found\s*$|usage: |\S+: (?:unknown|unrecognized|illegal|invalid) (?:flag|option|command))",
    re.IGNORECASE | re.MULTILINE,
)
"""A command that can't run as it is written. That it ends with an error says nothing: of 64 such commands of real
sessions, 59 were right, such as a test that fails as it should; all 3 that their shell refused were wrong."""


PairKind = Literal["pair", "lesson", "doubtful"]
"""A pair, an action to imitate that leaves open whether the agent was wrong, or nothing to learn from."""


class Belief(NamedTuple):
    """Probabilities of one pair."""

    chosen_right: float
    rejected_wrong: float
    """If the chosen side is right. So the product is the probability that the pair is right."""

    @property
    def better(self) -> float:
        """Return the probability that the chosen side is right and the rejected one wrong."""
        return self.chosen_right * self.rejected_wrong


class BeliefTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was learned. Each coefficient has its 95 % interval over agents left out."""

    date: str
    source: str
    n_pairs: int
    n_agents: int
    agreed_right: tuple[float, ...]
    """How often an action on which agent and teachers agree is right, by the number of families that differ."""
    alone_right: float
    """How often an action is right that nobody else took, where no two agree."""
    answer_right: tuple[float, float]
    """How often an answer is right that nobody confirmed: the only one, where it differs from the agent's action, and
    the agent's action where one teacher took it and others did not."""
    beside_wrong: float
    """How often the agent is right where the teachers agree on a wrong action."""
    chosen_right: dict[str, tuple[float, float, float]]
    chosen_right_by_votes: dict[str, tuple[float, float, float]]
    """For what nobody has scored, of which no difference was learned."""
    rejected_wrong: dict[str, tuple[float, float, float]]


TABLE = resources.files("replay_pipeline.judge") / "belief.toml"
"""The file of the coefficients; a test that must not know some models puts another one here."""


@cache
def learned() -> BeliefTable:
    """Read the coefficients."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=BeliefTable)


def features(
    differs: ActionDifference,
    *,
    n_for: int,
    n_voting: int,
    n_against: int = 1,
    agreement: float | None = None,
) -> dict[str, float]:
    """Return what holds of a pair, by the names of the coefficients.

    Args:
        differs: what the sides differ in.
        n_for: families for the chosen side.
        n_voting: families with a valid answer.
        n_against: families for the rejected side, and the agent.
        agreement: where teachers agree, how often the agent does as they do. None if unknown.
    """
    held = (True, n_for == n_voting, n_for > 2, n_against > 1)
    names = [name for name, is_so in zip(VOTES, held, strict=True) if is_so]
    names += differs.names()
    for grounds in ("made_up", "makes_up"):
        if grounds in differs.facts:
            names += [f"{fact} {grounds}" for fact in _WRITTEN if fact in differs.facts]
    if len(differs.facts) > 1:
        names.append("several differences")
    if differs.n_calls > 1:
        names.append("several calls")
    found = dict.fromkeys(names, 1.0)
    if agreement is not None and agreement >= _AGREEMENT[0]:
        found["agreement"] = _logit(min(agreement, _AGREEMENT[1])) - _logit(_AGREEMENT[2])
    return found


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def belief(held: Mapping[str, float], evidence: float = 1.0) -> Belief:
    """Return how likely the sides of a pair are right and wrong.

    Args:
        held: what holds of it, from `features`.
        evidence: how much more likely what the session tells is if the rejected side is wrong.
    """
    model = learned()
    is_scored = not held.keys() & _UNSCORED
    # Where one side ends the turn, votes are all that was learned too.
    by_what = is_scored and "turn" not in held
    right = _probability(model.chosen_right if by_what else model.chosen_right_by_votes, held)
    wrong = _probability(model.rejected_wrong, held) if is_scored else _UNSCORED_WRONG
    odds = wrong / (1 - wrong) * evidence
    return Belief(bounded(right), bounded(odds / (1 + odds)))


def kind_of(chosen_right: float, better: float, min_p_better: float) -> PairKind:
    """Return what an agreement against the agent makes.

    Args:
        chosen_right: how likely the chosen side is right.
        better: how likely it is right and the rejected side wrong.
        min_p_better: the least `better` of a pair.
    """
    if better >= min_p_better:
        return "pair"
    return "lesson" if chosen_right >= LEAST_LESSON else "doubtful"


def evidence_of(outcome: Outcome | None, tools: tuple[str, ...], hint: str | None = None) -> float:
    """Return how much likelier a wrong action is to end like this than a right one.

    Args:
        outcome: what became of the recorded action.
        tools: the tools that it called.
        hint: the text of its error.
    """
    if outcome not in FAILURES:
        return 1.0
    is_command = "Bash" in tools and outcome == "tool_error"
    return 1.0 if is_command and not _SHELL_REFUSES.search(hint or "") else _FAILED


def right_if_agreed(n_differing: int) -> float:
    """Return how likely an action is right that agent and teachers agree on, where so many families differ."""
    shares = learned().agreed_right
    return bounded(shares[min(n_differing, len(shares) - 1)])


def right_if_unconfirmed(n_differing: int, *, is_agents: bool) -> float:
    """Return how likely an action is right that one family stands for and that is no consensus.

    Args:
        n_differing: families with other valid answers.
        is_agents: whether it is the agent's own action.
    """
    if is_agents and not n_differing:
        return right_if_agreed(0)
    return bounded(learned().answer_right[is_agents])


_SEEN_WRONG = 2 / 3
"""How often several others agree on another action where agent and one family took a wrong one. Assumed."""
_OUTVOTED = (0.04, 10.0)
"""How often others outvote such a confirmation, and the states that this counts for: models of different makers."""


def right_if_confirmed(n_explored: int, n_outvoted: int) -> float:
    """Return how likely an action of the agent is right that one family alone confirmed.

    A family that copies the agent confirms little. States at which everybody was asked by chance
    show that.

    Args:
        n_explored: states drawn by chance at which this family took the agent's action.
        n_outvoted: of these, states at which several others agree on another action.
    """
    usual, strength = _OUTVOTED
    share = (n_outvoted + usual * strength) / (n_explored + strength)
    right = right_if_agreed(0)
    return bounded(right * (1 - max(0.0, share - usual) / _SEEN_WRONG))


def bounded(p: float) -> float:
    """Return a probability that nobody has checked."""
    return min(SUREST, max(1 - SUREST, p))


def _probability(
    coefficients: Mapping[str, tuple[float, float, float]], held: Mapping[str, float]
) -> float:
    logit = math.fsum(coefficients[n][0] * x for n, x in held.items() if n in coefficients)
    return 1 / (1 + math.exp(-logit))
