"""From votes to a consensus: the largest group of actions that agree pairwise.

Agreement below `exact` is not transitive (two reads may each overlap a third one and not each
other), so a group is a clique, and the grouping does not depend on the order of the votes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from replay_pipeline.actions import LEVELS, Action, TextComparator, agreement_level
from replay_pipeline.actions.agreement import strictness
from replay_pipeline.types import AgreementLevel, TeacherAction

_MAX_ACTIONS = 24
"""Distinct actions of one state that are grouped; of more, those with the fewest votes are left
out, so that the search for groups stays short."""


@dataclass(frozen=True, slots=True)
class Vote:
    """A valid answer of a teacher."""

    family: str
    row: TeacherAction
    action: Action


@dataclass(frozen=True, slots=True)
class Consensus:
    """What a group of votes agrees on."""

    action: Action
    """The medoid: the action of the group that agrees most strictly with the others."""
    votes: tuple[Vote, ...]
    """Sorted by teacher."""
    n_families: int
    level: AgreementLevel
    """The weakest agreement between two of the group."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a vote."""

    winner: Consensus | None
    n_leading: int
    """Families in the largest group."""
    margin: int
    """Families in the largest group minus those in the next one."""
    is_tie: bool
    """Two separate groups are equally large and large enough."""


class Panel:
    """The votes on one state, compared with each other once."""

    def __init__(self, votes: Sequence[Vote], same_text: TextComparator | None = None) -> None:
        by_action: dict[Action, list[Vote]] = {}
        for vote in votes:
            by_action.setdefault(vote.action, []).append(vote)
        self._by_action = by_action
        self._same_text = same_text

    @cached_property
    def actions(self) -> list[Action]:
        """Distinct actions in an order that does not depend on the order of the votes."""
        if len(self._by_action) == 1:
            return list(self._by_action)
        found = sorted(self._by_action, key=lambda a: (-len(self._by_action[a]), _spelling(a)))
        return found[:_MAX_ACTIONS]

    @cached_property
    def _families(self) -> list[frozenset[str]]:
        """Families that gave each of `actions`."""
        return [frozenset(vote.family for vote in self._by_action[a]) for a in self.actions]

    @cached_property
    def _levels(self) -> list[list[int]]:
        """Strictness of the agreement between each two of `actions`."""
        n = len(self.actions)
        table = [[4] * n for _ in range(n)]
        for i in range(n):
            for j in range(i):
                found = agreement_level(self.actions[i], self.actions[j], same_text=self._same_text)
                table[i][j] = table[j][i] = strictness(found)
        return table

    def levels(self) -> Iterator[tuple[Vote, Vote, int]]:
        """Each two votes of different teachers, with the strictness of their agreement."""
        voters = [(i, vote) for i, a in enumerate(self.actions) for vote in self._by_action[a]]
        for place, (i, one) in enumerate(voters):
            for j, other in voters[:place]:
                yield one, other, self._levels[i][j]

    def verdict(self, level: AgreementLevel, threshold: int) -> Verdict:
        """Who wins when actions count as the same at `level` and `threshold` families decide."""
        if not self.actions:
            return Verdict(None, 0, 0, is_tie=False)
        cliques = self._cliques(strictness(level))
        sizes = [self._n_families(clique) for clique in cliques]
        largest = max(sizes)
        leaders = [c for c, size in zip(cliques, sizes, strict=True) if size == largest]
        leader = min(leaders, key=self._preference)
        rest = max(self._n_families(clique - leader) for clique in cliques)
        is_tie = rest == largest >= threshold
        winner = None if is_tie or largest < threshold else self._consensus(leader)
        return Verdict(winner, largest, largest - rest, is_tie)

    def nearest_level(self, level: AgreementLevel, threshold: int) -> AgreementLevel | None:
        """The next looser level at which there would have been a consensus."""
        looser = LEVELS[LEVELS.index(level) + 1 :]
        return next((at for at in looser if self.verdict(at, threshold).winner), None)

    def _votes(self, group: frozenset[int]) -> list[Vote]:
        return [vote for i in sorted(group) for vote in self._by_action[self.actions[i]]]

    def _n_families(self, group: frozenset[int]) -> int:
        if len(group) == 1:
            return len(self._families[next(iter(group))])
        return len(frozenset[str]().union(*(self._families[i] for i in group)))

    def _preference(self, group: frozenset[int]) -> tuple[int, list[int]]:
        """Stricter agreement first, then the order of `actions`."""
        return -sum(self._levels[i][j] for i in group for j in group), sorted(group)

    def _consensus(self, group: frozenset[int]) -> Consensus:
        votes = sorted(self._votes(group), key=lambda vote: (vote.row.teacher, vote.family))
        weakest = min(self._levels[i][j] for i in group for j in group)
        return Consensus(
            self.actions[self._medoid(group)],
            tuple(votes),
            self._n_families(group),
            LEVELS[4 - weakest],
        )

    def _medoid(self, group: frozenset[int]) -> int:
        def order(i: int) -> tuple[int, bytes]:
            closeness = sum(
                self._levels[i][j] * len(self._by_action[self.actions[j]]) for j in group
            )
            # Among equals a hash decides: the shortest would make every chosen side short.
            return -closeness, blake2b(repr(_spelling(self.actions[i])).encode()).digest()

        return min(group, key=order) if len(group) > 1 else min(group)

    def _cliques(self, rank: int) -> list[frozenset[int]]:
        """All maximal groups whose members agree pairwise (Bron-Kerbosch with a pivot)."""
        n = len(self.actions)
        if n == 1:
            return [frozenset({0})]
        near = [{j for j in range(n) if j != i and self._levels[i][j] >= rank} for i in range(n)]
        closed_groups = {frozenset(near[i] | {i}) for i in range(n)}
        if sum(map(len, closed_groups)) == n:
            # Agreement happens to be transitive here: the groups do not overlap.
            return sorted(closed_groups, key=min)
        found: list[frozenset[int]] = []

        def grow(group: frozenset[int], open_: set[int], closed: set[int]) -> None:
            if not open_ and not closed:
                found.append(group)
                return
            pivot = max(open_ | closed, key=lambda i: (len(near[i] & open_), -i))
            for i in sorted(open_ - near[pivot]):
                grow(group | {i}, open_ & near[i], closed & near[i])
                open_ = open_ - {i}
                closed = closed | {i}

        grow(frozenset(), set(range(n)), set())
        return found


def _spelling(action: Action) -> tuple[str, list[tuple[str, str]]]:
    return action.text, [(call.name, call.arguments) for call in action.calls]
