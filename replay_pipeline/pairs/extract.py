"""From states and teacher answers to preference pairs."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from replay_pipeline.actions import (
    LEVELS,
    Action,
    TextComparator,
    agreement_level,
    agrees_at,
    canonical_action,
    differ_in_calls_alone,
)
from replay_pipeline.actions.validity import ToolList
from replay_pipeline.actions.votes import (
    Consensus,
    Panel,
    Verdict,
    Vote,
    family_of_answer,
    has_one_effect,
    read_answer,
)
from replay_pipeline.errors import ConfigError
from replay_pipeline.families import family_of_model
from replay_pipeline.feasibility import PromptState
from replay_pipeline.pairs.claims import Claims
from replay_pipeline.pairs.evidence import is_refusal, stop_objection
from replay_pipeline.pairs.natural import NaturalPair, natural_pairs
from replay_pipeline.pairs.report import AgreementStatistics, PairReport, TeacherTally
from replay_pipeline.reliability import BallotBox, Reliability, Verdicts
from replay_pipeline.storage.garbage_collection import without_collector
from replay_pipeline.storage.pair_rows import pair_id_of
from replay_pipeline.types import (
    FAILURES,
    REHEARSAL,
    AgreementLevel,
    DPOPair,
    Message,
    Progress,
    TeacherAction,
    Tool,
    TraceState,
    Trial,
)


class ExtractOptions(TypedDict, total=False):
    """How states are judged; everything has a default."""

    level: AgreementLevel
    """How strictly two actions must be the same; `effect`."""
    include_natural: bool
    """Add pairs from rewinds and rejections, which need no teacher; they are added."""
    count_own_family: bool
    """Let teachers of the student's own family vote for a consensus; they do not."""
    look_ahead_steps: int
    """A consensus that the student does within so many steps is `deferred`; 3."""
    samples: Mapping[str, Message]
    """By state, an action sampled from the model to be trained: it is then the student's side
    instead of the recorded action."""
    control: Iterable[TeacherAction]
    """Answers of the student's own model at the same states. Rows of `teacher_actions` from the
    student's model itself are taken as control too."""
    trials: Mapping[str, Mapping[str, Trial]]
    """By state and rendered action, what became of actions that were tried: one effect is one vote,
    and what would fail is no better side."""
    same_text: TextComparator | None
    """Judge of final texts that differ."""
    min_p_better: float | None
    """Keep a pair by the probability that it is right, instead of by the number of families: then
    `states` are gone through twice."""
    reliability: Reliability | None
    """Estimates of who is right, made elsewhere; by default from these states and answers."""
    verdicts: Verdicts
    """By state and candidate (a teacher, or `agent`), whether its action is known to be right."""
    checked: Mapping[str, bool]
    """By pair, whether a person found it to be right."""
    chances: Mapping[str, float]
    """By pair, with which probability it was drawn to be checked; equal where not given."""
    on_progress: Callable[[Progress], None] | None
    """Called every 1,000 states."""


def extract_dpo_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    **options: Unpack[ExtractOptions],
) -> list[DPOPair]:
    """Give the pairs of `extract_pairs`, which takes the same options and raises the same errors.

    Example:
        >>> def bash(command):
        ...     function = {"name": "Bash", "arguments": {"command": command}}
        ...     return {"role": "assistant", "tool_calls": [{"function": function}]}
        >>> state = {
        ...     "state_id": "s1",
        ...     "messages": [{"role": "user", "content": "The cart test fails."}],
        ...     "student_action": bash("pytest"),
        ... }
        >>> answers = [
        ...     TeacherAction(state_id="s1", teacher=name, action=bash(command))
        ...     for name, command in {"qwen": "cat cart.py", "glm": "cat ./cart.py"}.items()
        ... ]
        >>> [pair] = extract_dpo_pairs([state], answers)
        >>> pair["chosen"], pair["rejected"]
        ('Bash {"command":"cat cart.py"}', 'Bash {"command":"pytest"}')
    """
    return extract_pairs(states, teacher_actions, agreement_threshold, **options).pairs


