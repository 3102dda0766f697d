"""Make preference pairs from states and teacher answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypedDict, Unpack

from replay_pipeline.actions import (
    LEVELS,
    Action,
    TextComparator,
    agreement_level,
    agrees_at,
    differ_in_calls_alone,
)
from replay_pipeline.actions.votes import (
    Consensus,
    Panel,
    Verdict,
    has_one_effect,
)
from replay_pipeline.errors import ConfigError
from replay_pipeline.judge.answers import AnswerBook, Answers, Side
from replay_pipeline.judge.ballots import BallotBox, Verdicts
from replay_pipeline.judge.claims import Claims
from replay_pipeline.judge.evidence import is_refusal, stop_objection
from replay_pipeline.judge.feasibility import PromptState
from replay_pipeline.judge.look_ahead import DeferrablePair, LookAhead
from replay_pipeline.judge.natural import NaturalPair, natural_pairs
from replay_pipeline.judge.records import consensus_pair, natural_pair, positive_row
from replay_pipeline.judge.reliability import Reliability
from replay_pipeline.judge.report import AgreementStatistics, PairReport
from replay_pipeline.judge.trials import TrialBook
from replay_pipeline.storage.garbage_collection import without_collector
from replay_pipeline.types import (
    AgreementLevel,
    DPOPair,
    Message,
    Progress,
    TeacherAction,
    TraceState,
    Trial,
)


class ExtractOptions(TypedDict, total=False):
    """Options for judging states. All have defaults."""

    level: AgreementLevel
    """How similar two actions must be. Default: `effect`."""
    include_natural: bool
    """Whether to add pairs from rewinds and rejections, which need no teacher. Default: yes."""
    count_own_family: bool
    """Whether teachers of the student's own family vote. Default: no."""
    look_ahead_steps: int
    """If the student takes the consensus action within this many steps, the pair is `deferred`. Default: 3."""
    samples: Mapping[str, Message]
    """An action sampled from the trainee, by state. It replaces the recorded action as the student's side."""
    control: Iterable[TeacherAction]
    """Answers of the student's own model at the same states. Rows of `teacher_actions` from the
    student's model count as control too."""
    asked_again: tuple[int, int]
    """Counts from elsewhere: how often the student's own model was asked again, and how often it
    took another action."""
    trials: Mapping[str, Mapping[str, Trial]]
    """Results of tried actions, by state and rendered action. Actions with the same effect share
    one vote, and an action that would fail can't be the better side."""
    became: Mapping[str, str]
    """What became of the lines that the agent's own action added, by state."""
    same_text: TextComparator | None
    """Judges final texts that differ."""
    min_p_better: float | None
    """If set, pairs are kept by their probability of being right, and not by the number of
    families. `states` are then read twice."""
    reliability: Reliability | None
    """Estimates of who is right. By default, they are made from these states and answers."""
    verdicts: Verdicts
    """Whether an action is known to be right, by state and candidate (a teacher, or `agent`)."""
    checked: Mapping[str, bool]
    """Whether a person found a pair right, by pair."""
    chances: Mapping[str, float]
    """Probability with which a pair was drawn to be checked, by pair. Equal by default."""
    on_progress: Callable[[Progress], None] | None
    """Called every 1,000 states."""


def extract_dpo_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    **options: Unpack[ExtractOptions],
) -> list[DPOPair]:
    """Return the pairs of `extract_pairs`, which takes the same options and raises the same errors.

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
    """Judge every state by the teachers' votes and by the record, and count all outcomes.

    Each family of models has one vote. Failed calls and invalid actions have none. If at least
    `agreement_threshold` families agree on an action that the student did not take, and nothing in
    the prompt or the record contradicts it, they make a pair. If the student took the action, they
    make a positive.

    Args:
        states: The states to judge.
        teacher_actions: Answers of the teachers, in any order.
        agreement_threshold: How many families make a consensus.
        options: The fields of `ExtractOptions`.

    Raises:
        ConfigError: the threshold isn't a positive whole number, or the level is unknown.
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
        raise ConfigError(f"min_p_better={minimum} is not a probability")
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
class _Balance:
    """Who is for the consensus, and who for the student's action, the student itself included."""

    n_for: int
    n_against: int
    n_next: int
    """Families of the next group of teachers."""
    n_families: int

    @property
    def margin(self) -> int:
        """Return votes of the consensus minus those of the strongest other side."""
        return self.n_for - max(self.n_next, self.n_against)


