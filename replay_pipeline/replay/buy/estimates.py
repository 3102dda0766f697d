"""Estimate a replay by playing it a few hundred times: its bill, its pairs, and its positives.

Each time, lanes, gate, and cache run over the real questions, with drawn answers: who agrees with
whom, how many tokens a byte makes, how long answers are, and which calls find their prompt in the
cache. What isn't known is drawn as widely as it may be. What earlier answers show is drawn as
closely as they show it (Beta and Dirichlet posteriors; Gelman et al., "Bayesian data analysis",
2.4 and 3.4). The interval holds nine of ten outcomes. `benchmarks/estimate.py` holds it to bills.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from replay_pipeline.judge.answers import AGENT, AnswerBook, ExtractOptions
from replay_pipeline.judge.belief import kind_of
from replay_pipeline.judge.precision import Calibration
from replay_pipeline.judge.rule import Decision, rule, standing_of_pattern
from replay_pipeline.judge.strengths import SAME, Reliability, Scores, action_groups
from replay_pipeline.replay.buy.buying import Buyer, market_of
from replay_pipeline.replay.buy.lanes import LEAST_LOOKS_USD, LaneQuestion, Lanes, tasks_of
from replay_pipeline.replay.buy.places import Place
from replay_pipeline.replay.buy.policy import Policy, copies_agent
from replay_pipeline.replay.dialects.prices import NANO, Price, usd
from replay_pipeline.replay.dialects.sizes import MIN_CACHED_TOKENS, Learned
from replay_pipeline.storage.arrays import Numpy
from replay_pipeline.types import TeacherAction, TeacherSpec, TraceState

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray
else:
    np = Numpy()

Range = tuple[float, float]

_N_DRAWS = 300
_ENDS = (2.5, 97.5)
"""Percentiles at the ends of an interval. Draws know nothing of what sets real sessions apart, so nine of ten real
outcomes need more than nine of ten draws."""
_N_CANDIDATES = 4_000
_AGREEMENT = (0.3, 0.7)
"""How often two raters agree before anything was seen, at the least and at the most."""
_AGENT = (0.85, 1.1)
"""How much more often than a teacher the agent takes a state's natural action."""
_TEMPTED = 0.06
"""How often a rater that leaves the natural action joins another one that was taken."""
_PRIOR = 40.0
"""Answers for which a drawn agreement counts, beside those that were seen."""
_ALIKE = 2.0
"""So many answers of the same sessions tell as much as one of independent states."""
_UNUSABLE = (0.5, 19.5)
"""Answers without a usable action and with one, before anything was seen."""
_CACHE_HITS = (0.8, 1.0)
"""Share of the calls that find their prompt in the cache, before anything was seen."""
_HITS_PRIOR = 10.0
"""Calls for which that counts, beside those that were seen."""
_UNLIKE = 2.5
"""So many calls tell as much of the tokens that a cache serves as one would if all prompts were as long."""
_ASSUMED_RIGHT: tuple[Range, Range, Range] = ((0.75, 0.95), (0.7, 0.9), (0.9, 0.98))
"""Share of right pairs, lessons, and positives among models of different makers (`docs/agreement.md`); by the
answers as soon as there are some."""
_ANSWERS_RIGHT: Range = (0.4, 0.85)
"""Share of right answers among those that nobody confirmed, from the agent with the fewest to the one with the most
(`benchmarks/real_models.py`)."""
_ALL_PAIRS_RIGHT = (0.2, 0.6)
"""The same of pairs if all that teachers agree on against the agent makes them."""
_SHARES = (1.2, 5.3, 3.5)
"""How much of what teachers agree on against the agent makes pairs, lessons, and neither, before anything was seen; as
many states count for it."""
_MIN_STATES = 20
_MOST_READ = 1_000
"""States whose answers are read. More make no interval narrower that anybody would notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherEstimate:
    """The estimated tokens and cost of one teacher."""

    teacher: str
    model: str
    n_calls: int
    n_prompt_tokens: int
    n_cached_tokens: int
    """Prompt tokens that a provider's prompt cache should serve."""
    n_completion_tokens: int
    expected_usd: float
    bound_usd: float
    """The sum of the reservations, if no call settles for less."""
    price_source: str
    price_date: str
    adaptations: tuple[str, ...] = ()
    """Fields that are left out for its endpoint, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Purchase:
    """What some money buys. Each interval holds nine of ten simulated outcomes."""

    n_states: int
    """States at which everybody is asked whom the policy asks."""
    pairs: Range
    lessons: Range
    """What teachers agree on at states where the agent may be right too."""
    positives: Range
    """States at which the agent's action is confirmed."""
    answers: Range
    """States with an answer that nobody confirms."""
    low_usd: float
    high_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is left to ask of a replay, per teacher and in total, in US dollars."""

    n_states: int
    """States at which a question is left."""
    n_calls: int
    """Calls that are left, as far as the policy makes them."""
    expected_usd: float
    bound_usd: float
    teachers: tuple[TeacherEstimate, ...]
    low_usd: float = 0.0
    high_usd: float = 0.0
    pairs: Range = (0, 0)
    """Pairs that the rest brings, beside those of states that are decided."""
    lessons: Range = (0, 0)
    positives: Range = (0, 0)
    answers: Range = (0, 0)
    pairs_right: Range = _ASSUMED_RIGHT[0]
    """Share of the pairs that are right: the chosen side is right, and the rejected one wrong."""
    lessons_right: Range = _ASSUMED_RIGHT[1]
    positives_right: Range = _ASSUMED_RIGHT[2]
    answers_right: Range = _ANSWERS_RIGHT
    n_answered: int = 0
    """States with answers behind this estimate. 0 means that agreement is assumed."""
    covered: Purchase | None = None
    """What the ceiling pays for, if there is one."""
    words: tuple[str, ...] = ()
    """Sentences for people: whether these teachers can teach this agent, and what to buy."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return asdict(self)


