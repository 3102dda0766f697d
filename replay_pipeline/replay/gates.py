"""Value of information: in which order to replay, and which teachers to still ask.

A gate is a small rule with a name. Rules about teachers look at the votes so far, cheapest teacher
first. Every rule counts what it saves, and a call that was made by chance carries its propensity, so
that later estimates can weigh it.

    error_sites_first     where the money is short, sessions of which most states went wrong are
                          asked first, each as far as the last of these
    cheap_first           cheapest teacher first; stop once no pair can come of it
    cheap_screen:E        stop when the cheapest teacher does what the student did, but for a share
                          E of such states, which are asked on
    max_usd_per_pair:X    stop when the next votes cost more than X dollars per pair they may bring
    free_vote             does nothing by itself any more: the recorded action always counts
    value                 buy where a dollar brings most right pairs: states and teachers are chosen
                          by what the answers so far say of who is right (`replay/buying.py`). Alone,
                          or with max_usd_per_pair:X, the most that is paid for a right pair
"""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from replay_pipeline.actions import Action, agreement_level, agrees_at, canonical_action
from replay_pipeline.actions.validity import ToolList
from replay_pipeline.actions.votes import Panel, Vote, family_of_answer, read_answer
from replay_pipeline.errors import ConfigError
from replay_pipeline.families import family_of_model
from replay_pipeline.types import (
    FAILURES,
    AgreementLevel,
    GateReport,
    Message,
    TeacherAction,
    TeacherSpec,
    TraceState,
)

logger = logging.getLogger(__name__)

DEFAULT_GATES = ("error_sites_first", "cheap_screen:0.1", "cheap_first")
"""What most runs want: little lost, most of the money saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether to ask the next teacher. `gate` names the rule that decided; `None` if none did."""

    gate: str | None = None
    reason: str | None = None
    """Why not to ask; `None` to ask."""
    propensity: float = 1.0
    """With which probability this call is made."""


ASK = Verdict()


@dataclass(slots=True)
class Poll:
    """The votes at one state so far. They are counted as they are when pairs are made."""

    state: TraceState
    level: AgreementLevel
    threshold: int
    count_own_family: bool = False
    votes: list[Vote] = field(default_factory=list)
    own: list[Vote] = field(default_factory=list)
    """Valid answers of the student's own family, where it has no vote."""
    siding: set[str] = field(default_factory=set)
    """Families, voting or not, that would do what the student did."""
    n_asked: int = 0
    explored: Verdict = ASK
    """Why calls at this state are made although a gate would have saved them."""
    student: Action = field(init=False)
    toolbox: ToolList | None = field(init=False)

    def __post_init__(self) -> None:
        tools = self.state.get("tools")
        self.toolbox = ToolList(tools) if tools else None
        self.student = _read_student(self.state, self.toolbox)

    def add(self, answer: TeacherAction) -> None:
        """Count an answer; one without a usable action is asked but no vote."""
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
        if self.agrees_with_student(action):
            self.siding.add(family)
        votes = self.votes if self.has_vote(family) else self.own
        votes.append(Vote(family, answer, action))

    @property
    def family(self) -> str | None:
        """The student's family."""
        return family_of_model(self.state.get("student_model"))

    def has_vote(self, family: str) -> bool:
        """Whether teachers of a family vote here: the student's own do not by default."""
        return self.count_own_family or family != self.family

    def agrees_with_student(self, action: Action) -> bool:
        """Whether `action` is what the student did."""
        return agrees_at(self.level, agreement_level(action, self.student))

    def makes_pair(self) -> bool:
        """Whether enough teachers agree, undisputed, on an action that the student did not take."""
        if not self.student.is_valid:
            return False
        verdict = Panel(self.votes).verdict(self.level, self.threshold)
        winner = verdict.winner
        if winner is None or any(self.agrees_with_student(vote.action) for vote in winner.votes):
            return False
        families = {vote.family for vote in winner.votes}
        for vote in self.own:
            if agrees_at(self.level, agreement_level(vote.action, winner.action)):
                families.add(vote.family)
        n_next = verdict.n_leading - verdict.margin
        return not self.siding or len(families) > max(n_next, 1 + len(self.siding))

    def is_hopeless(self, asked_next: Set[str]) -> bool:
        """Whether no answers of these families can bring a pair.

        That a pair stands says nothing: the next answer may side with the student, or join the
        winners and be what the student did in other words.
        """
        if not self.student.is_valid:
            return True
        families = {family for family in asked_next if self.has_vote(family)}
        n_leading = Panel(self.votes).verdict(self.level, self.threshold).n_leading
        against = [vote for vote in self.votes if not self.agrees_with_student(vote.action)]
        # A later action may join any group, or stand between two: it counts for all of them.
        n_most = self._most(against, families)
        if n_most < max(self.threshold, n_leading):
            return True
        # With as many families on the student's side, the pair would be a dispute.
        n_own = len({vote.family for vote in self.own} | (asked_next - families))
        return bool(self.siding) and n_most + n_own <= 1 + len(self.siding)

    def _most(self, votes: Sequence[Vote], families: Set[str]) -> int:
        """Families in the largest group that `votes` could become with those of `families`."""
        groups = Panel(votes).groups(self.level) if votes else []
        return max(
            (len({v.family for v in group} | families) for group in groups), default=len(families)
        )


