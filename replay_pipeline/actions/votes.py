"""From votes to a consensus: the largest group of actions that agree pairwise.

Agreement below `exact` isn't transitive: two reads may each overlap a third read but not each
other. So a group is a clique, and the order of the votes doesn't matter.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

from replay_pipeline.actions.agreement import (
    LEVELS,
    TextComparator,
    agreement_level,
    strictness,
)
from replay_pipeline.actions.canonical import Action, canonical_action
from replay_pipeline.actions.tools import ToolList
from replay_pipeline.types import AgreementLevel, TeacherAction, Tool, family_of_model

_CUT_SHORT = frozenset({"length", "content_filter"})
"""Finish reasons of an answer that the teacher had not finished."""
_MAX_ACTIONS = 24
"""Distinct actions of one state that are grouped; of more, those with the fewest votes are left
out, so that the search for groups stays short."""


def read_answer(
    answer: TeacherAction, *, cwd: str | None, tools: Sequence[Tool] | ToolList | None
) -> Action | None:
    """Return the action of a teacher, or `None` for a failed call. Only a valid action votes."""
    if answer.action is None or answer.error_code is not None:
        return None
    action = canonical_action(answer.action, cwd=cwd, tools=tools)
    if answer.finish_reason in _CUT_SHORT and action.is_valid:
        return replace(action, invalid_reason="cut_short")
    return action


def family_of_answer(answer: TeacherAction) -> str:
    """Return the voter behind an answer: the model's family, or the teacher if that is unknown."""
    return family_of_model(answer.family or answer.model) or answer.teacher


@dataclass(frozen=True, slots=True)
class Vote:
    """A valid answer of a teacher."""

    family: str
    row: TeacherAction
    action: Action


@dataclass(frozen=True, slots=True)
class Consensus:
    """The action that a group of votes agrees on."""

    action: Action
    """The medoid: the action that agrees most strictly with the others in the group."""
    votes: tuple[Vote, ...]
    """The votes, sorted by teacher."""
    n_families: int
    level: AgreementLevel
    """The weakest agreement between two of the group."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The largest group of votes."""

    consensus: Consensus
    n_next: int
    """Number of families in the next largest group, outside of it."""


