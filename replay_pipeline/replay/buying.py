"""Which questions to buy next, round by round: a first part that is spread, then where it pays most.

What a round asks depends on the states, the prices and the answers of the rounds before alone, never on
time or on what runs beside it: a run that was stopped and goes on buys the same calls.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from replay_pipeline.reliability import Ballot, Reliability, fit
from replay_pipeline.reliability.worth import MOST_PLANNED, Rule, Worth
from replay_pipeline.types import FAILURES, TeacherSpec, TraceState

T = TypeVar("T")

_SEGMENT = 5
"""Steps of a session that are asked side by side: one reads what another has put into the cache."""
_N_FIRST = 120
"""States of the first part, of which everybody is asked."""
_FIRST_SHARE = 0.25
"""Of the money, no more goes into the first part, once every project had its turn."""
_COVER_SHARE = 0.5
"""Of the money, no more goes into giving projects a turn."""
_N_PROJECTS = 20
"""So many projects have their turn before money goes where it pays most."""
_FIRST_ROUND = 8
"""States of the very first round, which tells what calls cost."""
_GROWTH = 0.2
"""Calls of a round, as a share of all before it."""
_LEAST_ROUND = 24
_LAST_CALLS = 6
"""So few calls may use up the money."""
_EXPLORED = 0.05
"""Share of the calls of a round that go to states which nobody would choose: the estimates may be wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of a state before anybody is asked."""

    session: str
    project: str
    kind: str
    has_failed: bool | None = None
    family: str | None = None
    """The student's."""
    n_answer_bytes: int = 0
    """Of what the student wrote."""


def outcome_of(state: TraceState) -> bool | None:
    """Return whether the recorded action failed; `None` where that is not known."""
    outcome = state.get("outcome")
    return True if outcome in FAILURES else False if outcome == "ok" else None


@dataclass(frozen=True, slots=True)
class Choice:
    """A question to ask."""

    state: int
    teacher: int
    propensity: float = 1.0


def spread(places: Sequence[Place], n_steps: int = _SEGMENT) -> list[list[int]]:
    """Cut sessions into short runs of steps, in an order that covers projects and time from the start.

    Projects take turns; those of a project come from its sessions far apart first, and of a session
    the beginning, the middle and the quarters: van der Corput's sequence (1935).
    """
    sessions: dict[str, dict[str, list[int]]] = {}
    for number, place in enumerate(places):
        sessions.setdefault(place.project, {}).setdefault(place.session, []).append(number)
    queues: list[Iterator[list[int]]] = [
        _turns([
            far_apart([steps[at : at + n_steps] for at in range(0, len(steps), n_steps)])
            for steps in far_apart(list(of_project.values()))
        ])
        for of_project in sessions.values()
    ]  # fmt: skip
    return list(_turns([list(queue) for queue in queues]))


def _turns(queues: Sequence[Sequence[list[int]]]) -> Iterator[list[int]]:
    """Take the first of each, then the second of each, and so on."""
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                yield queue[turn]