@dataclass(kw_only=True)
class Plan:
    """The questions of a replay, with all that is known about them."""

    states: Sequence[TraceState]
    teachers: Sequence[TeacherSpec]
    lanes: InitVar[Lanes]
    places: Sequence[Place]
    policy: Policy
    prices: Mapping[str, Price]
    find: InitVar[Callable[[LaneQuestion], Callable[[], TeacherAction] | None]]
    """Finds the row of a question that isn't left to ask."""
    learned: Mapping[str, Learned]
    adaptations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    max_looks: int = 0
    """How often a teacher may look before it acts; each look is a call of its own."""
    looks_share: float = 0.0
    """What follows looks costs at most so much of what first steps cost."""

    def __post_init__(
        self, lanes: Lanes, find: Callable[[LaneQuestion], Callable[[], TeacherAction] | None]
    ) -> None:
        self.tasks = tasks_of(self.teachers, lanes)
        self.known = {key: row for key, task in self.tasks.items() if (row := find(task))}
        self.market = market_of(
            self.tasks, self.places, self.teachers, self.prices,
            lambda state: self.policy.poll(self.states[state]), self.max_looks,
        )  # fmt: skip


def what_is_left(plan: Plan, *, ceiling_usd: float | None = None) -> Estimate:
    """Return what is left of a replay: calls, dollars, pairs, and positives.

    Every figure of what is left, in each command, comes from here. With `ceiling_usd`, the estimate
    says what so much money buys, too.
    """
    chance = np.random.default_rng(0)
    buyer = Buyer(plan.market, plan.policy)
    seen = _Answered(plan, buyer.teachers)
    votes = _Votes(plan, buyer.teachers, seen, chance)
    lanes = _lanes(plan, votes, buyer.teachers, chance)
    rows = tuple(row for _, row in lanes if row)
    by_state: Array = sum((usd_S_D for usd_S_D, _ in lanes), np.zeros((len(plan.states), _N_DRAWS)))
    total = by_state.sum(axis=0)
    low, high = _ends(total)
    n_left = round(float(votes.is_left.sum(axis=0).mean()))
    return Estimate(
        n_states=n_left,
        n_calls=sum(row.n_calls for row in rows),
        expected_usd=round(float(total.mean()), 9),
        bound_usd=round(sum(row.bound_usd for row in rows), 9),
        teachers=rows,
        low_usd=round(low, 9),
        high_usd=round(high, 9),
        pairs=_whole(votes.pairs.sum(axis=0)),
        lessons=_whole(votes.lessons.sum(axis=0)),
        positives=_whole(votes.positives.sum(axis=0)),
        answers=_whole(votes.answers.sum(axis=0)),
        n_answered=len(seen.labels),
        covered=None
        if ceiling_usd is None
        else _covered(
            buyer.order,
            by_state,
            lanes[0][0] if plan.policy.is_wide else by_state,
            votes,
            ceiling_usd,
            n_left,
        ),
        **seen.right(),
    )


