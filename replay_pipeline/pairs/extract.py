"""From states and teacher answers to preference pairs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay_pipeline.actions import (
    LEVELS,
    Action,
    TextComparator,
    agreement_level,
    agrees_at,
    canonical_action,
)
from replay_pipeline.actions.validity import ToolList
from replay_pipeline.actions.votes import (
    Consensus,
    Panel,
    Verdict,
    Vote,
    family_of_answer,
    read_answer,
)
from replay_pipeline.errors import ConfigError
from replay_pipeline.families import family_of_model
from replay_pipeline.garbage_collection import without_collector
from replay_pipeline.pairs.natural import NaturalPair, natural_pairs
from replay_pipeline.pairs.report import AgreementStatistics, PairReport, TeacherTally
from replay_pipeline.pairs.weights import PairWeights
from replay_pipeline.types import (
    AgreementLevel,
    DPOPair,
    Message,
    Progress,
    TeacherAction,
    Tool,
    TraceState,
)


def extract_dpo_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    **options: Any,
) -> list[DPOPair]:
    """The pairs of `extract_pairs`, which takes the same options and raises the same errors."""
    return extract_pairs(states, teacher_actions, agreement_threshold, **options).pairs


def extract_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherAction],
    agreement_threshold: int = 2,
    *,
    level: AgreementLevel = "effect",
    include_natural: bool = True,
    count_own_family: bool = False,
    samples: Mapping[str, Message] | None = None,
    control: Iterable[TeacherAction] = (),
    same_text: TextComparator | None = None,
    weights: PairWeights | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> PairReport:
    """Judge every state by the teachers' votes, and count everything.

    A family of models has one vote. A failed call or an invalid action has none. Where at least
    `agreement_threshold` families agree on an action that the student did not take, a pair is
    born; where the student took it, a positive.

    Args:
        states: The states to judge.
        teacher_actions: Answers of the teachers, in any order.
        agreement_threshold: Families that make a consensus.
        level: How strictly two actions must be the same.
        include_natural: Add pairs from rewinds and rejections, which need no teacher.
        count_own_family: Let teachers of the student's own family vote.
        samples: By state, an action sampled from the model to be trained: it is then the
            student's side instead of the recorded action.
        control: Answers of the student's own model at the same states. Rows of
            `teacher_actions` from the student's model itself are taken as control too.
        same_text: Judge of final texts that differ.
        weights: How pairs are weighted.
        on_progress: Called every 1,000 states.

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
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    extraction = _Extraction(
        PairReport(level=level, agreement_threshold=agreement_threshold),
        count_own_family=count_own_family,
        samples=samples or {},
        same_text=same_text,
        weights=weights or PairWeights(),
    )
    with without_collector():
        extraction.file_answers(teacher_actions, control)
        judged = extraction.judge_all(states, on_progress)
        if include_natural:
            extraction.add_natural(judged)
        return extraction.finished()


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