def extract_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    **options: Unpack[ExtractOptions],
) -> PairReport:
    """Judge every state by the teachers' votes and by the record, and count everything.

    A family of models has one vote. A failed call or an invalid action has none. Where at least
    `agreement_threshold` families agree on an action that the student did not take, and nothing
    in the prompt or the record speaks against it, a pair is born; where the student took it, a
    positive.

    Args:
        states: The states to judge.
        teacher_actions: Answers of the teachers, in any order.
        agreement_threshold: Families that make a consensus.
        options: What `ExtractOptions` lists.

    Raises:
        ConfigError: the threshold is no positive whole number, or the level is unknown.
    """
    if isinstance(agreement_threshold, bool) or not isinstance(agreement_threshold, int):
        raise ConfigError(f"agreement_threshold={agreement_threshold!r} is not a whole number")
    if agreement_threshold < 1:
        raise ConfigError(
            f"agreement_threshold={agreement_threshold} must be at least 1: it is the number of "
            "model families that have to agree"
        )
    level = options.get("level", "effect")
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    minimum = options.get("min_p_better")
    if minimum is not None and not 0 <= minimum <= 1:
        raise ConfigError(f"min_p_better={minimum} is no probability")
    rows, control = list(teacher_actions), list(options.get("control", ()))
    with without_collector():
        if minimum is not None and options.get("reliability") is None:
            states = states if isinstance(states, Sequence) else list(states)
            options["reliability"] = _estimated(states, rows, control, agreement_threshold, options)
        extraction = _Extraction(
            PairReport(level=level, agreement_threshold=agreement_threshold), options
        )
        extraction.file_answers(rows, control)
        judged = extraction.judge_all(states, options.get("on_progress"))
        extraction.defer()
        if options.get("include_natural", True):
            extraction.add_natural(judged)
        return extraction.finished()


def _estimated(
    states: Iterable[TraceState],
    rows: Iterable[TeacherAction],
    control: Iterable[TeacherAction],
    threshold: int,
    options: ExtractOptions,
) -> Reliability:
    """Estimate who is right before anything is decided by it."""
    without: ExtractOptions = {**options, "min_p_better": None}
    report = PairReport(level=options.get("level", "effect"), agreement_threshold=threshold)
    first = _Extraction(report, without)
    first.file_answers(rows, control)
    first.judge_all(states, None)
    return first.reliability()


@dataclass(frozen=True, slots=True)
class _Side:
    """The student's side of one state."""

    action: Action
    family: str | None
    source: str
    """`recorded` or `sampled`."""