TeacherRule = Callable[[Poll, Sequence[TeacherSpec], float], Verdict | None]
"""Given the votes, the teachers still to ask and the dollars they would take: a verdict or none."""


@dataclass(slots=True)
class Gates:
    """The gates of one run, applied in order."""

    names: tuple[str, ...] = ()
    level: AgreementLevel = "effect"
    threshold: int = 2
    count_own_family: bool = False
    """Whether teachers of the student's own family vote."""
    is_ordered_by_errors: bool = False
    is_by_value: bool = False
    max_usd_per_pair: float | None = None
    rules: list[TeacherRule] = field(default_factory=list)
    n_saved: Counter[str] = field(default_factory=Counter)
    saved_usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    n_explored: Counter[str] = field(default_factory=Counter)
    history: dict[int, list[int]] = field(default_factory=dict)
    """By number of teachers asked: pairs, states."""

    @property
    def is_sequential(self) -> bool:
        """Whether teachers are asked one after the other."""
        return bool(self.rules)

    def poll(self, state: TraceState) -> Poll:
        """Open a poll at `state`."""
        # Without its messages: a poll may be open for as long as the run.
        return Poll({**state, "messages": []}, self.level, self.threshold, self.count_own_family)

    def judge(self, poll: Poll, left: Sequence[TeacherSpec], left_usd: float) -> Verdict:
        """Whether to ask the first of the teachers that are `left`.

        At a state that is explored everybody is asked: what was cut short would teach nothing.
        """
        for rule in self.rules:
            if poll.explored.gate:
                break
            verdict = rule(poll, left, left_usd)
            if verdict is not None and verdict.reason:
                return verdict
            if verdict is not None:
                poll.explored = verdict
        if poll.explored.gate:
            self.n_explored[poll.explored.gate] += 1
        return poll.explored

    def saved(self, gate: str, cost_usd: float) -> None:
        """Count a call that was not made."""
        self.n_saved[gate] += 1
        self.saved_usd[gate] += cost_usd

    def learn(self, poll: Poll) -> None:
        """Remember how a state ended, for `max_usd_per_pair`."""
        counts = self.history.setdefault(poll.n_asked, [0, 0])
        counts[0] += poll.makes_pair()
        counts[1] += 1

    def reports(self) -> tuple[GateReport, ...]:
        """What each gate saved."""
        return tuple(
            GateReport(
                gate=name,
                n_calls_saved=self.n_saved[name],
                saved_usd=round(self.saved_usd.get(name, 0.0), 9),
                n_explored=self.n_explored[name],
            )
            for name in self.names
        )


def parse_gates(
    names: Iterable[str],
    *,
    level: AgreementLevel = "effect",
    threshold: int = 2,
    count_own_family: bool = False,
) -> Gates:
    """The gates of these names, in order.

    Raises:
        ConfigError: a name is unknown or its number is missing or out of range.
    """
    gates = Gates(tuple(names), level, threshold, count_own_family)
    for name in gates.names:
        kind, _, number = name.partition(":")
        if kind not in _KNOWN:
            raise ConfigError(f"gate {name!r} is not one of {', '.join(_KNOWN.values())}")
        if (":" in _KNOWN[kind]) != bool(number):
            raise ConfigError(f"gate {name!r}: write it as {_KNOWN[kind]}")
        if kind == "error_sites_first":
            gates.is_ordered_by_errors = True
        elif kind == "cheap_first":
            gates.rules.append(_exact_stop(name))
        elif kind == "cheap_screen":
            gates.rules.append(_cheap_screen(name, _number(name, number, 1.0)))
        elif kind == "value":
            gates.is_by_value = True
        elif kind == "max_usd_per_pair":
            gates.max_usd_per_pair = _number(name, number, float("inf"))
            gates.rules.append(_marginal(name, gates.max_usd_per_pair, gates))
    if gates.is_by_value:
        others = {name.partition(":")[0] for name in gates.names} - {"value", "max_usd_per_pair"}
        if others:
            raise ConfigError(
                f"gate 'value' chooses by itself: take out {', '.join(sorted(others))}"
            )
        gates.rules.clear()
    return gates


_KNOWN = {
    "error_sites_first": "error_sites_first",
    "cheap_first": "cheap_first",
    "cheap_screen": "cheap_screen:0.1",
    "max_usd_per_pair": "max_usd_per_pair:0.5",
    "free_vote": "free_vote",
    "value": "value",
}


def is_error_site(state: TraceState) -> bool:
    """Whether the recorded action went wrong, was rejected or taken back."""
    return bool(
        state.get("outcome") in FAILURES
        or state.get("error_kind")
        or state.get("hint")
        or state.get("alternatives")
    )