class _Extraction:
    def __init__(
        self,
        report: PairReport,
        *,
        count_own_family: bool,
        samples: Mapping[str, Message],
        same_text: TextComparator | None,
        weights: PairWeights,
    ) -> None:
        self.report = report
        self.count_own_family = count_own_family
        self.samples = samples
        self.same_text = same_text
        self.weights = weights
        self.statistics = AgreementStatistics(report.level)
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
        everyone = Panel(answers.valid, self.same_text)
        all_vote = len(answers.voting) == len(answers.valid)
        panel = everyone if all_vote else Panel(answers.voting, self.same_text)
        verdict = panel.verdict(self.report.level, self.report.agreement_threshold)
        with_student = self.levels_with_student(side, everyone)
        self.count_agreement(state, answers, everyone, with_student)
        outcome, found = self.outcome(side, answers, verdict, with_student)
        near = (
            panel.nearest_level(self.report.level, self.report.agreement_threshold)
            if outcome == "no_consensus" and not verdict.is_tie
            else None
        )
        if verdict.winner is not None:
            for vote in verdict.winner.votes:
                self.report.teachers[vote.row.teacher].n_in_consensus += 1
            if outcome == "pair":
                self.report.pairs.append(self.pair(state, side, answers, verdict, verdict.winner))
            elif outcome == "agreement":
                self.report.positives.append(_positive(state, side, answers, verdict.winner))
        self.report.outcomes.append(
            {
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
                "margin": verdict.margin,
                "is_tie": verdict.is_tie,
                "invalid_reason": side.action.invalid_reason,
            }
        )

    def levels_with_student(
        self, side: _Side, everyone: Panel
    ) -> dict[Action, AgreementLevel | None]:
        """How close the student's action comes to each distinct answer."""
        return {
            action: agreement_level(side.action, action, same_text=self.same_text)
            for action in everyone.distinct
        }

    def outcome(
        self,
        side: _Side,
        answers: _Answers,
        verdict: Verdict,
        with_student: dict[Action, AgreementLevel | None],
    ) -> tuple[str, AgreementLevel | None]:
        """The outcome of a state, and how close the student comes to the consensus."""
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
        """The tools of a state; states of a session usually share one list."""
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
        found = _Answers()
        toolbox, cwd = self.toolbox(state), state.get("cwd")
        for row in self._answers.get(state["state_id"], {}).values():
            tally = self.report.teachers.get(row.teacher)
            if tally is None:
                tally = self.report.teachers[row.teacher] = TeacherTally()
            found.asked += 1
            tally.n_asked += 1
            found.cost_usd += row.cost_usd
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
            family = family_of_answer(row)
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
        verdict: Verdict,
        consensus: Consensus,
    ) -> DPOPair:
        shares_vendor = any(vote.family == side.family for vote in consensus.votes)
        n_families = len({vote.family for vote in answers.voting})
        is_mismatch = self.control_mismatch(state, answers)
        pair: dict[str, Any] = {
            **_shared(state),
            "chosen": consensus.action.render(),
            "rejected": side.action.render(),
            "chosen_action": consensus.action.to_message(),
            "rejected_action": side.action.to_message(),
            "n_teachers_agreeing": consensus.n_families,
            "n_teachers_asked": answers.asked,
            "n_teachers_valid": len(answers.voting),
            "teachers_agreeing": [vote.row.teacher for vote in consensus.votes],
            "agreement_level": consensus.level,
            "margin": verdict.margin,
            "source": "consensus",
            "rejected_source": side.source,
            "shares_vendor": shares_vendor,
            "is_distillable": _is_distillable(consensus),
            "control_mismatch": is_mismatch,
            "cost_usd": math.fsum([answers.cost_usd]),
            "weight": self.weights.of_consensus(
                share=consensus.n_families / n_families,
                level=consensus.level,
                outcome=state.get("outcome") if side.source == "recorded" else None,
                shares_vendor=shares_vendor,
                is_control_mismatch=is_mismatch,
            ),
        }
        return _without_none(pair)

    def add_natural(self, states: list[TraceState]) -> None:
        for found in natural_pairs(states, self.report.level):
            self.report.pairs.append(self.natural(found))

    def natural(self, found: NaturalPair) -> DPOPair:
        pair: dict[str, Any] = {
            **_shared(found.state),
            "chosen": found.chosen.render(),
            "rejected": found.rejected.render(),
            "chosen_action": found.chosen.to_message(),
            "rejected_action": found.rejected.to_message(),
            "n_teachers_agreeing": 0,
            "n_teachers_asked": 0,
            "n_teachers_valid": 0,
            "teachers_agreeing": [],
            "margin": 0,
            "source": found.source,
            "rejected_source": "recorded",
            "shares_vendor": False,
            "cost_usd": 0.0,
            "weight": getattr(self.weights, found.source),
        }
        return _without_none(pair)

    def finished(self) -> PairReport:
        self.report.matrix = self.statistics.matrix()
        self.report.agreement = self.statistics.by_level()
        return self.report


def _shared(state: TraceState) -> dict[str, Any]:
    """What a pair or positive takes over from its state."""
    return {
        "state_id": state["state_id"],
        "session_id": state.get("session_id"),
        "state_messages": state["messages"],
        "tools": state.get("tools"),
        "hint": state.get("hint"),
        "outcome": state.get("outcome"),
        "student_model": state.get("student_model"),
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
        "teachers_agreeing": [vote.row.teacher for vote in consensus.votes],
        "agreement_level": consensus.level,
        "is_distillable": _is_distillable(consensus),
        "cost_usd": answers.cost_usd,
    }


def _for_natural(state: TraceState) -> TraceState:
    """The state, without its long prefix unless a natural pair could start from it."""
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
    return bool(answered and recorded) and _bare(answered) == _bare(recorded)


def _bare(model: str | None) -> str:
    name = (model or "").lower().rpartition("/")[2].replace(".", "-").replace("_", "-")
    return "-".join(part for part in name.split("-") if not (part.isdigit() and len(part) >= 6))


def _without_none(pair: dict[str, Any]) -> Any:
    return {key: value for key, value in pair.items() if value is not None}