@dataclass(slots=True)
class _Answers:
    """The answers at one state, sorted into those that vote and those that do not."""

    asked: int = 0
    failed: int = 0
    invalid: int = 0
    own_family: int = 0
    cost_usd: float = 0.0
    valid: list[Vote] = field(default_factory=list)
    voting: list[Vote] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Balance:
    """Who is for the consensus, and who for the student's action, the student itself included."""

    n_for: int
    n_against: int
    n_next: int
    """Families of the next group of teachers."""
    n_families: int

    @property
    def margin(self) -> int:
        """Votes of the consensus minus those of the strongest other side."""
        return self.n_for - max(self.n_next, self.n_against)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the student did at one turn of a session."""

    turn_idx: int
    n_user_messages: int
    action: Action


@dataclass(frozen=True, slots=True)
class _Found:
    """A pair that may still be deferred, and its sides."""

    pair: DPOPair
    row: dict[str, Any]
    """The row of `outcomes` of its state."""
    chosen: Action
    rejected: Action
    place: tuple[str, int]
    """Session and length of the prefix."""
    step: _Step | None
    """Where the session stands; `None` where it cannot be told, or the side was sampled."""


class _Extraction:
    def __init__(self, report: PairReport, options: ExtractOptions) -> None:
        self.report = report
        self.count_own_family = options.get("count_own_family", False)
        self.look_ahead_steps = options.get("look_ahead_steps", 3)
        self.samples = options.get("samples") or {}
        self.same_text = options.get("same_text")
        self.trials = options.get("trials") or {}
        self.min_p_better = options.get("min_p_better")
        self.options = options
        self.claims: Claims = self._claims([])
        self.statistics = AgreementStatistics(report.level)
        self._found: list[_Found] = []
        self._steps: dict[str, list[_Step]] = {}
        """The recorded actions of each session by turn."""
        self._answers: dict[str, dict[str, TeacherAction]] = {}
        self._control: dict[str, TeacherAction] = {}
        self._toolboxes: dict[int, tuple[Sequence[Tool], ToolList]] = {}

    def file_answers(
        self, teacher_actions: Iterable[TeacherAction], control: Iterable[TeacherAction]
    ) -> None:
        for row in teacher_actions:
            by_teacher = self._answers.setdefault(row.state_id, {})
            if row.teacher in by_teacher:
                self.report.n_duplicate_answers += 1
            else:
                by_teacher[row.teacher] = row
        for row in control:
            self._control.setdefault(row.state_id, row)

        self.claims = self._claims(sorted({family_of_answer(row) for row in self._rows()}))

    def _rows(self) -> Iterable[TeacherAction]:
        return (row for rows in self._answers.values() for row in rows.values())

    def _claims(self, families: Iterable[str]) -> Claims:
        verdicts = self.options.get("verdicts")
        box = BallotBox(
            families, level=self.report.level, same_text=self.same_text, verdicts=verdicts
        )
        return Claims(
            box,
            verdicts=verdicts,
            checked=self.options.get("checked"),
            known=self.options.get("reliability"),
        )

    def reliability(self) -> Reliability:
        """Return the estimates that the states judged so far give."""
        n = self.report.n_control
        return self.claims.fitted(1 - self.report.n_control_mismatch / n if n else None)

    def judge_all(
        self, states: Iterable[TraceState], on_progress: Callable[[Progress], None] | None
    ) -> list[TraceState]:
        """Judge each state once; returns what natural pairs need of them."""
        seen: set[str] = set()
        kept: list[TraceState] = []
        for state in states:
            if state["state_id"] in seen:
                self.report.n_duplicate_states += 1
                continue
            seen.add(state["state_id"])
            self.judge(state)
            kept.append(_for_natural(state))
            if on_progress is not None and len(seen) % 1_000 == 0:
                on_progress(Progress(stage="pairs", n_done=len(seen)))
        self.report.n_unmatched_answers = sum(
            len(rows) for state_id, rows in self._answers.items() if state_id not in seen
        )
        return kept

    def judge(self, state: TraceState) -> None:
        side = self.student_side(state)
        answers = self.answers(state, side)
        effects = self.effects(state, side, answers)
        everyone = Panel(answers.valid, self.same_text, effects=effects)
        all_vote = len(answers.voting) == len(answers.valid)
        panel = everyone if all_vote else Panel(answers.voting, self.same_text, effects=effects)
        verdict = panel.verdict(self.report.level, self.report.agreement_threshold)
        with_student = self.levels_with_student(side, everyone, effects)
        self.count_agreement(state, answers, everyone, with_student)
        self.claims.file(state, side.action, answers.voting, is_recorded=side.source == "recorded")
        outcome, found = self.outcome(side, answers, verdict, with_student)
        if self.min_p_better is not None:
            outcome, verdict = self.by_probability(state, answers, verdict, outcome)
        near = (
            panel.nearest_level(self.report.level, self.report.agreement_threshold)
            if outcome == "no_consensus" and not verdict.is_tie
            else None
        )
        balance, why = None, None
        if verdict.winner is not None:
            for vote in verdict.winner.votes:
                self.report.teachers[vote.row.teacher].n_in_consensus += 1
            balance = self.balance(answers, verdict, verdict.winner, with_student)
            if outcome == "pair":
                outcome, why = self.objection(state, side, verdict.winner, balance)
        row = {
            "state_id": state["state_id"],
            "session_id": state.get("session_id"),
            "outcome": outcome,
            "level": verdict.winner.level if verdict.winner else None,
            "student_level": found,
            "near_level": near,
            "n_asked": answers.asked,
            "n_valid": len(answers.voting),
            "n_failed": answers.failed,
            "n_invalid": answers.invalid,
            "n_own_family": answers.own_family,
            "n_agreeing": verdict.n_leading,
            "n_against": balance.n_against if balance and outcome != "agreement" else None,
            "margin": balance.margin if balance and outcome != "agreement" else verdict.margin,
            "is_tie": verdict.is_tie,
            "invalid_reason": side.action.invalid_reason,
            "why": why,
        }
        self.report.outcomes.append(row)
        step = self.step(state, side)
        if verdict.winner is not None and balance is not None:
            if outcome == "pair":
                pair = self.pair(state, side, answers, balance, verdict.winner)
                place = state.get("session_id") or "", len(state["messages"])
                chosen = verdict.winner.action
                self.claims.claim(pair, [vote.family for vote in verdict.winner.votes])
                self._found.append(_Found(pair, row, chosen, side.action, place, step))
            elif outcome == "agreement":
                self.report.positives.append(_positive(state, side, answers, verdict.winner))

    def by_probability(
        self, state: TraceState, answers: _Answers, verdict: Verdict, outcome: str
    ) -> tuple[str, Verdict]:
        """Give the outcome and the winner by how likely a pair is to be right, not by counting."""
        seen = self.claims.beliefs(state["state_id"])
        if seen is None or outcome == "invalid_action":
            return outcome, verdict
        ballot, beliefs = seen
        best = max(range(len(beliefs.better)), key=lambda group: (beliefs.better[group], -group))
        if beliefs.better[best] < (self.min_p_better or 0.0):
            return ("doubtful" if outcome == "pair" else outcome), verdict
        families = self.claims.families_of(ballot, best)
        votes = [vote for vote in answers.voting if vote.family in families]
        chosen = Panel(votes, self.same_text).verdict(self.report.level, 1)
        if chosen.winner is None:
            return outcome, verdict
        return "pair", replace(verdict, winner=chosen.winner)

    def step(self, state: TraceState, side: _Side) -> _Step | None:
        """Tell what the student did, kept for the look-ahead of earlier states."""
        session_id, turn_idx = state.get("session_id"), state.get("turn_idx")
        if session_id is None or turn_idx is None or side.source != "recorded":
            return None
        n_user_messages = sum(message.get("role") == "user" for message in state["messages"])
        step = _Step(turn_idx, n_user_messages, side.action)
        self._steps.setdefault(session_id, []).append(step)
        return step

    def balance(
        self,
        answers: _Answers,
        verdict: Verdict,
        consensus: Consensus,
        with_student: dict[Action, AgreementLevel | None],
    ) -> _Balance:
        """Count both sides. The student's own family, which makes no consensus, counts here."""
        n_next = verdict.n_leading - verdict.margin
        families = {vote.family for vote in consensus.votes}
        voting = {vote.family for vote in answers.voting}
        for vote in answers.valid:
            if vote.family not in voting and self.is_same(vote.action, consensus.action):
                families.add(vote.family)
        against = {
            vote.family
            for vote in answers.valid
            if agrees_at(self.report.level, with_student[vote.action])
        }
        everyone = {vote.family for vote in answers.valid}
        return _Balance(len(families), 1 + len(against), n_next, len(everyone))

    def is_same(self, one: Action, other: Action) -> bool:
        """Whether two actions agree at the level of this extraction."""
        found = agreement_level(one, other, same_text=self.same_text)
        return agrees_at(self.report.level, found)

    def objection(
        self, state: TraceState, side: _Side, consensus: Consensus, balance: _Balance
    ) -> tuple[str, str | None]:
        """Give the outcome of a state whose student differs from the consensus, and why no pair."""
        if is_refusal(consensus.action):
            return "refusal", None
        trial = self.trial(state, consensus.action)
        if trial is not None and not trial.works:
            return "would_fail", trial.error_kind
        stops = stop_objection(consensus.action, side.action)
        # A trainee that writes a text where a call is due is what sampling it should correct.
        if stops and not (stops == "late_stop" and self.samples):
            return stops, None
        level = self.report.level
        if any(differ_in_calls_alone(v.action, side.action, level=level) for v in consensus.votes):
            return "call_count", None
        prompt = PromptState(state["messages"], side.action, cwd=state.get("cwd"))
        if obstacle := prompt.obstacle(consensus.action):
            return obstacle
        # Alone against them the student is what a pair is about; with others it is a dispute.
        if self.min_p_better is None and balance.n_against > 1 and balance.margin <= 0:
            return "contested", f"{balance.n_against} for the student's action"
        return "pair", None

    def defer(self) -> None:
        """Turn pairs into `deferred` whose consensus the student does by itself a few steps later.

        Only an order differs then. Not where the recorded action failed or was refused: doing the other thing next is then
        the best evidence that it was better.
        """
        for steps in self._steps.values():
            steps.sort(key=lambda step: step.turn_idx)
        kept: list[_Found] = []
        for found in self._found:
            n_steps = self.n_steps_ahead(found)
            if n_steps is None or found.pair.get("outcome") in FAILURES:
                kept.append(found)
                self.report.pairs.append(found.pair)
            else:
                found.row["outcome"] = "deferred"
                found.row["why"] = f"the student does it {n_steps} steps later"
        self._found = kept

    def n_steps_ahead(self, found: _Found) -> int | None:
        """After how many steps the student does what the consensus is; `None` if not soon."""
        now = found.step
        if now is None:
            return None
        steps = self._steps[found.place[0]]
        first = bisect_right(steps, now.turn_idx, key=lambda step: step.turn_idx)
        for n, step in enumerate(steps[first : first + self.look_ahead_steps], start=1):
            if step.n_user_messages > now.n_user_messages:
                return None  # the user spoke in between: it may have been told to
            if self.is_same(found.chosen, step.action):
                return n
        return None

    def trial(self, state: TraceState, action: Action) -> Trial | None:
        """Return what became of an action where it was tried."""
        return self.trials.get(state["state_id"], {}).get(action.render())

    def effects(self, state: TraceState, side: _Side, answers: _Answers) -> dict[Action, str]:
        """Return the effects of the actions at a state that were tried and had one."""
        if state["state_id"] not in self.trials:
            return {}
        actions = {side.action, *(vote.action for vote in answers.valid)}
        tried = {action: self.trial(state, action) for action in actions}
        return {a: t.effect for a, t in tried.items() if t is not None and t.effect is not None}

    def levels_with_student(
        self, side: _Side, everyone: Panel, effects: Mapping[Action, str]
    ) -> dict[Action, AgreementLevel | None]:
        """Tell how close the student's action comes to each distinct answer."""
        found: dict[Action, AgreementLevel | None] = {}
        for action in everyone.distinct:
            level = agreement_level(side.action, action, same_text=self.same_text)
            is_one = has_one_effect(side.action, action, effects)
            found[action] = "effect" if is_one and not agrees_at("effect", level) else level
        return found

    def outcome(
        self,
        side: _Side,
        answers: _Answers,
        verdict: Verdict,
        with_student: dict[Action, AgreementLevel | None],
    ) -> tuple[str, AgreementLevel | None]:
        """Give the outcome of a state, and how close the student comes to the consensus."""
        if not side.action.is_valid:
            return "invalid_action", None
        if len({vote.family for vote in answers.voting}) < self.report.agreement_threshold:
            return "too_few_answers", None
        if verdict.winner is None:
            return "no_consensus", None
        levels = {with_student[vote.action] for vote in verdict.winner.votes}
        # Agreement with any one of the group is doubt enough to make no pair.
        found = next((at for at in LEVELS if at in levels), None)
        return ("agreement" if agrees_at(self.report.level, found) else "pair"), found

    def student_side(self, state: TraceState) -> _Side:
        sample = self.samples.get(state["state_id"])
        message = state["student_action"] if sample is None else sample
        return _Side(
            canonical_action(message, cwd=state.get("cwd"), tools=self.toolbox(state)),
            family_of_model(state.get("student_model")),
            "recorded" if sample is None else "sampled",
        )

    def toolbox(self, state: TraceState) -> ToolList | None:
        """Give the tools of a state; states of a session usually share one list."""
        tools = state.get("tools")
        if not tools:
            return None
        known = self._toolboxes.get(id(tools))
        if known is None or known[0] is not tools:
            if len(self._toolboxes) > 256:
                self._toolboxes.clear()
            # The list is kept next to its id, so that the id stays its own.
            known = self._toolboxes[id(tools)] = (tools, ToolList(tools))
        return known[1]

    def answers(self, state: TraceState, side: _Side) -> _Answers:
        rows = self._answers.get(state["state_id"], {}).values()
        # Exact, so that the sum does not depend on the order of the answers.
        found = _Answers(asked=len(rows), cost_usd=math.fsum(row.cost_usd for row in rows))
        toolbox, cwd = self.toolbox(state), state.get("cwd")
        for row in rows:
            tally = self.report.teachers.get(row.teacher)
            if tally is None:
                tally = self.report.teachers[row.teacher] = TeacherTally()
            tally.n_asked += 1
            tally.cost_usd += row.cost_usd
            action = read_answer(row, cwd=cwd, tools=toolbox)
            if action is None:
                found.failed += 1
                tally.n_failed += 1
                continue
            if not action.is_valid:
                found.invalid += 1
                tally.n_invalid += 1
                continue
            tally.n_valid += 1
            family = tally.family = family_of_answer(row)
            vote = Vote(family, row, action)
            found.valid.append(vote)
            if family == side.family:
                found.own_family += 1
            if family != side.family or self.count_own_family:
                found.voting.append(vote)
        return found

    def count_agreement(
        self,
        state: TraceState,
        answers: _Answers,
        everyone: Panel,
        with_student: dict[Action, AgreementLevel | None],
    ) -> None:
        self.statistics.add(state["state_id"], answers.valid, everyone.levels())
        for vote in answers.valid:
            if agrees_at(self.report.level, with_student[vote.action]):
                self.report.teachers[vote.row.teacher].n_with_student += 1
        is_mismatch = self.control_mismatch(state, answers)
        if is_mismatch is not None:
            self.report.n_control += 1
            self.report.n_control_mismatch += is_mismatch

    def control_mismatch(self, state: TraceState, answers: _Answers) -> bool | None:
        """Whether the student's own model, asked again, leaves the recorded action."""
        toolbox, cwd = self.toolbox(state), state.get("cwd")
        row = self._control.get(state["state_id"])
        if row is not None and row.action is not None and row.error_code is None:
            again = canonical_action(row.action, cwd=cwd, tools=toolbox)
        else:
            own = [v for v in answers.valid if _is_model(v.row.model, state.get("student_model"))]
            if not own:
                return None
            again = min(own, key=lambda vote: vote.row.teacher).action
        recorded = canonical_action(state["student_action"], cwd=cwd, tools=toolbox)
        found = agreement_level(recorded, again, same_text=self.same_text)
        return not agrees_at(self.report.level, found)

    def pair(
        self,
        state: TraceState,
        side: _Side,
        answers: _Answers,
        balance: _Balance,
        consensus: Consensus,
    ) -> DPOPair:
        shares_vendor = any(vote.family == side.family for vote in consensus.votes)
        is_mismatch = self.control_mismatch(state, answers)
        pair: dict[str, Any] = {
            **_shared(state),
            **_sides(state, consensus.action, side.action),
            "n_teachers_agreeing": consensus.n_families,
            "n_teachers_asked": answers.asked,
            "n_teachers_valid": len(answers.voting),
            "teachers_agreeing": _names(consensus),
            "agreement_level": consensus.level,
            "n_against": balance.n_against,
            "margin": balance.margin,
            "source": _source(consensus),
            "rejected_source": side.source,
            "shares_vendor": shares_vendor,
            "is_distillable": _is_distillable(consensus),
            "control_mismatch": is_mismatch,
            "cost_usd": answers.cost_usd,
            **self.trials_of(state, consensus.action, side.action),
        }
        return _without_none(pair)

    def trials_of(self, state: TraceState, chosen: Action, rejected: Action) -> dict[str, Any]:
        """Return what became of both sides where they were tried."""
        sides = {"chosen_trial": chosen, "rejected_trial": rejected}
        tried = {name: self.trial(state, action) for name, action in sides.items()}
        return {name: trial.in_words() for name, trial in tried.items() if trial is not None}

    def add_natural(self, states: list[TraceState]) -> None:
        """Add what the record itself prefers; where the teachers say the same, it joins their row."""
        at_place: dict[tuple[str, int], list[_Found]] = {}
        for found in self._found:
            at_place.setdefault(found.place, []).append(found)
        for natural in natural_pairs(states):
            same = next(
                (
                    found
                    for found in at_place.get(natural.place, ())
                    if self.is_same(found.chosen, natural.chosen)
                    and self.is_same(found.rejected, natural.rejected)
                ),
                None,
            )
            if same is not None:
                self.report.n_natural_joined += 1
                same.pair["evidence"] = sorted({*same.pair.get("evidence", ()), natural.source})
            elif (why := natural.objection(self.report.level)) is not None:
                self.report.natural_left_out[f"{natural.source}_{why}"] += 1
            else:
                self.report.pairs.append(self.natural(natural))

    def natural(self, found: NaturalPair) -> DPOPair:
        pair: dict[str, Any] = {
            **_shared(found.state),
            **_sides(found.state, found.chosen, found.rejected),
            "n_teachers_agreeing": 0,
            "n_teachers_asked": 0,
            "n_teachers_valid": 0,
            "teachers_agreeing": [],
            "margin": 0,
            "source": found.source,
            "rejected_source": "recorded",
            "shares_vendor": False,
            "cost_usd": 0.0,
        }
        return _without_none(pair)

    def refute(self) -> None:
        """Take out the pairs that were found to be wrong when they were checked."""
        rows = {id(found.pair): found.row for found in self._found}
        kept: list[DPOPair] = []
        for pair in self.report.pairs:
            if pair.get("is_checked_right") is not False:
                kept.append(pair)
                continue
            self.report.refuted.append(pair)
            if (row := rows.get(id(pair))) is not None:
                row["outcome"] = "refuted"
        self.report.pairs = kept

    def finished(self) -> PairReport:
        report, chances = self.report, self.options.get("chances")
        report.reliability, claims = self.claims.settle(
            report.pairs, n_control=report.n_control, n_mismatch=report.n_control_mismatch
        )
        report.poll = self.claims.poll(claims, report.pairs, chances)
        self.refute()
        self.report.matrix = self.statistics.matrix()
        self.report.agreement = self.statistics.by_level()
        return self.report