def _ends(values: Array) -> Range:
    low, high = np.percentile(values, _ENDS) if values.size else (0.0, 0.0)
    return float(low), float(high)


def _whole(values: Array) -> Range:
    return round(_ends(values)[0]), round(_ends(values)[1])


def _covered(
    order: Sequence[int],
    by_state: Array,
    begun_by: Array,
    votes: _Votes,
    ceiling_usd: float,
    n_left: int,
) -> Purchase:
    """Return what a ceiling pays for, with what states cost by draw (`by_state`) in their order.

    `begun_by` is what of it is paid before any state is ended; at `n_left` states something is left to ask.
    """
    places = np.array(order, dtype=int)
    first, rest = begun_by[places], (by_state - begun_by)[places]
    is_begun = np.cumsum(first, axis=0) <= ceiling_usd
    left = ceiling_usd - (first * is_begun).sum(axis=0)
    is_paid = is_begun & ((np.cumsum(rest, axis=0) <= left) | (rest == 0))
    # What was begun and not ended is what the first teacher says.
    is_cut, agrees = is_begun & ~is_paid, votes.first_agrees[places]
    # States at which nothing is left cost nothing, and bring nothing.
    is_open = (by_state[places] > 0).any(axis=1, keepdims=True)
    low, high = _ends((first * is_begun + rest * is_paid).sum(axis=0))
    n_open = max(1, int(is_open.sum()))
    positives = (votes.positives[places] & is_paid) | (is_cut & agrees)
    answers = (votes.answers[places] & is_paid) | (is_cut & ~agrees)
    return Purchase(
        n_states=round(n_left * float((is_begun & is_open).sum(axis=0).mean()) / n_open),
        pairs=_whole((votes.pairs[places] & is_paid).sum(axis=0)),
        lessons=_whole((votes.lessons[places] & is_paid).sum(axis=0)),
        positives=_whole(positives.sum(axis=0)),
        answers=_whole(answers.sum(axis=0)),
        low_usd=round(low, 9),
        high_usd=round(high, 9),
    )


# --- who agrees with whom -------------------------------------------------------------------

_UNREAD, _WITH_AGENT, _WITH_MOST, _ALONE = range(4)
"""What an answer does: it has no usable action; it joins the agent, the largest other group, or nobody."""

_Standing = tuple[int, int, tuple[tuple[int, int], ...]]
"""Votes for the agent's action, answers of its own family for it, and the same of each other group."""
_START: _Standing = (0, 0, ())
_Context = tuple[int, int, int, int]
"""The teacher, how many took the agent's action and how many that of the largest other group, and how many
groups are as large."""
_Kin = tuple[bool | None, ...]
"""For each teacher, in order, whether it is of the agent's own family; `None` if it adds no vote."""


def _moved(at: _Standing, option: int, *, is_own: bool | None) -> _Standing:
    votes, own, groups = at
    if option == _UNREAD or is_own is None:
        return at
    added = (0, 1) if is_own else (1, 0)
    if option == _WITH_AGENT:
        return votes + added[0], own + added[1], groups
    if option == _WITH_MOST and groups:
        groups = ((groups[0][0] + added[0], groups[0][1] + added[1]), *groups[1:])
    else:
        groups = (*groups, added)
    return votes, own, tuple(sorted(groups, reverse=True))