class Panel:
    """The votes on one state. Each two are compared only once.

    Internally, a group of `actions` is a bit mask of their indexes, and so is a set of families.
    """

    def __init__(
        self,
        votes: Sequence[Vote],
        same_text: TextComparator | None = None,
        *,
        effects: Mapping[Action, str] | None = None,
    ) -> None:
        """Compare votes.

        Args:
            votes: all of them.
            same_text: judge of texts that differ.
            effects: of actions that were tried, what names their effect: one effect is one vote.
        """
        by_action: dict[Action, list[Vote]] = {}
        for vote in votes:
            by_action.setdefault(vote.action, []).append(vote)
        self._by_action = by_action
        self._same_text = same_text
        self._effects = effects or {}

    @property
    def distinct(self) -> Collection[Action]:
        """Return all distinct actions, in no particular order."""
        return self._by_action.keys()

    @cached_property
    def actions(self) -> list[Action]:
        """Return the distinct actions, in an order that doesn't depend on the order of the votes."""
        if len(self._by_action) == 1:
            return list(self._by_action)
        found = sorted(
            self._by_action.items(), key=lambda item: (-len(item[1]), _spelling(item[0]))
        )
        return [action for action, _ in found[:_MAX_ACTIONS]]

    @cached_property
    def _votes(self) -> list[list[Vote]]:
        """Return the votes for each of `actions`."""
        return [self._by_action[action] for action in self.actions]

    @cached_property
    def _families(self) -> list[int]:
        """Return the families that gave each of `actions`."""
        bits: dict[str, int] = {}
        found: list[int] = []
        for votes in self._votes:
            families = 0
            for vote in votes:
                families |= bits.setdefault(vote.family, 1 << len(bits))
            found.append(families)
        return found

    @cached_property
    def _levels(self) -> list[list[int]]:
        """Return strictness of the agreement between each two of `actions`."""
        actions = self.actions
        table = [[4] * len(actions) for _ in actions]
        for i, action in enumerate(actions):
            for j in range(i):
                found = strictness(agreement_level(action, actions[j], same_text=self._same_text))
                if has_one_effect(action, actions[j], self._effects):
                    found = max(found, strictness("effect"))
                table[i][j] = table[j][i] = found
        return table

    def levels(self) -> Iterator[tuple[Vote, Vote, int]]:
        """Yield each pair of votes from different teachers, with the strictness of their agreement."""
        voters = [(i, vote) for i, votes in enumerate(self._votes) for vote in votes]
        for place, (i, one) in enumerate(voters):
            row = self._levels[i]
            for j, other in voters[:place]:
                yield one, other, row[j]

    def groups(self, level: AgreementLevel) -> list[list[Vote]]:
        """Return the votes of each largest possible group of actions that agree pairwise at `level`.

        Groups may overlap.
        """
        return [self._votes_of(group) for group in self._groups(strictness(level))]

    def lead(self, level: AgreementLevel) -> Lead | None:
        """Return the largest group if actions must agree at `level`, or None without any vote.

        Of several that are as large, the one that agrees most strictly.
        """
        if not self.actions:
            return None
        groups = self._groups(strictness(level))
        sizes = [self._n_families(group) for group in groups]
        largest = max(sizes)
        leaders = [g for g, size in zip(groups, sizes, strict=True) if size == largest]
        leader = min(leaders, key=self._preference) if len(leaders) > 1 else leaders[0]
        n_next = max(self._n_families(group & ~leader) for group in groups)
        return Lead(self._consensus(leader), n_next)

    def _votes_of(self, group: int) -> list[Vote]:
        return [vote for i in _places(group) for vote in self._votes[i]]

    def _n_families(self, group: int) -> int:
        families = 0
        for i in _places(group):
            families |= self._families[i]
        return families.bit_count()

    def _preference(self, group: int) -> tuple[int, list[int]]:
        """Return stricter agreement first, then the order of `actions`."""
        places = _places(group)
        return -sum(self._levels[i][j] for i in places for j in places), places

    def _consensus(self, group: int) -> Consensus:
        places = _places(group)
        votes = sorted(self._votes_of(group), key=lambda vote: (vote.row.teacher, vote.family))
        weakest = min(self._levels[i][j] for i in places for j in places)
        return Consensus(
            self.actions[self._medoid(places)],
            tuple(votes),
            self._n_families(group),
            LEVELS[4 - weakest],
        )

    def _medoid(self, places: list[int]) -> int:
        if len(places) == 1:
            return places[0]
        weights = [(j, len(self._votes[j])) for j in places]
        closeness = {i: sum(self._levels[i][j] * n for j, n in weights) for i in places}
        closest = max(closeness.values())
        medoids = [i for i in places if closeness[i] == closest]
        # Among equals a hash decides: the shortest would make every chosen side short.
        return min(medoids, key=self._digest) if len(medoids) > 1 else medoids[0]

    def _digest(self, i: int) -> bytes:
        return blake2b(repr(_spelling(self.actions[i])).encode()).digest()

    def _groups(self, rank: int) -> list[int]:
        """Return all maximal groups whose members agree pairwise at strictness `rank`."""
        near: list[int] = []
        for row in self._levels:
            mask, bit = 0, 1
            for at in row:
                if at >= rank:
                    mask |= bit
                bit <<= 1
            near.append(mask)
        closed_groups = dict.fromkeys(near)
        if sum(group.bit_count() for group in closed_groups) == len(near):
            # Agreement happens to be transitive here: the groups do not overlap.
            return list(closed_groups)
        return _cliques([mask & ~(1 << i) for i, mask in enumerate(near)])


def has_one_effect(one: Action, other: Action, effects: Mapping[Action, str]) -> bool:
    """Return whether both actions were executed and had the same effect."""
    effect = effects.get(one)
    return effect is not None and effect == effects.get(other)


def _cliques(near: list[int]) -> list[int]:
    """Return maximal cliques of a graph, by Bron-Kerbosch with a pivot; `near` leaves out the own bit."""
    found: list[int] = []

    def grow(group: int, open_: int, closed: int) -> None:
        if not open_ and not closed:
            found.append(group)
            return
        pivot = max(_places(open_ | closed), key=lambda i: ((near[i] & open_).bit_count(), -i))
        for i in _places(open_ & ~near[pivot]):
            grow(group | 1 << i, open_ & near[i], closed & near[i])
            open_ &= ~(1 << i)
            closed |= 1 << i

    grow(0, (1 << len(near)) - 1, 0)
    return found


_PLACES = [[i for i in range(8) if mask >> i & 1] for mask in range(256)]


def _places(mask: int) -> list[int]:
    """Return the places of the bits that are set, from low to high."""
    if mask < len(_PLACES):
        return _PLACES[mask]
    return [i for i in range(mask.bit_length()) if mask >> i & 1]


def _spelling(action: Action) -> tuple[str, list[tuple[str, str]]]:
    return action.text, [(call.name, call.arguments) for call in action.calls]
