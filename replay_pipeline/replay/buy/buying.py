"""Choose which questions to buy next: in an order that spreads over all states, in turns or all at once.

The questions of a round depend only on the states, the prices, and earlier answers. They never
depend on time or on other processes, so a run that was stopped and continued buys the same calls.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from replay_pipeline.replay.buy.lanes import LaneQuestion
from replay_pipeline.replay.buy.places import Place, spread
from replay_pipeline.replay.buy.policy import GateDecision, Policy, Poll, copies_agent
from replay_pipeline.replay.dialects.prices import Price, usd
from replay_pipeline.replay.dialects.sizes import USUAL_LOOKS
from replay_pipeline.types import TeacherSpec

_LAST_CALLS = 6
"""So few calls may use up the money."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A question that was chosen to be asked."""

    state: int
    teacher: int
    propensity: float = 1.0
    gate: str | None = None
    """The gate that drew this call by chance, with this propensity."""


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

    def everything_usd(self) -> float:
        """Return the expected cost to ask every teacher everywhere, with a warm prompt cache."""
        return math.fsum(
            self.cost_usd(state, teacher, True)
            for state in range(len(self.places))
            for teacher in range(len(self.teachers))
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


def market_of(
    tasks: Mapping[tuple[int, int], LaneQuestion],
    places: Sequence[Place],
    teachers: Sequence[TeacherSpec],
    prices: Mapping[str, Price],
    open_poll: Callable[[int], Poll],
    max_looks: int = 0,
) -> Market:
    """Return the market of these questions, by the indexes of their state and teacher.

    What earlier runs have taught doesn't change the expected costs. So a run that was stopped and
    continued buys the same calls.
    """

    def cost_usd(state: int, teacher: int, is_warm: bool) -> float:  # noqa: FBT001 (as `Market` calls it)
        task = tasks[state, teacher]
        before = task.previous if is_warm else None
        price = prices[teachers[teacher].name]
        n_looks = min(USUAL_LOOKS, max_looks)
        return usd(task.expected_nano(price, before, places[state].n_answer_bytes, n_looks))

    def bound_usd(state: int, teacher: int) -> float:
        task = tasks[state, teacher]
        price = prices[teachers[teacher].name]
        return usd(price.bound_nano(task.bound_tokens(), task.question.max_completion_tokens))

    return Market(
        places=places,
        teachers=teachers,
        cost_usd=cost_usd,
        bound_usd=bound_usd,
        open_poll=open_poll,
        is_open=lambda state, teacher: (state, teacher) in tasks,
    )


class Buyer:
    """The buyer chooses the questions of each round, and learns from their answers.

    Without a gate, every teacher is asked at every state, in spread order.
    """

    def __init__(self, market: Market, policy: Policy) -> None:
        self._market = market
        self._policy = policy
        self.order = [number for run in spread(market.places) for number in run]
        """States in the order in which they are asked."""
        self.teachers = self._in_their_order()
        """Numbers of the teachers in the order in which they are asked."""
        self._before = market.steps_before()
        self._asked: dict[int, set[int]] = defaultdict(set)
        self._paid_usd: dict[int, float] = defaultdict(float)
        self._expected_usd: dict[int, float] = defaultdict(float)
        self._next_in_order = 0
        self._polls: dict[int, Poll] = {}
        self._asked_on: dict[int, GateDecision] = {}
        self.stopped: dict[int, GateDecision] = {}
        """By state, why nobody more is asked there."""
        self._once: dict[int, Poll] = {}
        """Polls of states that stopped because the cheapest teacher took the agent's action."""
        self._explored_once: set[int] = set()
        self._n_outvoted, self._n_against = 0, 0.0
        self._is_rich: bool | None = None

    @property
    def doubts_first(self) -> bool:
        """Return whether the cheapest teacher copies the agent, so that a second one is asked to confirm."""
        return copies_agent(self._n_outvoted, self._n_against)

    def next_round(self, left_usd: float) -> list[Choice]:
        """Return the questions of the next round, as many as `left_usd` should pay for.

        The list is empty if nothing is left to ask, or if the money is used up.
        """
        if self._policy.is_in_turn and self._is_rich is None:
            self._is_rich = self._market.everything_usd() <= left_usd
        wanted = self._in_turn() if self._policy.is_in_turn else self._in_order()
        return self._paid_for(wanted, left_usd)

    def file(self, state: int, poll: Poll, paid_usd: Mapping[int, float]) -> None:
        """Record the votes at a state so far, and the cost of each teacher's call."""
        if self._policy.is_in_turn:
            self._polls[state] = poll
            if not self._left_at(state) and poll.is_outvoted:
                if not poll.is_taken:
                    self._n_against += self._policy.explored
                elif state in self._explored_once:
                    self._n_outvoted += 1
        for teacher, cost_usd in paid_usd.items():
            self._paid_usd[teacher] += cost_usd

    def _in_order(self) -> Iterator[list[Choice]]:
        """Ask everybody, state after state."""
        for state in self._new_states():
            if choices := [Choice(state, number) for number in self._left_at(state)]:
                yield choices

    def _in_turn(self) -> Iterator[list[Choice]]:
        """Ask the cheapest teacher that is left, at states that were begun and at new ones.

        A first answer teaches more than a second one: among real models it is right in .66 where it
        differs from the agent, and two that agree against it are in .88 (`benchmarks/real_models.py`).
        So new states come first, if the policy is wide.
        """
        if self.doubts_first:
            # What the cheapest teacher alone has confirmed is put to the next one.
            self._polls |= self._once
            for state in self._once:
                del self.stopped[state]
            self._once.clear()
        begun, new = list(self._polls), self._new_states()
        for state in chain(new, begun) if self._policy.is_wide else chain(begun, new):
            if choice := self._next_in_turn(state):
                yield [choice]

    def _new_states(self) -> Iterator[int]:
        while self._next_in_order < len(self.order):
            state = self.order[self._next_in_order]
            self._next_in_order += 1
            yield state

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
            is_once = (poll := self._polls.pop(state, None)) is not None and poll.is_confirmed_once
            if is_once and self.doubts_first:
                return Choice(state, left[0])
            if is_once and poll is not None:
                self._once[state] = poll
            self.stopped[state] = verdict
            return None
        if verdict.gate and state not in self._asked_on:
            self._asked_on[state] = verdict
            if (poll := self._polls.get(state)) is not None and poll.is_confirmed_once:
                self._explored_once.add(state)
        return Choice(state, left[0], verdict.propensity, verdict.gate)

    def _paid_for(self, wanted: Iterator[list[Choice]], left_usd: float) -> list[Choice]:
        """Take what half of the money should pay for, and at the very end what it surely pays for.

        So a call is refused only where calls cost twice what was expected, and what a run buys does not
        depend on which of them come first. What is left pays for the questions that the answers raise.
        If states are to be ended one after the other, one is begun only if the money should last until
        everybody was asked there and at those begun before, while the dearest call is held at its most.
        """
        found: list[Choice] = []
        share = 1.0 if self._is_rich else 0.5
        expected = bound = owed = dearest = 0.0
        for choices in wanted:
            rest = [each for choice in choices for each in self._rest(choice)]
            bounds = [self._market.bound_usd(c.state, c.teacher) for c in [*choices, *rest]]
            expected += sum(map(self._expected, choices))
            bound += sum(bounds[: len(choices)])
            owed += sum(map(self._expected, rest))
            dearest = max(dearest, *bounds)
            is_last = len(found) < _LAST_CALLS and bound <= left_usd
            begins = self._ends_what_it_begins and choices[0].state not in self._asked
            if (expected > left_usd * share and not is_last) or (
                begins and expected + owed + dearest > left_usd
            ):
                self._give_up(choices)
                break
            for choice in choices:
                self._expected_usd[choice.teacher] += self._cost(choice)
                self._asked[choice.state].add(choice.teacher)
            found += choices
        return self._market.by_session(found)

    @property
    def _ends_what_it_begins(self) -> bool:
        return self._policy.is_in_turn and not self._policy.is_wide

    def _rest(self, choice: Choice) -> list[Choice]:
        """Return what the answer to a choice may leave to ask at its state, where teachers take turns."""
        if not self._ends_what_it_begins:
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

    def _in_their_order(self) -> list[int]:
        """Return the numbers of all teachers, cheapest first where they wait for each other."""
        numbers = range(len(self._market.teachers))
        if not self._policy.is_in_turn:
            return list(numbers)
        some = self.order[:200]
        return sorted(numbers, key=lambda number: (self._market.mean_usd(some, number), number))

    def _left_at(self, state: int) -> list[int]:
        asked = self._asked.get(state, ())
        return [
            number
            for number in self.teachers
            if number not in asked and self._market.is_open(state, number)
        ]
