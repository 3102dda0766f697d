"""The one rule for whether the answers at a state make a pair.

Extraction asks it first, and a replay stops asking by it. So what is bought is what is used.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from replay_pipeline.actions import LEVELS, Action
from replay_pipeline.actions.votes import Lead, Panel, Vote
from replay_pipeline.types import AgreementLevel

Pattern = tuple[int, ...]
"""The group of each rater, the agent first. Raters with the same action share a number, counted in
order of appearance. A rater that wasn't asked, or gave no valid action, has -1."""

Decision = Literal["too_few_answers", "no_consensus", "agreement", "contested", "pair"]


@dataclass(frozen=True, slots=True)
class Standing:
    """How many families of models stand where at one state."""

    n_voting: int
    """Families with a valid answer and a vote."""
    n_leading: int
    """Of these, families in the largest group."""
    n_next: int
    """Of these, families in the next largest group, outside of it."""
    n_for: int
    """Families for the action of the largest group. The agent's own family, which makes no
    consensus, counts here."""
    n_against: int
    """Families for the agent's action, with or without a vote, and the agent itself."""
    is_agents: bool
    """Whether the largest group does what the agent did."""

    @property
    def margin(self) -> int:
        """Return votes of the largest group minus those of the strongest other side."""
        return self.n_for - max(self.n_next, self.n_against)

    def is_tie(self, threshold: int) -> bool:
        """Return whether two separate groups have the same size and enough families."""
        return self.n_next == self.n_leading >= threshold


def rule(at: Standing, threshold: int) -> Decision:
    """Return what the votes at a state make, if a consensus needs `threshold` families."""
    if at.n_voting < threshold:
        return "too_few_answers"
    if at.n_leading < threshold or at.is_tie(threshold):
        return "no_consensus"
    if at.is_agents:
        return "agreement"
    # Alone against them the agent is what a pair is about; with others it is a dispute.
    return "contested" if at.n_against > 1 and at.margin <= 0 else "pair"


def standing_of_votes(
    lead: Lead | None,
    voting: Iterable[Vote],
    others: Iterable[Vote],
    *,
    is_agents: Callable[[Action], bool],
    is_same: Callable[[Action, Action], bool],
) -> Standing:
    """Count the families at a state.

    Args:
        lead: the largest group of the votes, if there are any.
        voting: valid answers with a vote.
        others: valid answers of the agent's own family, if it has no vote.
        is_agents: whether an action is the same as the agent's.
        is_same: whether two actions are the same.
    """
    voting, others = list(voting), list(others)
    against = {vote.family for vote in (*voting, *others) if is_agents(vote.action)}
    if lead is None:
        return Standing(0, 0, 0, 0, 1 + len(against), is_agents=False)
    leading = lead.consensus
    agreeing = {vote.family for vote in others if is_same(vote.action, leading.action)}
    return Standing(
        n_voting=len({vote.family for vote in voting}),
        n_leading=leading.n_families,
        n_next=lead.n_next,
        n_for=len(agreeing | {vote.family for vote in leading.votes}),
        n_against=1 + len(against),
        # To agree with any one of the group is doubt enough to make no pair.
        is_agents=any(is_agents(vote.action) for vote in leading.votes),
    )


def standing_of_pattern(pattern: Pattern, without_vote: Iterable[int] = ()) -> tuple[int, Standing]:
    """Return the largest group of a pattern, and count the families at it.

    Args:
        pattern: the groups of the agent and of the families.
        without_vote: places of raters of the agent's own family, if it has no vote.
    """
    places = [place for place, number in enumerate(pattern) if place and number >= 0]
    votes = Counter(pattern[place] for place in places if place not in set(without_vote))
    everyone = Counter(pattern[place] for place in places)
    group = min(votes, key=lambda number: (-votes[number], number), default=0)
    return group, Standing(
        n_voting=votes.total(),
        n_leading=votes[group],
        n_next=max((n for number, n in votes.items() if number != group), default=0),
        n_for=everyone[group],
        n_against=1 + everyone[0],
        is_agents=group == 0,
    )


def nearest_level(panel: Panel, level: AgreementLevel, threshold: int) -> AgreementLevel | None:
    """Return the next looser level at which a panel has a consensus, or None."""
    for looser in LEVELS[LEVELS.index(level) + 1 :]:
        lead = panel.lead(looser)
        if (
            lead
            and lead.consensus.n_families >= threshold
            and lead.n_next < lead.consensus.n_families
        ):
            return looser
    return None