def far_apart(items: Sequence[T]) -> list[T]:
    """Order items so that each beginning of the list is spread over all of them."""
    n_bits = max(1, math.ceil(math.log2(max(2, len(items)))))
    order = (int(f"{i:0{n_bits}b}"[::-1], 2) for i in range(1 << n_bits))
    return [items[i] for i in order if i < len(items)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """What may be bought, and what it should cost.

    `cost_usd(state, teacher, is_warm)` says what a call should cost, where a prompt cache holds the
    step before it or not; `bound_usd(state, teacher)` the most that it can; `is_open(state, teacher)`
    whether it may be asked at all.
    """

    places: Sequence[Place]
    teachers: Sequence[TeacherSpec]
    cost_usd: Callable[[int, int, bool], float]
    bound_usd: Callable[[int, int], float]
    is_open: Callable[[int, int], bool] = lambda state, teacher: True  # noqa: ARG005


class Buyer:
    """Chooses the questions of each round, and learns from their answers.

    Args:
        market: states, teachers and costs.
        rule: when answers make a pair.
        count_own_family: whether teachers of the student's family vote.
        max_usd_per_pair: more is not paid for a right pair.
        is_by_value: choose by worth; else ask everybody everywhere, in an order that is spread.
    """

    def __init__(
        self,
        market: Market,
        rule: Rule,
        *,
        count_own_family: bool = False,
        max_usd_per_pair: float | None = None,
        is_by_value: bool = True,
    ) -> None:
        self._market = market
        self._rule = rule
        self._count_own_family = count_own_family
        self._most_usd = max_usd_per_pair
        self._is_by_value = is_by_value
        self.order = [number for run in spread(market.places) for number in run]
        """States in the order that is spread."""
        self._mean_usd = self._mean_costs()
        self._voters = self._chosen_teachers()
        self.families = [market.teachers[number].vendor for number in self._voters]
        self._before = self._steps_before()
        self._ballots: dict[int, Ballot] = {}
        self._asked: dict[int, set[int]] = defaultdict(set)
        self._dead: set[int] = set()
        self._paid_usd: dict[int, float] = defaultdict(float)
        self._expected_usd: dict[int, float] = defaultdict(float)
        self._n_bought = 0
        self._money_usd = 0.0
        self._reached: set[str] = set()
        self._next_in_order = 0
        self.model: Reliability | None = None
        self.is_out_of_money = False
        """Whether something is left that was worth its money, and that there was none for."""

    def next_round(self, left_usd: float) -> list[Choice]:
        """Return the questions of the next round, which `left_usd` is sure or likely to pay for.

        Empty: nothing is left that is worth its money, or the money is used up.
        """
        self._money_usd = max(self._money_usd, left_usd)
        wanted = self._in_order() if self._is_first(left_usd) else self._valued()
        return self._paid_for(wanted, left_usd)

    def file(self, state: int, ballot: Ballot | None, paid_usd: Mapping[int, float]) -> None:
        """Note what came of asking at a state: its ballot so far, and what each teacher's call cost."""
        if ballot is None:
            self._dead.add(state)
        else:
            self._ballots[state] = ballot
        for teacher, usd in paid_usd.items():
            self._paid_usd[teacher] += usd

    @property
    def n_states_asked(self) -> int:
        """States at which somebody was asked."""
        return len(self._asked)

    def worth(self) -> Worth:
        """Return what questions are worth after the answers so far."""
        self.model = fit(list(self._ballots.values()), ("agent", *self.families))
        return Worth(self.model, [self._mean_usd[n] for n in self._voters], self._rule)

    def _is_first(self, left_usd: float) -> bool:
        """Whether everybody is still asked in the spread order, whatever it is worth."""
        if not self._is_by_value:
            return True
        share = 1 - left_usd / self._money_usd if self._money_usd else 1.0
        n_projects = len({place.project for place in self._market.places})
        if self._next_in_order >= len(self.order) or share >= _COVER_SHARE:
            return False
        is_covered = len(self._reached) >= min(n_projects, _N_PROJECTS)
        return not is_covered or (len(self._asked) < _N_FIRST and share < _FIRST_SHARE)

    def _in_order(self) -> Iterator[list[Choice]]:
        """Ask everybody, state after state, in the spread order."""
        n_states = 0
        while self._next_in_order < len(self.order):
            if self._is_by_value and n_states >= _FIRST_ROUND:
                return
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            if choices := [Choice(state, number) for number in self._voters_at(state)]:
                n_states += 1
                self._reached.add(self._market.places[state].project)
                yield choices

    def _valued(self) -> Iterator[list[Choice]]:
        """The best questions first, with some that explore, as many as a round has."""
        worth = self.worth()
        n_left = max(_LEAST_ROUND, round(self._n_bought * _GROWTH))
        n_explored = round(n_left * _EXPLORED)
        explored = self._explored(n_explored)
        n_left -= sum(len(choices) for choices in explored)
        yield from explored
        heap: list[tuple[float, int, int]] = []
        advised: dict[int, tuple[int, float]] = {}
        for state in range(len(self._market.places)):
            found = self._advised(worth, state)
            if found is not None:
                advised[state] = found
                heap.append((-found[1] / self._cost(Choice(state, found[0])), state, found[0]))
        heapq.heapify(heap)
        after = {before: state for state, before in self._before.items()}
        taken: set[int] = set()
        while heap and n_left > 0:
            negative, state, teacher = heapq.heappop(heap)
            if state in taken or state in self._round:
                continue
            if self._most_usd is not None and -negative * self._most_usd < 1:
                return
            taken.add(state)
            n_left -= 1
            yield [Choice(state, teacher)]
            follower = after.get(state)
            if follower in advised and advised[follower][0] == teacher:
                # Its prompt begins with the one just asked: the cache makes it cheaper now.
                usd = self._cost(Choice(follower, teacher))
                heapq.heappush(heap, (-advised[follower][1] / usd, follower, teacher))

    def _advised(self, worth: Worth, state: int) -> tuple[int, float] | None:
        """Whom to ask at a state, and how many right pairs times dollars a call that brings."""
        if state in self._dead:
            return None
        place = self._market.places[state]
        ballot = self._ballots.get(state)
        asked = self._asked.get(state, set())
        n = len(self.families)
        pattern = ballot.pattern if ballot else (0, *[-1] * n)
        assert self.model is not None
        advice = worth.advice(self.model.kind(place.kind), pattern, has_failed=place.has_failed)
        if advice is None:
            return None
        teacher = self._voters[advice.place - 1]
        if teacher in asked or teacher not in self._voters_at(state):
            # It failed here, or has no vote: the next best that can be asked.
            left = [t for t in self._voters_at(state) if t not in asked]
            if not left:
                return None
            teacher = min(left, key=lambda t: self._mean_usd[t])
        mean = sum(self._mean_usd[t] for t in self._voters) / n
        return teacher, advice.index * self._mean_usd[teacher] / max(mean, 1e-12)

    def _explored(self, n_calls: int) -> list[list[Choice]]:
        """States that nobody has been asked at, the next in the spread order, with everybody."""
        found: list[list[Choice]] = []
        n_open = sum(1 for state in self.order[self._next_in_order :] if state not in self._asked)
        n = 0
        while n < n_calls and self._next_in_order < len(self.order):
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            voters = self._voters_at(state)
            if state in self._asked or not voters:
                continue
            chance = min(1.0, n_calls / len(voters) / max(1, n_open))
            found.append([Choice(state, number, chance) for number in voters])
            n += len(voters)
        return found

    def _paid_for(self, wanted: Iterator[list[Choice]], left_usd: float) -> list[Choice]:
        """Take what half of the money should pay for, and at the very end what it surely pays for.

        So a call is refused only where calls cost twice what was expected, and what a run buys does not
        depend on which of them come first. What is left pays for the questions that the answers raise:
        a state that was begun and not ended is money for nothing.
        """
        found: list[Choice] = []
        expected = bound = 0.0
        self._round: set[int] = set()
        for choices in wanted:
            expected += sum(self._cost(choice) * self._ratio(choice.teacher) for choice in choices)
            bound += sum(self._market.bound_usd(c.state, c.teacher) for c in choices)
            is_last = len(found) < _LAST_CALLS and bound <= left_usd
            if expected > left_usd / 2 and not is_last:
                self.is_out_of_money = not found
                self._give_up(choices)
                break
            for choice in choices:
                self._expected_usd[choice.teacher] += self._cost(choice)
                self._asked[choice.state].add(choice.teacher)
                self._round.add(choice.state)
            found += choices
        self._n_bought += len(found)
        return sorted(found, key=lambda choice: (choice.state, choice.teacher))

    def _give_up(self, choices: Sequence[Choice]) -> None:
        """Put the state that the money did not reach back into its place in the order."""
        at = self._next_in_order - 1
        if at >= 0 and self.order[at] == choices[0].state and len(choices) > 1:
            self._next_in_order = at

    def _cost(self, choice: Choice) -> float:
        before = self._before.get(choice.state)
        is_warm = before is not None and choice.teacher in self._asked.get(before, ())
        return max(self._market.cost_usd(choice.state, choice.teacher, is_warm), 1e-12)

    def _ratio(self, teacher: int) -> float:
        """How much more than expected a teacher's calls have cost."""
        expected = self._expected_usd[teacher]
        paid = self._paid_usd[teacher]
        return max(0.25, min(4.0, paid / expected)) if expected and paid else 1.0

    def _mean_costs(self) -> list[float]:
        """Mean cost of a call of each teacher over states far apart, the prompt cache warm."""
        some = self.order[:200] or [0]
        return [
            math.fsum(costs) / len(costs)
            if (
                costs := [
                    self._market.cost_usd(state, number, True)
                    for state in some
                    if self._market.places and self._market.is_open(state, number)
                ]
            )
            else 0.0
            for number in range(len(self._market.teachers))
        ]

    def _chosen_teachers(self) -> list[int]:
        """The cheapest teacher of each family, the cheapest families if there are too many."""
        order = sorted(
            range(len(self._market.teachers)), key=lambda number: (self._mean_usd[number], number)
        )
        if not self._is_by_value:
            return sorted(order)
        chosen: dict[str, int] = {}
        for number in order:
            chosen.setdefault(self._market.teachers[number].vendor, number)
        return sorted(list(chosen.values())[:MOST_PLANNED])

    def _voters_at(self, state: int) -> list[int]:
        family = self._market.places[state].family
        if not self._is_by_value or self._count_own_family:
            family = None
        return [
            number
            for number in self._voters
            if self._market.teachers[number].vendor != family
            and self._market.is_open(state, number)
        ]

    def _steps_before(self) -> dict[int, int]:
        last: dict[str, int] = {}
        found: dict[int, int] = {}
        for number, place in enumerate(self._market.places):
            if place.session in last:
                found[number] = last[place.session]
            last[place.session] = number
        return found