def _shared(state: TraceState) -> dict[str, Any]:
    """Tell what a pair or positive takes over from its state."""
    return {
        "state_id": state["state_id"],
        "session_id": state.get("session_id"),
        "conversation": state.get("conversation"),
        "cwd": state.get("cwd"),
        "state_messages": state["messages"],
        "tools": state.get("tools"),
        "hint": state.get("hint"),
        "outcome": state.get("outcome"),
        "student_model": state.get("student_model"),
    }


def _sides(state: TraceState, chosen: Action, rejected: Action) -> dict[str, Any]:
    """Both sides as text and as messages, and the id of the pair that they make."""
    return {
        "pair_id": pair_id_of(state["state_id"], chosen.render(), rejected.render()),
        "chosen": chosen.render(),
        "rejected": rejected.render(),
        "chosen_action": chosen.to_message(),
        "rejected_action": rejected.to_message(),
    }


def _positive(
    state: TraceState, side: _Side, answers: _Answers, consensus: Consensus
) -> dict[str, Any]:
    shared = _shared(state)
    del shared["hint"]
    return {
        **shared,
        "action": side.action.render(),
        "action_message": side.action.to_message(),
        "n_teachers_agreeing": consensus.n_families,
        "n_teachers_asked": answers.asked,
        "teachers_agreeing": _names(consensus),
        "agreement_level": consensus.level,
        "is_distillable": _is_distillable(consensus),
        "cost_usd": answers.cost_usd,
    }


