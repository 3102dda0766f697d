"""The answers of one extraction: who was asked where, what counts as a vote, and what the student did."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from replay_pipeline.actions import (
    Action,
    TextComparator,
    agreement_level,
    agrees_at,
    canonical_action,
)
from replay_pipeline.actions.validity import ToolList
from replay_pipeline.actions.votes import Vote, family_of_answer, read_answer
from replay_pipeline.judge.report import PairReport, TeacherTally
from replay_pipeline.types import Message, TeacherAction, Tool, TraceState, family_of_model


@dataclass(frozen=True, slots=True)
class Side:
    """The student's side of one state."""

    action: Action
    family: str | None
    source: str
    """`recorded` or `sampled`."""


@dataclass(slots=True)
class Answers:
    """The answers at one state, divided into those with and without a vote."""

    asked: int = 0
    failed: int = 0
    invalid: int = 0
    own_family: int = 0
    cost_usd: float = 0.0
    valid: list[Vote] = field(default_factory=list)
    voting: list[Vote] = field(default_factory=list)


class AnswerBook:
    """The answers by state, read only when their state is judged.

    Args:
        report: report that counts the answers.
        samples: an action of the trainee by state, used instead of the recorded one.
        count_own_family: whether teachers of the student's own family vote.
        same_text: judges final texts that differ.
    """

    def __init__(
        self,
        report: PairReport,
        *,
        samples: Mapping[str, Message] | None = None,
        count_own_family: bool = False,
        same_text: TextComparator | None = None,
    ) -> None:
        self._report = report
        self._samples = samples or {}
        self._count_own_family = count_own_family
        self._same_text = same_text
        self._answers: dict[str, dict[str, TeacherAction]] = {}
        self._control: dict[str, TeacherAction] = {}
        self._toolboxes: dict[int, tuple[Sequence[Tool], ToolList]] = {}

    def file(
        self, teacher_actions: Iterable[TeacherAction], control: Iterable[TeacherAction]
    ) -> None:
        """Add answers. If a teacher has several at a state, the first counts."""
        for row in teacher_actions:
            by_teacher = self._answers.setdefault(row.state_id, {})
            if row.teacher in by_teacher:
                self._report.n_duplicate_answers += 1
            else:
                by_teacher[row.teacher] = row
        for row in control:
            self._control.setdefault(row.state_id, row)

    def families(self) -> list[str]:
        """Return the families that answered at any state."""
        rows = (row for by_teacher in self._answers.values() for row in by_teacher.values())
        return sorted({family_of_answer(row) for row in rows})

    def n_elsewhere(self, state_ids: Collection[str]) -> int:
        """Count the answers at other states than these."""
        return sum(
            len(rows) for state_id, rows in self._answers.items() if state_id not in state_ids
        )

    def student_side(self, state: TraceState) -> Side:
        """Return the recorded action of a state, or the trainee's action there."""
        sample = self._samples.get(state["state_id"])
        message = state["student_action"] if sample is None else sample
        return Side(
            canonical_action(message, cwd=state.get("cwd"), tools=self.toolbox(state)),
            family_of_model(state.get("student_model")),
            "recorded" if sample is None else "sampled",
        )

    def toolbox(self, state: TraceState) -> ToolList | None:
        """Return the tools of a state. The states of a session usually share one list."""
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

    def at(self, state: TraceState, side: Side) -> Answers:
        """Return the sorted answers at a state, and count them by teacher."""
        rows = self._answers.get(state["state_id"], {}).values()
        # Exact, so that the sum does not depend on the order of the answers.
        found = Answers(asked=len(rows), cost_usd=math.fsum(row.cost_usd for row in rows))
        toolbox, cwd = self.toolbox(state), state.get("cwd")
        for row in rows:
            tally = self._report.teachers.get(row.teacher)
            if tally is None:
                tally = self._report.teachers[row.teacher] = TeacherTally()
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
            if family != side.family or self._count_own_family:
                found.voting.append(vote)
        return found

    def control_mismatch(self, state: TraceState, answers: Answers) -> bool | None:
        """Return whether the agent's own model, asked again, took another action."""
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
        found = agreement_level(recorded, again, same_text=self._same_text)
        return not agrees_at(self._report.level, found)


def _is_model(answered: str | None, recorded: str | None) -> bool:
    """Return whether both names mean the same model, a vendor prefix, punctuation and date apart."""
    if not answered or not recorded:
        return False
    return _bare(answered) == _bare(recorded)


def _bare(model: str) -> str:
    name = model.lower().rpartition("/")[2].replace(".", "-").replace("_", "-")
    return "-".join(part for part in name.split("-") if not (part.isdigit() and len(part) >= 6))