@cache
def _decision(at: _Standing, threshold: int) -> Decision:
    """Return what the votes make, by the one rule."""
    votes, own, groups = at
    numbers, without = [0], []
    for number, (n_votes, n_own) in enumerate(((votes, own), *groups)):
        numbers += [number] * n_votes
        without += range(len(numbers), len(numbers) + n_own)
        numbers += [number] * n_own
    return rule(standing_of_pattern(tuple(numbers), without)[1], threshold)


@cache
def _can_pair(at: _Standing, kin: _Kin, threshold: int) -> bool:
    """Return whether the teachers that are left can still make a pair."""
    if not kin:
        return _decision(at, threshold) == "pair"
    nexts = {_moved(at, option, is_own=kin[0]) for option in range(4)}
    return any(_can_pair(each, kin[1:], threshold) for each in nexts)


def _context(teacher: int, at: _Standing) -> _Context:
    """Return what the chances of the next answer depend on."""
    votes, own, groups = at
    sizes = [sum(group) for group in groups]
    most = max(sizes, default=0)
    return teacher, min(2, votes + own), min(2, most), min(2, sizes.count(most))


class _Answered:
    """The answers that are known, read once: who agreed with whom, and how likely it is right."""

    def __init__(self, plan: Plan, order: Sequence[int]) -> None:
        self.plan = plan
        self.order = order
        self.kin = [self._kin(state) for state in range(len(plan.states))]
        self.labels: dict[int, list[int]] = {}
        """By state, what the answers of its first teachers did."""
        self.counts: dict[_Context, Counter[int]] = defaultdict(Counter)
        self._n_outvoted, self._n_against = 0, 0.0
        self._options = ExtractOptions(
            level=plan.policy.level, count_own_family=plan.policy.count_own_family
        )
        self._scores = Scores((t.vendor for t in plan.teachers), self._options)
        self.chances: dict[str, list[float]] = {"pairs": [], "lessons": [], "positives": []}
        """How likely each of what the answers make is right."""
        self.n_doubtful = 0
        """What is agreed on against the agent and too likely wrong to be a lesson."""
        found = sorted({state for state, _ in plan.known})
        for state in found[:: max(1, len(found) // _MOST_READ)]:
            self._read(state)

    def _kin(self, state: int) -> _Kin:
        """Return how each teacher's answer counts at a state; of a family, only the first does."""
        agents = (
            None if self.plan.policy.count_own_family else self.plan.market.places[state].family
        )
        seen: set[str] = set()
        found: list[bool | None] = []
        for number in self.order:
            family = self.plan.teachers[number].vendor
            found.append(None if family in seen else family == agents)
            seen.add(family)
        return tuple(found)

    def _read(self, state: int) -> None:
        plan = self.plan
        poll = plan.policy.poll(plan.states[state])
        actions, labels, at, is_next = [poll.student], [], _START, True
        answers: list[TeacherAction] = []
        for place, number in enumerate(self.order):
            if (row := plan.known.get((state, number))) is None:
                is_next = False
                continue
            n_votes, n_own = len(poll.votes), len(poll.own)
            poll.add(answer := row())
            answers.append(answer)
            if not is_next:
                continue
            option = _UNREAD
            if added := poll.votes[n_votes:] + poll.own[n_own:]:
                before = action_groups(actions, plan.policy.level)
                actions.append(added[0].action)
                group = action_groups(actions, plan.policy.level)[-1]
                option = _option(group, Counter(before))
            self.counts[_context(place, at)][option] += 1
            at = _moved(at, option, is_own=self.kin[state][place])
            labels.append(option)
        if labels and len(labels) == len(self.order) and poll.is_outvoted:
            if labels[0] != _WITH_AGENT:
                self._n_against += plan.policy.explored
            elif plan.policy.explores(plan.states[state]["state_id"]):
                self._n_outvoted += 1
        self.labels[state] = labels
        book = AnswerBook(self._options)
        book.file(answers)
        right, better = self._scores.add(book.open(plan.states[state]))
        if poll.makes_pair() and better is not None:
            match kind_of(right, better, plan.policy.min_p_better):
                case "pair":
                    self.chances["pairs"].append(better)
                case "lesson":
                    self.chances["lessons"].append(right)
                case _:
                    self.n_doubtful += 1
        elif right and better is None and poll.votes:
            self.chances["positives"].append(right)

    @property
    def doubts_first(self) -> bool:
        """Return whether a run would ask a second teacher to confirm what the first one has."""
        return copies_agent(self._n_outvoted, self._n_against)

    def right(self) -> dict[str, Any]:
        """Return the shares of right pairs, lessons, and positives, and what to say of the teachers."""
        assumed = dict(zip(self.chances, _ASSUMED_RIGHT, strict=True))
        if not self.plan.policy.min_p_better:
            assumed["pairs"] = _ALL_PAIRS_RIGHT
        if len(self.labels) < _MIN_STATES:
            return {f"{name}_right": share for name, share in assumed.items()}
        model = self._scores.reliability(Calibration())
        shares = {
            f"{name}_right": _mean_range(values, assumed[name])
            for name, values in self.chances.items()
        }
        return {**shares, "words": (*model.words(), *_advice(model))}


def _option(group: int, before: Counter[int]) -> int:
    if group == 0:
        return _WITH_AGENT
    most = max((n for number, n in before.items() if number), default=0)
    return _WITH_MOST if before[group] == most > 0 else _ALONE


def _mean_range(values: Sequence[float], assumed: Range) -> Range:
    """Return where a mean probability lies, as far as so few values tell."""
    if not values:
        return assumed
    mean = float(np.mean(values))
    half = 1.64 * (mean * (1 - mean) * _ALIKE / len(values)) ** 0.5
    return round(max(0.0, mean - half), 4), round(min(1.0, mean + half), 4)


class _Votes:
    """The drawn votes of every state (S) and draw (D): who is asked there, and what comes of it."""

    def __init__(
        self, plan: Plan, order: Sequence[int], seen: _Answered, chance: np.random.Generator
    ) -> None:
        shape = len(plan.states), _N_DRAWS
        self.asked = {number: np.zeros(shape, dtype=bool) for number in order}
        self.pairs = np.zeros(shape, dtype=bool)
        self.lessons = np.zeros(shape, dtype=bool)
        self.positives = np.zeros(shape, dtype=bool)
        self.answers = np.zeros(shape, dtype=bool)
        self.first_agrees = np.zeros(shape, dtype=bool)
        """Whether the first answer is for the agent's action."""
        self.is_left = np.zeros(shape, dtype=bool)
        """Whether anybody is still asked at a state."""
        self._plan, self._order, self._seen, self._chance = plan, order, seen, chance
        self._agreement = _Agreement(seen.counts, chance)
        kinds = len(seen.chances["pairs"]), len(seen.chances["lessons"]), seen.n_doubtful
        self._shares = np.cumsum(chance.dirichlet(np.add(_SHARES, kinds), _N_DRAWS), axis=1)
        if not plan.policy.min_p_better:
            self._shares[:] = 1.0
        self._ids = {task.state_index: task.state_id for task in plan.tasks.values()}
        groups: dict[_Kin, list[int]] = defaultdict(list)
        for state in range(len(plan.states)):
            is_left = any(
                (state, number) in plan.tasks and (state, number) not in plan.known
                for number in order
            )
            if is_left:
                groups[seen.kin[state]].append(state)
        for kin, states in groups.items():
            self._draw(kin, np.array(states))

    def _draw(self, kin: _Kin, states: Array) -> None:
        """Draw the answers at states at which the teachers count alike."""
        plan, policy, threshold = self._plan, self._plan.policy, self._plan.policy.threshold
        open_ = plan.tasks.keys() - plan.known.keys()
        standings: dict[_Standing, int] = {_START: 0}
        at = np.zeros((len(states), _N_DRAWS), dtype=np.int32)
        explores = np.array([policy.explores(self._ids[state]) for state in states])[:, None]
        labels = [self._seen.labels.get(int(state), []) for state in states]
        for place, number in enumerate(self._order):
            names = list(standings)
            is_open = np.array([_can_pair(each, kin[place:], threshold) for each in names])
            is_open |= np.array([self._seen.doubts_first and each == (1, 0, ()) for each in names])
            goes_on = explores | is_open[at] if policy.is_in_turn else np.ones(at.shape, dtype=bool)
            moved = [
                [_moved(each, option, is_own=kin[place]) for option in range(4)] for each in names
            ]
            nexts = np.array(
                [[standings.setdefault(to, len(standings)) for to in row] for row in moved]
            )
            chances = np.stack([self._agreement.chances(place, each) for each in names])
            drawn = self._chance.random(at.shape)
            limits = chances[at, np.arange(_N_DRAWS)]
            options = sum((drawn > limits[..., i]).astype(np.int8) for i in range(3))
            told = np.array([known[place] if place < len(known) else -1 for known in labels])
            options = np.where(told[:, None] >= 0, told[:, None], options)
            if place == 0:
                self.first_agrees[states] = options == _WITH_AGENT
            at = np.where(goes_on, nexts[at, options], at)
            is_left = [(s, number) in open_ for s in states.tolist()]
            self.asked[number][states] = goes_on & np.array(is_left)[:, None]
            self.is_left[states] |= self.asked[number][states]
        ends = [(_decision(each, threshold), each) for each in standings]
        left = self.is_left[states]
        agreed = left & np.array([end == "pair" for end, _ in ends])[at]
        drawn = self._chance.random(at.shape)
        pairs, lessons = self._shares[:, 0], self._shares[:, 1]
        self.pairs[states] = agreed & (drawn < pairs)
        self.lessons[states] = agreed & (pairs <= drawn) & (drawn < lessons)
        confirmed = [end == "agreement" or (each[0] > 0 and not each[2]) for end, each in ends]
        self.positives[states] = left & np.array(confirmed)[at]
        # As in extraction, several that all differ make none.
        alone = [
            end in ("no_consensus", "too_few_answers")
            and sum(votes for votes, _ in each[2]) == 1
            and not is_so
            for (end, each), is_so in zip(ends, confirmed, strict=True)
        ]
        self.answers[states] = left & np.array(alone)[at]


class _Agreement:
    """Drawn chances of what the next answer at a state does."""

    def __init__(
        self, counts: Mapping[_Context, Counter[int]], chance: np.random.Generator
    ) -> None:
        self._counts, self._chance = counts, chance
        self._drawn: dict[_Context, Array] = {}
        low, high = _AGREEMENT
        teachers = np.sqrt(chance.uniform(low, high, _N_CANDIDATES))
        agent = np.minimum(0.95, teachers * chance.uniform(*_AGENT, _N_CANDIDATES))
        fits = np.zeros(_N_CANDIDATES)
        for key, seen in counts.items():
            assumed = _assumed(agent, teachers, *key[1:])
            told = np.array([seen[option] for option in (_WITH_AGENT, _WITH_MOST, _ALONE)])
            fits += (np.log(np.maximum(assumed, 1e-6)) * told).sum(axis=1) / _ALIKE
        weights = np.exp(fits - fits.max())
        picked = chance.choice(_N_CANDIDATES, _N_DRAWS, p=weights / weights.sum())
        self._agent, self._teachers = agent[picked], teachers[picked]
        n_bad = sum(seen[_UNREAD] for seen in counts.values())
        n_all = sum(seen.total() for seen in counts.values())
        self._unread = chance.beta(_UNUSABLE[0] + n_bad, _UNUSABLE[1] + n_all - n_bad, _N_DRAWS)

    def chances(self, place: int, at: _Standing) -> Array:
        """Return the cumulative chances of the first three options, by draw."""
        key = _context(place, at)
        if key not in self._drawn:
            assumed = _assumed(self._agent, self._teachers, *key[1:])
            seen = self._counts.get(key, Counter())
            told = np.array([seen[option] for option in (_WITH_AGENT, _WITH_MOST, _ALONE)])
            shares = assumed
            if told.any():
                weights = self._chance.gamma(np.maximum(assumed * _PRIOR + told / _ALIKE, 1e-9))
                shares = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)
            parts = [self._unread[:, None], shares[:, :2] * (1 - self._unread[:, None])]
            self._drawn[key] = np.cumsum(np.concatenate(parts, axis=1), axis=1)
        return self._drawn[key]


def _assumed(agent: Array, teachers: Array, n_agent: int, n_most: int, n_groups: int) -> Array:
    """Return how likely an answer joins the agent, one of the largest other groups, or nobody.

    A state has a natural action, which agent and teachers take with their probabilities. Others
    join an action that was taken with `_TEMPTED`, or take one of their own.
    """
    astray = 1 - teachers
    n_others = n_most * n_groups
    strayed = astray**n_others * _TEMPTED ** (max(0, n_most - 1) * n_groups)
    natural_agents = agent * teachers**n_agent * strayed
    tempted = (1 - agent) * (astray * _TEMPTED) ** n_agent
    natural_most = (
        tempted * teachers**n_most * astray ** (n_others - n_most) * bool(n_most) * n_groups
    )
    total = natural_agents + natural_most + tempted * strayed
    is_agents, is_most = natural_agents / total, natural_most / total
    joins_agent = is_agents * teachers + (1 - is_agents) * astray * _TEMPTED
    joins_most = is_most * teachers + (1 - is_most) * astray * _TEMPTED * bool(n_most)
    return np.stack([joins_agent, joins_most, 1 - joins_agent - joins_most], axis=1)


# --- what it costs --------------------------------------------------------------------------


def _lanes(
    plan: Plan, votes: _Votes, teachers: Sequence[int], chance: np.random.Generator
) -> list[tuple[Array, TeacherEstimate | None]]:
    """Play the lanes of all teachers, and again with a larger share for looks if the run is small."""

    def played(share: float) -> list[tuple[Array, TeacherEstimate | None]]:
        return [_lane_usd(plan, number, votes.asked[number], chance, share) for number in teachers]

    lanes = played(plan.looks_share)
    total_usd = sum(float(usd_S_D.sum(axis=0).mean()) for usd_S_D, _ in lanes)
    first_usd = total_usd / (1 + plan.looks_share)  # or more
    if 0 < plan.looks_share * first_usd < LEAST_LOOKS_USD:
        return played(LEAST_LOOKS_USD / first_usd)
    return lanes


def _lane_usd(
    plan: Plan, number: int, asked: Array, chance: np.random.Generator, looks_share: float
) -> tuple[Array, TeacherEstimate | None]:
    """Play the lanes of a teacher: what each of its calls costs, by state and draw."""
    teacher = plan.teachers[number]
    price, learned = plan.prices[teacher.name], plan.learned.get(teacher.name, Learned())
    hit_rate, per_byte, length = _drawn_sizes(learned, chance)
    looks = np.zeros(_N_DRAWS)
    if plan.max_looks:
        shape, rate = learned.looks
        looks = np.minimum(chance.gamma(shape, 1 / rate, _N_DRAWS), plan.max_looks)
    usd_S_D = np.zeros(asked.shape, dtype=np.float32)
    n_calls = n_prompt = n_cached = n_completion = n_bound = 0.0
    in_cache: dict[int, Array] = {}
    seen: set[str] = set()
    is_written = price.cache_write > price.prompt
    mine = [task for (_, who), task in plan.tasks.items() if who == number]
    for task in mine:
        state, size = task.state_index, task.question.size
        before = in_cache.get(task.previous.state_index) if task.previous else None
        weighted = size.n_weighted_bytes
        last = np.zeros(_N_DRAWS) if before is None else before
        if (state, number) in plan.known or task.is_asked or task.question.sha in seen:
            in_cache[state] = np.full(_N_DRAWS, weighted)
            continue
        made = asked[state]
        if made.any():
            seen.add(task.question.sha)
            n_tokens = np.minimum(weighted * per_byte, size.bound_tokens)
            cached = np.minimum(last * per_byte, n_tokens)
            cached *= (cached >= MIN_CACHED_TOKENS) & (chance.random(_N_DRAWS) < hit_rate)
            n_student = plan.market.places[state].n_answer_bytes
            limit = task.question.max_completion_tokens
            answer = np.minimum(learned.answer_tokens(n_student, limit) * length, limit)
            written = price.cache_write if is_written else price.prompt
            fixed = answer * price.completion + price.request
            first = (n_tokens - cached) * written + cached * price.cache_read + fixed
            # Each look is a further call with an answer; the prompt before it is in the cache, if it is long.
            again = n_tokens * hit_rate * (n_tokens >= MIN_CACHED_TOKENS)
            longer = n_tokens + learned.look_tokens
            look = (longer - again) * written + again * price.cache_read + fixed
            asked_on = np.where(
                looks * look <= looks_share * first,
                looks,
                looks_share * first / np.maximum(look, 1e-9),
            )
            usd_S_D[state] = (first + asked_on * look) * made / (1000 * NANO)
            n_calls += made.mean()
            n_prompt += ((n_tokens + asked_on * longer) * made).mean()
            n_cached += ((cached + asked_on * again) * made).mean()
            n_completion += (answer * (1 + asked_on) * made).mean()
            bound = price.bound_nano(_most_tokens(task, learned), limit)
            n_bound += (made * (1 + asked_on)).mean() * bound
        in_cache[state] = np.where(made, weighted, last)
    if not n_calls:
        return usd_S_D, None
    row = TeacherEstimate(
        teacher=teacher.name,
        model=teacher.model,
        n_calls=round(n_calls),
        n_prompt_tokens=round(n_prompt),
        n_cached_tokens=round(n_cached),
        n_completion_tokens=round(n_completion),
        expected_usd=round(float(usd_S_D.sum(axis=0).mean()), 9),
        bound_usd=usd(round(n_bound)),
        price_source=price.source,
        price_date=price.date,
        adaptations=plan.adaptations.get(teacher.name, ()),
    )
    return usd_S_D, row


def _most_tokens(task: LaneQuestion, learned: Learned) -> int:
    """Return the tokens that are reserved for a prompt, once the teacher has counted its beginning."""
    size, before = task.question.size, task.previous
    if before is None:
        return size.bound_tokens
    added = size.added_bound_tokens(before.question.size)
    return min(size.bound_tokens, learned.expected_tokens(before.question.size) + added)


def _drawn_sizes(learned: Learned, chance: np.random.Generator) -> tuple[Array, Array, Array]:
    """Draw a teacher's share of cache hits, its tokens a byte, and its answers' length over the expected one."""
    n = learned.n if learned.n_expected_cached else 0
    low, high = _CACHE_HITS
    hits = chance.uniform(low, high, _N_DRAWS)
    if n:
        share = min(1.0, learned.n_cached / learned.n_expected_cached)
        strength = n / _UNLIKE
        told, assumed = share * strength, hits * _HITS_PRIOR
        hits = chance.beta(told + assumed, strength + _HITS_PRIOR - told - assumed + 1e-3)
    tokens = learned.tokens_per_byte * np.exp(chance.normal(0, learned.spread, _N_DRAWS))
    doubt = 0.35 if not learned.has_lengths else 0.03 + 0.5 / learned.n_answers**0.5
    return hits, tokens, np.exp(chance.normal(0, doubt, _N_DRAWS))


# --- what to buy ----------------------------------------------------------------------------


def _advice(model: Reliability) -> list[str]:
    if not model.words():
        return []
    best = max(model.accuracy(rater) for rater in model.raters[1:])
    gain = best - model.accuracy(AGENT)
    doubt = (
        "teachers that make the same mistakes look stronger than they are: check forty pairs in "
        "replay-pipeline look first"
    )
    return [advice(gain), *([doubt] if gain > SAME else [])]


def advice(gain: float) -> str:
    """Return what to buy, as the tables of `recipes/what_a_dollar_buys` have it.

    `gain` is how much more often the best teacher is right than the model to train.
    """
    if gain > SAME:
        return (
            "buy and train on what they say; that agreement is worth more than one of them at more states "
            "is not shown"
        )
    if gain < -SAME:
        return "don't buy: where they differ from that model they are mostly wrong"
    return (
        "teachers that are as good as that model gain it little: check some pairs on the page of "
        "replay-pipeline look before you buy more"
    )