def _names(consensus: Consensus) -> list[str]:
    """Name the teachers that agree, those of a rehearsal as such: the mark goes with the row."""
    return [
        f"{REHEARSAL}:{row.teacher}"
        if row.is_rehearsal and not row.teacher.startswith(REHEARSAL)
        else row.teacher
        for row in (vote.row for vote in consensus.votes)
    ]


def _source(consensus: Consensus) -> str:
    """Say where a pair comes from; one made-up vote is enough to make all of it play."""
    return REHEARSAL if any(vote.row.is_rehearsal for vote in consensus.votes) else "consensus"


def _for_natural(state: TraceState) -> TraceState:
    """Give the state, without its long prefix unless a natural pair could start from it."""
    if state.get("alternatives") or state.get("outcome") == "user_rejected":
        return state
    return {**state, "messages": []}


def _is_distillable(consensus: Consensus) -> bool | None:
    """Whether every agreeing teacher allows training on its answers; `None` if not known."""
    known = [vote.row.is_distillable for vote in consensus.votes]
    if False in known:
        return False
    return None if None in known else True


def _is_model(answered: str | None, recorded: str | None) -> bool:
    """Whether both names mean the same model, a vendor prefix, punctuation and date apart."""
    if not answered or not recorded:
        return False
    return _bare(answered) == _bare(recorded)


def _bare(model: str) -> str:
    name = model.lower().rpartition("/")[2].replace(".", "-").replace("_", "-")
    return "-".join(part for part in name.split("-") if not (part.isdigit() and len(part) >= 6))


def _without_none(pair: dict[str, Any]) -> Any:
    return {key: value for key, value in pair.items() if value is not None}
