"""Choose which questions to buy next: at first spread over all states, then where they pay most.

The questions of a round depend only on the states, the prices, and earlier answers. They never
depend on time or on other processes, so a run that was stopped and continued buys the same calls.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replay_pipeline.judge.ballots import Ballot
from replay_pipeline.judge.reliability import Reliability, fit
from replay_pipeline.judge.worth import MOST_PLANNED, Worth
from replay_pipeline.replay.buy.places import Place, errors_first, spread
from replay_pipeline.replay.buy.policy import GateDecision, Policy, Poll
from replay_pipeline.types import TeacherSpec

BY_VALUE = "value"
"""The preset that buys where a dollar brings most."""
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
class Choice:
    """A question that was chosen to be asked."""

    state: int
    teacher: int
    propensity: float = 1.0
    gate: str | None = None
    """The preset that drew this call by chance, with this propensity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """The questions for sale, with their expected costs.

    `cost_usd(state, teacher, is_warm)` returns the expected cost of a call, with or without a warm
    prompt cache. `bound_usd(state, teacher)` returns the most that it can cost. `open_poll(state)`
    opens the poll of a state. `is_open(state, teacher)` says whether the question may be asked at
    all.
    """

    places: Sequence[Place]
    teachers: Sequence[TeacherSpec]
    cost_usd: Callable[[int, int, bool], float]
    bound_usd: Callable[[int, int], float]
    open_poll: Callable[[int], Poll]
    is_open: Callable[[int, int], bool] = lambda state, teacher: True  # noqa: ARG005

    def mean_usd(self, some: Sequence[int], teacher: int) -> float:
        """Return the mean cost of a teacher's calls at some states, with a warm prompt cache."""
        costs = [
            self.cost_usd(state, teacher, True) for state in some if self.is_open(state, teacher)
        ]
        return math.fsum(costs) / len(costs) if costs else 0.0

    def everything_usd(self, teachers: Sequence[int]) -> float:
        """Return the expected cost to ask these teachers everywhere, with a warm prompt cache."""
        return math.fsum(
            self.cost_usd(state, teacher, True)
            for state in range(len(self.places))
            for teacher in teachers
            if self.is_open(state, teacher)
        )

    def steps_before(self) -> dict[int, int]:
        """Return the previous step in the session for each state that has one."""
        last: dict[str, int] = {}
        found: dict[int, int] = {}
        for number, place in enumerate(self.places):
            if place.session in last:
                found[number] = last[place.session]
            last[place.session] = number
        return found

    def by_session(self, choices: Sequence[Choice]) -> list[Choice]:
        """Group choices by session, in the order of the session's steps."""
        turns: dict[str, int] = {}
        for choice in choices:
            turns.setdefault(self.places[choice.state].session, len(turns))
        return sorted(
            choices,
            key=lambda each: (turns[self.places[each.state].session], each.state, each.teacher),
        )


