"""The rules by which a replay buys: named gates, and the votes that they look at.

The setting `gates` names them. `buying.py` follows them when it chooses the next state and teacher.
Every gate counts its savings. A call that was drawn by chance records its propensity, so that later
estimates can weight it.

- `cheap_first`: cheapest teacher first; stop when no pair is possible any more.
- `wide_first`: the same, but the first answer everywhere comes before a second one anywhere.
- `wide_first:E`, `cheap_first:E`: the same, except at a random share E of such states.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from replay_pipeline.actions import Action, agreement_level, agrees_at, canonical_action
from replay_pipeline.actions.tools import ToolList
from replay_pipeline.actions.votes import Panel, Vote, family_of_answer, read_answer
from replay_pipeline.errors import ConfigError
from replay_pipeline.judge.rule import Standing, rule, standing_of_votes
from replay_pipeline.types import (
    MIN_P_BETTER,
    AgreementLevel,
    Message,
    TeacherAction,
    TraceState,
    family_of_model,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateDecision:
    """A decision on whether to ask the next teacher. `gate` is the one that decided, or None."""

    gate: str | None = None
    reason: str | None = None
    """Why not to ask, or None to ask."""
    propensity: float = 1.0
    """Probability with which this call is made."""


ASK = GateDecision()


@dataclass(slots=True)
class Poll:
    """The votes at one state so far, counted by the same rules as when pairs are made."""

    state: TraceState
    level: AgreementLevel
    threshold: int
    count_own_family: bool = False
    votes: list[Vote] = field(default_factory=list)
    own: list[Vote] = field(default_factory=list)
    """Valid answers of the student's own family, if it has no vote."""
    n_asked: int = 0
    student: Action = field(init=False)
    toolbox: ToolList | None = field(init=False)

    def __post_init__(self) -> None:
        tools = self.state.get("tools")
        self.toolbox = ToolList(tools) if tools else None
        self.student = _read_student(self.state, self.toolbox)

    def add(self, answer: TeacherAction) -> None:
        """Count an answer. Without a usable action, it counts as asked but not as a vote."""
        self.n_asked += 1
        family = family_of_answer(answer)
        try:
            action = read_answer(answer, cwd=self.state.get("cwd"), tools=self.toolbox)
        except Exception:
            # What a model wrote may be anything: unreadable, it is no vote, and no run ends of it.
            logger.exception("the answer of %s at %s", answer.teacher, answer.state_id)
            return
        if action is None or not action.is_valid:
            return
        votes = self.votes if self.has_vote(family) else self.own
        votes.append(Vote(family, answer, action))

    def has_vote(self, family: str) -> bool:
        """Return whether teachers of a family vote here. By default, the agent's own family does not."""
        return self.count_own_family or family != family_of_model(self.state.get("student_model"))

    def agrees_with_student(self, action: Action) -> bool:
        """Return whether `action` agrees with the agent's action."""
        return agrees_at(self.level, agreement_level(action, self.student))

    def standing(self) -> Standing:
        """Count the families on each side."""
        return standing_of_votes(
            Panel(self.votes).lead(self.level),
            self.votes,
            self.own,
            is_agents=self.agrees_with_student,
            is_same=lambda one, other: agrees_at(self.level, agreement_level(one, other)),
        )

    @property
    def is_confirmed_once(self) -> bool:
        """Return whether one family took the agent's action, and nobody another one."""
        is_alone = len({vote.family for vote in self.votes}) == 1 and not self.own
        return is_alone and all(self.agrees_with_student(vote.action) for vote in self.votes)

    @property
    def is_outvoted(self) -> bool:
        """Return whether several families other than the first agree on an action against the agent."""
        lead = Panel(self.votes[1:]).lead(self.level)
        return (
            lead is not None
            and lead.consensus.n_families > 1
            and not self.agrees_with_student(lead.consensus.action)
        )

    @property
    def is_taken(self) -> bool:
        """Return whether the first vote is for the agent's action."""
        return bool(self.votes) and self.agrees_with_student(self.votes[0].action)

    def makes_pair(self) -> bool:
        """Return whether enough teachers agree on an action that the agent did not take."""
        return self.student.is_valid and rule(self.standing(), self.threshold) == "pair"

    def is_hopeless(self, asked_next: Set[str]) -> bool:
        """Return whether no answer of these families could still make a pair.

        A state that has a pair so far isn't settled either. The next answer may side with the
        student, or show that the winning action is the student's in other words.
        """
        if not self.student.is_valid:
            return True
        families = {family for family in asked_next if self.has_vote(family)}
        against = [vote for vote in self.votes if not self.agrees_with_student(vote.action)]
        # A later action may join any group, or stand between two: it counts for all of them.
        n_most = self._most(against, families)
        n_own = len({vote.family for vote in self.own} | (asked_next - families))
        now = self.standing()
        best = Standing(n_most, n_most, 0, n_most + n_own, now.n_against, is_agents=False)
        return n_most < now.n_leading or rule(best, self.threshold) != "pair"

    def _most(self, votes: Sequence[Vote], families: Set[str]) -> int:
        """Return families in the largest group that `votes` could become with those of `families`."""
        groups = Panel(votes).groups(self.level) if votes else []
        return max(
            (len({v.family for v in group} | families) for group in groups), default=len(families)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rules by which one run buys answers."""

    level: AgreementLevel = "effect"
    threshold: int = 2
    count_own_family: bool = False
    """Whether teachers of the student's own family vote."""
    min_p_better: float = MIN_P_BETTER
    """What a pair needs, by which estimates tell pairs from lessons. It decides no question."""
    stops_in_vain: str | None = None
    """The gate that asks the cheapest teacher first, and stops when no pair is possible any more."""
    is_wide: bool = False
    """Whether the cheapest teacher is asked everywhere before a second one is anywhere."""
    explored: float = 0.0
    """Share of the states where it would stop at which all teachers are asked all the same."""

    @property
    def is_in_turn(self) -> bool:
        """Return whether teachers are asked one after the other, cheapest first."""
        return self.stops_in_vain is not None

    def among(self, n_families: int) -> "Policy":
        """Return the policy for teachers of so many families.

        If they are too few to make any pair, ruling pairs out would leave nobody to ask.
        """
        return self if n_families >= self.threshold else replace(self, stops_in_vain=None)

    def poll(self, state: TraceState) -> Poll:
        """Open a poll at `state`."""
        # Without its messages: a poll may be open for as long as the run.
        return Poll({**state, "messages": []}, self.level, self.threshold, self.count_own_family)

    def verdict(self, poll: Poll, left: Iterable[str]) -> GateDecision:
        """Decide whether to ask the next teacher, if families `left` can still be asked.

        A decision with a propensity below 1 holds for all remaining teachers, since a partial set
        of answers would teach nothing.
        """
        name = self.stops_in_vain
        if name is None or not poll.is_hopeless(set(left)):
            return ASK
        if not self.explores(poll.state["state_id"]):
            return GateDecision(gate=name, reason="pair_impossible")
        return GateDecision(gate=name, propensity=self.explored)

    def explores(self, state_id: str) -> bool:
        """Return whether everybody is asked at a state, even if no pair is possible there."""
        return _chance(state_id, self.stops_in_vain or "") < self.explored


_FEWEST_OUTVOTED = 3
_MOST_OUTVOTED = 0.45
"""Where others agree against the agent, a teacher that thinks for itself sides with the agent so often at most: among
models of different makers in 3 to 47 %, on average in 22 %."""


def copies_agent(n_outvoted: int, n_against: float) -> bool:
    """Return whether a teacher takes the agent's action where it shouldn't, so that its vote confirms little.

    Args:
        n_outvoted: states drawn by chance at which it took the agent's action, all were asked, and
            several others agree on another one.
        n_against: states at which it took another action, and several others agree against the
            agent, times the share that is drawn.
    """
    return n_outvoted >= _FEWEST_OUTVOTED and n_outvoted > _MOST_OUTVOTED * (n_outvoted + n_against)


def parse_gates(
    names: Iterable[str],
    *,
    level: AgreementLevel = "effect",
    threshold: int = 2,
    count_own_family: bool = False,
    min_p_better: float = MIN_P_BETTER,
) -> Policy:
    """Return the policy that these gates make.

    Raises:
        ConfigError: a name is unknown, or its share is no number from 0 to 1.
    """
    stops_in_vain, is_wide, explored = None, False, 0.0
    for name in names:
        kind, colon, share = name.partition(":")
        if kind not in ("wide_first", "cheap_first"):
            raise ConfigError(
                f"gate {name!r} is not one of wide_first, cheap_first, wide_first:0.1"
            )
        stops_in_vain, is_wide = name, kind == "wide_first"
        explored = _share(name, share) if colon else 0.0
    return Policy(
        level=level,
        threshold=threshold,
        count_own_family=count_own_family,
        min_p_better=min_p_better,
        stops_in_vain=stops_in_vain,
        is_wide=is_wide,
        explored=explored,
    )


def _read_student(state: TraceState, tools: ToolList | None) -> Action:
    """Read the recorded action; one that can't be read is an empty one, which is no valid vote."""
    try:
        action: Message | str = state["student_action"]
        if isinstance(action, str):
            action = {"role": "assistant", "content": action}
        return canonical_action(action, cwd=state.get("cwd"), tools=tools)
    except Exception:
        logger.exception("the recorded action of %s", state["state_id"])
        return canonical_action({"role": "assistant", "content": ""})


def _chance(state_id: str, name: str) -> float:
    """Return a number in [0, 1) that is the same on every run, so that exploration can be repeated."""
    digest = hashlib.blake2b(f"{name}\0{state_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _share(name: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"gate {name!r}: {number} is not a number from 0 to 1")
    return value