class _Extraction:
    def __init__(self, report: PairReport, options: ExtractOptions) -> None:
        self.report = report
        self.same_text = options.get("same_text")
        self.min_p_better = options.get("min_p_better")
        self.options = options
        self.answers = AnswerBook(
            report,
            samples=options.get("samples"),
            count_own_family=options.get("count_own_family", False),
            same_text=self.same_text,
        )
        self.trials = TrialBook(options.get("trials"), options.get("became"))
        self.claims = _claims_of(options, report.level, [])
        self.statistics = AgreementStatistics(report.level)
        self.look_ahead = LookAhead(options.get("look_ahead_steps", 3), self.is_same)
        self._found: list[DeferrablePair] = []

    def file_answers(
        self, teacher_actions: Iterable[TeacherAction], control: Iterable[TeacherAction]
    ) -> None:
        self.answers.file(teacher_actions, control)
        self.claims = _claims_of(self.options, self.report.level, self.answers.families())

    def reliability(self) -> Reliability:
        """Return the estimates that the states judged so far give."""
        return self.claims.fitted(*_asked_again(self.report, self.options))

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
        self.report.n_unmatched_answers = self.answers.n_elsewhere(seen)
        return kept

    def judge(self, state: TraceState) -> None:
        side = self.answers.student_side(state)
        answers = self.answers.at(state, side)
        effects = self.trials.effects(state, side, answers)
        everyone = Panel(answers.valid, self.same_text, effects=effects)
        all_vote = len(answers.voting) == len(answers.valid)
        panel = everyone if all_vote else Panel(answers.voting, self.same_text, effects=effects)
        with_student = self.levels_with_student(side, everyone, effects)
        is_confirmed = _is_confirmed(side, answers, self.report, with_student)
        n_needed = self.report.agreement_threshold - is_confirmed
        verdict = panel.verdict(self.report.level, n_needed)
        self.count_agreement(state, answers, everyone, with_student)
        self.claims.file(state, side.action, answers.voting, is_recorded=side.source == "recorded")
        outcome, found = self.outcome(side, answers, verdict, with_student, n_needed)
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
            **self.trials.row(state),
        }
        self.report.outcomes.append(row)
        step = self.look_ahead.note(state, side)
        if verdict.winner is not None and balance is not None:
            if outcome == "pair":
                pair = self.pair(state, side, answers, balance, verdict.winner)
                place = state.get("session_id") or "", len(state["messages"])
                chosen = verdict.winner.action
                self.claims.claim(pair, [vote.family for vote in verdict.winner.votes])
                self._found.append(DeferrablePair(pair, row, chosen, side.action, place, step))
            elif outcome == "agreement":
                self.report.positives.append(positive_row(state, side, answers, verdict.winner))

    def by_probability(
        self, state: TraceState, answers: Answers, verdict: Verdict, outcome: str
    ) -> tuple[str, Verdict]:
        """Return the outcome and the winner by how likely a pair is to be right, not by counting."""
        seen = self.claims.beliefs(state["state_id"])
        if seen is None or outcome == "invalid_action":
            return outcome, verdict
        ballot, beliefs = seen
        best = max(range(len(beliefs.better)), key=lambda group: (beliefs.better[group], -group))
        accepted = self.claims.accepted(state["state_id"])
        if accepted is not None:
            best = accepted
        elif beliefs.better[best] < (self.min_p_better or 0.0):
            return ("doubtful" if outcome == "pair" else outcome), verdict
        families = self.claims.families_of(ballot, best)
        votes = [vote for vote in answers.voting if vote.family in families]
        chosen = Panel(votes, self.same_text).verdict(self.report.level, 1)
        if chosen.winner is None:
            return outcome, verdict
        return "pair", replace(verdict, winner=chosen.winner)

    def balance(
        self,
        answers: Answers,
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
        """Return whether two actions agree at the level of this extraction."""
        found = agreement_level(one, other, same_text=self.same_text)
        return agrees_at(self.report.level, found)

    def objection(
        self, state: TraceState, side: Side, consensus: Consensus, balance: _Balance
    ) -> tuple[str, str | None]:
        """Return the outcome of a state whose student differs from the consensus, and why no pair."""
        if is_refusal(consensus.action):
            return "refusal", None
        if (found := self.trials.objection(state, consensus.action, side.action)) is not None:
            return found
        stops = stop_objection(consensus.action, side.action)
        # A trainee that writes a text where a call is due is what sampling it should correct.
        if stops and not (stops == "late_stop" and self.options.get("samples")):
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
        """Turn pairs into `deferred` whose consensus the student does by itself a few steps later."""
        self.look_ahead.sort()
        kept: list[DeferrablePair] = []
        for found in self._found:
            n_steps = self.look_ahead.n_steps_to(found)
            if n_steps is None:
                kept.append(found)
                self.report.pairs.append(found.pair)
            else:
                found.row["outcome"] = "deferred"
                found.row["why"] = f"the student does it {n_steps} steps later"
        self._found = kept

    def levels_with_student(
        self, side: Side, everyone: Panel, effects: Mapping[Action, str]
    ) -> dict[Action, AgreementLevel | None]:
        """Return how close the student's action comes to each distinct answer."""
        found: dict[Action, AgreementLevel | None] = {}
        for action in everyone.distinct:
            level = agreement_level(side.action, action, same_text=self.same_text)
            is_one = has_one_effect(side.action, action, effects)
            found[action] = "effect" if is_one and not agrees_at("effect", level) else level
        return found

    def outcome(
        self,
        side: Side,
        answers: Answers,
        verdict: Verdict,
        with_student: dict[Action, AgreementLevel | None],
        n_needed: int,
    ) -> tuple[str, AgreementLevel | None]:
        """Return the outcome of a state, and how close the student comes to the consensus."""
        if not side.action.is_valid:
            return "invalid_action", None
        if len({vote.family for vote in answers.voting}) < n_needed:
            return "too_few_answers", None
        if verdict.winner is None:
            return "no_consensus", None
        levels = {with_student[vote.action] for vote in verdict.winner.votes}
        # Agreement with any one of the group is doubt enough to make no pair.
        found = next((at for at in LEVELS if at in levels), None)
        return ("agreement" if agrees_at(self.report.level, found) else "pair"), found

    def count_agreement(
        self,
        state: TraceState,
        answers: Answers,
        everyone: Panel,
        with_student: dict[Action, AgreementLevel | None],
    ) -> None:
        self.statistics.add(state["state_id"], answers.valid, everyone.levels())
        for vote in answers.valid:
            if agrees_at(self.report.level, with_student[vote.action]):
                self.report.teachers[vote.row.teacher].n_with_student += 1
        is_mismatch = self.answers.control_mismatch(state, answers)
        if is_mismatch is not None:
            self.report.n_control += 1
            self.report.n_control_mismatch += is_mismatch

    def pair(
        self,
        state: TraceState,
        side: Side,
        answers: Answers,
        balance: _Balance,
        consensus: Consensus,
    ) -> DPOPair:
        pair = consensus_pair(
            state,
            side,
            answers,
            consensus,
            n_against=balance.n_against,
            margin=balance.margin,
            control_mismatch=self.answers.control_mismatch(state, answers),
            **self.trials.told(state, consensus.action, side),
        )
        return _with_evidence(pair, consensus, self.is_same)

    def add_natural(self, states: list[TraceState]) -> None:
        """Add what the record itself prefers; where the teachers say the same, it joins their row."""
        at_place: dict[tuple[str, int], list[DeferrablePair]] = {}
        for found in self._found:
            at_place.setdefault(found.place, []).append(found)
        for natural in natural_pairs(states):
            there = at_place.get(natural.place, ())
            same = next((it for it in there if _is_one_pair(it, natural, self.is_same)), None)
            if same is not None:
                self.report.n_natural_joined += 1
                same.pair["evidence"] = sorted({*same.pair.get("evidence", ()), natural.source})
            elif (why := natural.objection(self.report.level)) is not None:
                self.report.natural_left_out[f"{natural.source}_{why}"] += 1
            else:
                self.report.pairs.append(natural_pair(natural))

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
        report = self.report
        again = _asked_again(report, self.options)
        report.reliability, claims = self.claims.settle(report.pairs, *again)
        report.poll = self.claims.poll(claims, report.pairs, min_p_better=self.min_p_better)
        self.refute()
        self.report.matrix = self.statistics.matrix()
        self.report.agreement = self.statistics.by_level()
        return self.report


def _is_confirmed(
    side: Side,
    answers: Answers,
    report: PairReport,
    with_student: Mapping[Action, AgreementLevel | None],
) -> bool:
    """Return whether all who were asked took the recorded action, and only with its vote are enough.

    Gates stop there, because no pair is possible any more. What was paid for still says that the
    action is right.
    """
    n_families = len({vote.family for vote in answers.voting})
    return (
        side.source == "recorded"
        and 0 < n_families == report.agreement_threshold - 1
        and answers.asked == len(answers.valid)
        and all(agrees_at(report.level, with_student[vote.action]) for vote in answers.valid)
    )


def _asked_again(report: PairReport, options: ExtractOptions) -> tuple[int, int]:
    """Return how often the student's own model was asked again, and left its action."""
    n, n_left = options.get("asked_again", (0, 0))
    return report.n_control + n, report.n_control_mismatch + n_left


def _with_evidence(
    pair: DPOPair, consensus: Consensus, is_same: Callable[[Action, Action], bool]
) -> DPOPair:
    """Note where no rule says that the votes are the same, but what they did when they were tried."""
    actions = {vote.action for vote in consensus.votes}
    if not all(is_same(*two) for two in combinations(actions, 2)):
        pair["evidence"] = [*pair.get("evidence", ()), "execution"]
    return pair


def _is_one_pair(
    found: DeferrablePair, natural: NaturalPair, is_same: Callable[[Action, Action], bool]
) -> bool:
    return is_same(found.chosen, natural.chosen) and is_same(found.rejected, natural.rejected)


def _claims_of(options: ExtractOptions, level: AgreementLevel, families: Iterable[str]) -> Claims:
    verdicts = options.get("verdicts")
    same_text = options.get("same_text")
    return Claims(
        BallotBox(families, level=level, same_text=same_text, verdicts=verdicts),
        verdicts=verdicts,
        checked=options.get("checked"),
        chances=options.get("chances"),
        known=options.get("reliability"),
    )


def _for_natural(state: TraceState) -> TraceState:
    """Return the state, without its long prefix unless a natural pair could start from it."""
    if state.get("alternatives") or state.get("outcome") == "user_rejected":
        return state
    return {**state, "messages": []}