class Buyer:
    """The buyer chooses the questions of each round, and learns from their answers.

    Args:
        market: states, teachers and costs.
        policy: the rules for buying. With none, every teacher is asked at every state, in spread
            order.
    """

    def __init__(self, market: Market, policy: Policy) -> None:
        self._market = market
        self._policy = policy
        runs = (errors_first if policy.is_ordered_by_errors else spread)(market.places)
        self.order = [number for run in runs for number in run]
        """States in the order in which they are asked, where nothing else decides."""
        some = self.order[:200]
        self._mean_usd = [market.mean_usd(some, number) for number in range(len(market.teachers))]
        self._voters = self._chosen_teachers()
        self.families = [market.teachers[number].vendor for number in self._voters]
        self._before = market.steps_before()
        self._ballots: dict[int, Ballot] = {}
        self._asked: dict[int, set[int]] = defaultdict(set)
        self._dead: set[int] = set()
        self._paid_usd: dict[int, float] = defaultdict(float)
        self._expected_usd: dict[int, float] = defaultdict(float)
        self._n_bought = 0
        self._n_owed = 0.0
        """Calls that should still go to states which nobody would choose."""
        self._money_usd = 0.0
        self._reached: set[str] = set()
        self._next_in_order = 0
        self._polls: dict[int, Poll] = {}
        self._asked_on: dict[int, GateDecision] = {}
        self.stopped: dict[int, GateDecision] = {}
        """By state, why nobody more is asked there."""
        self._is_rich: bool | None = None
        self.model: Reliability | None = None
        self.is_out_of_money = False
        """Whether something is left that was worth its money, and that there was none for."""

    def next_round(self, left_usd: float) -> list[Choice]:
        """Return the questions of the next round, as many as `left_usd` should pay for.

        The list is empty if nothing left is worth its price, or if the money is used up.
        """
        self._money_usd = max(self._money_usd, left_usd)
        if self._policy.is_in_turn:
            if self._is_rich is None:
                self._is_rich = self._market.everything_usd(self._voters) <= left_usd
            wanted = self._in_turn()
        else:
            wanted = self._in_order() if self._is_first(left_usd) else self._valued()
        return self._paid_for(wanted, left_usd)

    def file(
        self, state: int, poll: Poll, ballot: Ballot | None, paid_usd: Mapping[int, float]
    ) -> None:
        """Record the votes at a state so far, and the cost of each teacher's call."""
        if self._policy.is_in_turn:
            self._polls[state] = poll
        elif ballot is None:
            self._dead.add(state)
        else:
            self._ballots[state] = ballot
        for teacher, usd in paid_usd.items():
            self._paid_usd[teacher] += usd

    @property
    def n_states_asked(self) -> int:
        """Count the states at which at least one teacher was asked."""
        return len(self._asked)

    def worth(self) -> Worth:
        """Return the value of further questions, given the answers so far."""
        self.model = fit(list(self._ballots.values()), ("agent", *self.families))
        usd = [self._mean_usd[n] for n in self._voters]
        return Worth(self.model, usd, self._policy.threshold, self._policy.min_p_better)

    def _is_first(self, left_usd: float) -> bool:
        """Return whether everybody is still asked in the spread order, whatever it is worth."""
        if not self._policy.is_by_value:
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
            if self._policy.is_by_value and n_states >= _FIRST_ROUND:
                return
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            if choices := [Choice(state, number) for number in self._voters_at(state)]:
                n_states += 1
                self._reached.add(self._market.places[state].project)
                yield choices

    def _in_turn(self) -> Iterator[list[Choice]]:
        """Ask the cheapest teacher that is left, at states that were begun first, then at new ones."""
        for state in list(self._polls):
            if choice := self._next_in_turn(state):
                yield [choice]
        while self._next_in_order < len(self.order):
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            if choice := self._next_in_turn(state):
                yield [choice]

    def _next_in_turn(self, state: int) -> Choice | None:
        left = self._left_at(state)
        if not left:
            self._polls.pop(state, None)
            return None
        verdict = self._asked_on.get(state)
        if verdict is None:
            poll = self._polls.get(state) or self._market.open_poll(state)
            families = {self._market.teachers[teacher].vendor for teacher in left}
            verdict = self._policy.verdict(poll, families)
        if verdict.reason:
            self.stopped[state] = verdict
            self._polls.pop(state, None)
            return None
        if verdict.gate:
            self._asked_on[state] = verdict
        return Choice(state, left[0], verdict.propensity, verdict.gate)

    def _valued(self) -> Iterator[list[Choice]]:
        """Yield the best questions first, with some that explore between them, as many as a round has."""
        worth = self.worth()
        n_left = max(_LEAST_ROUND, round(self._n_bought * _GROWTH))
        n_to_explore = n_left * _EXPLORED
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
            if (
                self._policy.max_usd_per_pair is not None
                and -negative * self._policy.max_usd_per_pair < 1
            ):
                return
            taken.add(state)
            n_left -= 1
            yield [Choice(state, teacher)]
            self._n_owed += _EXPLORED
            if self._n_owed >= 1 and (explored := self._explored(n_to_explore)):
                self._n_owed -= len(explored)
                n_left -= len(explored)
                yield explored
            follower = after.get(state)
            if follower in advised and advised[follower][0] == teacher:
                # Its prompt begins with the one just asked: the cache makes it cheaper now.
                usd = self._cost(Choice(follower, teacher))
                heapq.heappush(heap, (-advised[follower][1] / usd, follower, teacher))

    def _advised(self, worth: Worth, state: int) -> tuple[int, float] | None:
        """Return whom to ask at a state, and how many right pairs times dollars a call that brings."""
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
            left = self._left_at(state)
            if not left:
                return None
            teacher = min(left, key=lambda t: self._mean_usd[t])
        mean = sum(self._mean_usd[t] for t in self._voters) / n
        return teacher, advice.index * self._mean_usd[teacher] / max(mean, 1e-12)

    def _explored(self, n_calls: float) -> list[Choice]:
        """Return the next state in the spread order that nobody has been asked at, with everybody.

        Args:
            n_calls: that explore in this round.
        """
        n_open = sum(1 for state in self.order[self._next_in_order :] if state not in self._asked)
        while self._next_in_order < len(self.order):
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            voters = self._voters_at(state)
            if state not in self._asked and voters:
                chance = min(1.0, max(1.0, n_calls / len(voters)) / n_open)
                return [Choice(state, number, chance, BY_VALUE) for number in voters]
        return []

    def _paid_for(self, wanted: Iterator[list[Choice]], left_usd: float) -> list[Choice]:
        """Take what half of the money should pay for, and at the very end what it surely pays for.

        So a call is refused only where calls cost twice what was expected, and what a run buys does not
        depend on which of them come first. What is left pays for the questions that the answers raise.
        In turn, a state is begun only if the money should last until everybody was asked there and at
        those begun before, while the dearest call is held at its most: a state that was begun and not
        ended is money for nothing.
        """
        found: list[Choice] = []
        share = 1.0 if self._is_rich else 0.5
        expected = bound = owed = dearest = 0.0
        self._round: set[int] = set()
        for choices in wanted:
            rest = [each for choice in choices for each in self._rest(choice)]
            bounds = [self._market.bound_usd(c.state, c.teacher) for c in [*choices, *rest]]
            expected += sum(map(self._expected, choices))
            bound += sum(bounds[: len(choices)])
            owed += sum(map(self._expected, rest))
            dearest = max(dearest, *bounds)
            is_last = len(found) < _LAST_CALLS and bound <= left_usd
            begins = self._policy.is_in_turn and choices[0].state not in self._asked
            if (expected > left_usd * share and not is_last) or (
                begins and expected + owed + dearest > left_usd
            ):
                self.is_out_of_money = not found
                self._give_up(choices)
                break
            for choice in choices:
                self._expected_usd[choice.teacher] += self._cost(choice)
                self._asked[choice.state].add(choice.teacher)
                self._round.add(choice.state)
            found += choices
        self._n_bought += len(found)
        return self._market.by_session(found)

    def _rest(self, choice: Choice) -> list[Choice]:
        """Return what the answer to a choice may leave to ask at its state, where teachers take turns."""
        if not self._policy.is_in_turn:
            return []
        left = self._left_at(choice.state)
        return [Choice(choice.state, teacher) for teacher in left if teacher != choice.teacher]

    def _give_up(self, choices: Sequence[Choice]) -> None:
        """Put the state that the money did not reach back into its place in the order."""
        at = self._next_in_order - 1
        state = choices[0].state
        if at >= 0 and self.order[at] == state and state not in self._asked:
            self._next_in_order = at

    def _cost(self, choice: Choice) -> float:
        before = self._before.get(choice.state)
        is_warm = before is not None and choice.teacher in self._asked.get(before, ())
        return max(self._market.cost_usd(choice.state, choice.teacher, is_warm), 1e-12)

    def _expected(self, choice: Choice) -> float:
        return self._cost(choice) * self._ratio(choice.teacher)

    def _ratio(self, teacher: int) -> float:
        """Return how much more than expected a teacher's calls have cost."""
        expected = self._expected_usd[teacher]
        paid = self._paid_usd[teacher]
        return max(0.25, min(4.0, paid / expected)) if expected and paid else 1.0

    def _chosen_teachers(self) -> list[int]:
        """Return all teachers, cheapest first where they wait for each other.

        By value, the cheapest teacher of each family, and the cheapest families if there are too many.
        """
        order = sorted(
            range(len(self._market.teachers)), key=lambda number: (self._mean_usd[number], number)
        )
        if not self._policy.is_by_value:
            return order if self._policy.is_in_turn else sorted(order)
        chosen: dict[str, int] = {}
        for number in order:
            chosen.setdefault(self._market.teachers[number].vendor, number)
        return sorted(list(chosen.values())[:MOST_PLANNED])

    def _left_at(self, state: int) -> list[int]:
        asked = self._asked.get(state, ())
        return [teacher for teacher in self._voters_at(state) if teacher not in asked]

    def _voters_at(self, state: int) -> list[int]:
        family = self._market.places[state].family
        if not self._policy.is_by_value or self._policy.count_own_family:
            family = None
        return [
            number
            for number in self._voters
            if self._market.teachers[number].vendor != family
            and self._market.is_open(state, number)
        ]