def _read_student(state: TraceState, tools: ToolList | None) -> Action:
    """Read the recorded action; one that can't be read is an empty one, which is no valid vote."""
    try:
        action = _message(state["student_action"])
        return canonical_action(action, cwd=state.get("cwd"), tools=tools)
    except Exception:
        logger.exception("the recorded action of %s", state["state_id"])
        return canonical_action({"role": "assistant", "content": ""})


def _exact_stop(name: str) -> TeacherRule:
    def rule(poll: Poll, left: Sequence[TeacherSpec], left_usd: float) -> Verdict | None:  # noqa: ARG001
        """Stop once no further vote can bring a pair; so every pair has all its votes."""
        if poll.is_hopeless({teacher.vendor for teacher in left}):
            return Verdict(gate=name, reason="pair_impossible")
        return None

    return rule


def _cheap_screen(name: str, share: float) -> TeacherRule:
    def rule(poll: Poll, left: Sequence[TeacherSpec], left_usd: float) -> Verdict | None:  # noqa: ARG001
        """Where the cheapest teacher does what the student did, a pair is unlikely."""
        if poll.n_asked != 1 or len(poll.votes) != 1:
            return None
        if not poll.agrees_with_student(poll.votes[-1].action):
            return None
        if _chance(poll.state["state_id"], name) < share:
            return Verdict(gate=name, propensity=share)
        return Verdict(gate=name, reason="screened")

    return rule


def _marginal(name: str, limit_usd: float, gates: Gates) -> TeacherRule:
    def rule(poll: Poll, left: Sequence[TeacherSpec], left_usd: float) -> Verdict | None:  # noqa: ARG001
        """Compare what the teachers left would take with the pairs that such states brought."""
        if not poll.n_asked:
            return None
        pairs, states = 0, 0
        for n_asked, (n_pairs, n_states) in gates.history.items():
            if n_asked > poll.n_asked:
                pairs, states = pairs + n_pairs, states + n_states
        share = (pairs + 1) / (states + 2)
        return Verdict(gate=name, reason="too_dear") if left_usd > limit_usd * share else None

    return rule


def measure_gates(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    actions: Iterable[TeacherAction],
    names: Iterable[str],
    *,
    level: AgreementLevel = "effect",
    threshold: int = 2,
    count_own_family: bool = False,
) -> tuple[GateReport, ...]:
    """What gates save and lose, measured on answers that are all there.

    Walks the recorded answers as a run with these gates would have asked for them. The last
    report, `all`, has the gates together: the calls and dollars that would have been saved, and
    how many of the pairs of asking everyone would have been lost.

    Args:
        states: the states that were replayed.
        teachers: the teachers that were asked, cheapest first.
        actions: their answers.
        names: gates by name.
        level: how strictly actions must agree.
        threshold: families that make a consensus.
        count_own_family: whether teachers of the student's own family vote.
    """
    names = tuple(names)
    options: dict[str, Any] = {
        "level": level,
        "threshold": threshold,
        "count_own_family": count_own_family,
    }
    answers = {(action.state_id, action.teacher): action for action in actions}
    reports = [
        _measured(states, teachers, answers, parse_gates(each, **options))
        for each in [*((name,) for name in names), names]
    ]
    return tuple(
        replace(report, gate=name) for report, name in zip(reports, [*names, "all"], strict=True)
    )


def _measured(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec],
    answers: Mapping[tuple[str, str], TeacherAction],
    gates: Gates,
) -> GateReport:
    n_saved = n_lost = n_pairs = n_explored = 0
    saved_usd = 0.0
    for state in states:
        everyone = [answers.get((state["state_id"], teacher.name)) for teacher in teachers]
        full = gates.poll(state)
        for answer in everyone:
            if answer is not None:
                full.add(answer)
        poll = gates.poll(state)
        for place, answer in enumerate(everyone):
            if answer is None:
                continue
            verdict = ASK
            if gates.is_sequential:
                left_usd = sum(each.cost_usd for each in everyone[place:] if each)
                verdict = gates.judge(poll, teachers[place:], left_usd)
            if verdict.reason:
                n_saved += 1
                saved_usd += answer.cost_usd
                continue
            n_explored += verdict.propensity < 1
            poll.add(answer)
        gates.learn(poll)
        n_pairs += full.makes_pair()
        n_lost += full.makes_pair() and not poll.makes_pair()
    return GateReport(
        gate="",
        n_calls_saved=n_saved,
        saved_usd=round(saved_usd, 9),
        n_explored=n_explored,
        n_pairs=n_pairs,
        n_pairs_lost=n_lost,
    )


def _chance(state_id: str, name: str) -> float:
    """A number in [0, 1) that is the same on every run, so that exploration can be repeated."""
    digest = hashlib.blake2b(f"{name}\0{state_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _number(name: str, number: str, most: float) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise ConfigError(f"gate {name!r}: {number} is no number from 0 to {most:g}")
    return value


def _message(action: Message | str) -> Message:
    return {"role": "assistant", "content": action} if isinstance(action, str) else action
