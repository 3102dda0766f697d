"""What is known of one state before it is judged: the agent's action, the answers, and what was tried."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from replay_pipeline.actions import (
    Action,
    TextComparator,
    agreement_level,
    agrees_at,
    canonical_action,
)
from replay_pipeline.actions.tools import ToolList
from replay_pipeline.actions.votes import Vote, family_of_answer, read_answer
from replay_pipeline.types import (
    AgreementLevel,
    Message,
    TeacherAction,
    Tool,
    TraceState,
    Trial,
    family_of_model,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A state with the agent's action and everything that others said and tried there."""

    state: TraceState
    agent: Action
    """The recorded action, or one sampled from the trainee."""
    family: str | None
    """The family of the agent's model."""
    source: Literal["recorded", "sampled"]
    asked: Collection[TeacherAction]
    failed: list[TeacherAction] = field(default_factory=list)
    invalid: list[TeacherAction] = field(default_factory=list)
    valid: list[Vote] = field(default_factory=list)
    voting: list[Vote] = field(default_factory=list)
    """Valid answers with a vote. By default, the agent's own family has none."""
    trials: Mapping[str, Trial] = field(default_factory=dict)
    """Results of tried actions, by rendered action."""
    became: str | None = None
    """What became of the lines that the agent's own action added."""
    has_control_left: bool | None = None
    """Whether the agent's own model, asked again, took another action. None if it wasn't asked."""

    @property
    def own(self) -> list[Vote]:
        """Return the valid answers without a vote."""
        voting = {vote.row.teacher for vote in self.voting}
        return [vote for vote in self.valid if vote.row.teacher not in voting]

    @property
    def cost_usd(self) -> float:
        """Return the exact sum, which does not depend on the order of the answers."""
        return math.fsum(row.cost_usd for row in self.asked)

    def trial(self, action: Action) -> Trial | None:
        """Return what became of an action, if it was tried."""
        return self.trials.get(action.render()) if self.trials else None

    def effects(self) -> dict[Action, str]:
        """Return the effect of each tried action that had one."""
        if not self.trials:
            return {}
        actions = {self.agent, *(vote.action for vote in self.valid)}
        tried = ((action, self.trial(action)) for action in actions)
        return {a: t.effect for a, t in tried if t is not None and t.effect is not None}


class AnswerBook:
    """The answers by state, read only when their state is judged.

    Args:
        level: how similar two actions must be.
        samples: an action of the trainee by state, used instead of the recorded one.
        count_own_family: whether teachers of the agent's own family vote.
        same_text: judges final texts that differ.
        trials: results of tried actions, by state and rendered action.
        became: what became of the lines that the agent's own action added, by state.
    """

    def __init__(
        self,
        level: AgreementLevel,
        *,
        samples: Mapping[str, Message] | None = None,
        count_own_family: bool = False,
        same_text: TextComparator | None = None,
        trials: Mapping[str, Mapping[str, Trial]] | None = None,
        became: Mapping[str, str] | None = None,
    ) -> None:
        self._level: AgreementLevel = level
        self._samples = samples or {}
        self._count_own_family = count_own_family
        self._same_text = same_text
        self._trials = trials or {}
        self._became = became or {}
        self._answers: dict[str, dict[str, TeacherAction]] = {}
        self._toolboxes: dict[int, tuple[Sequence[Tool], ToolList]] = {}

    def file(self, rows: Iterable[TeacherAction]) -> int:
        """Add answers, and return how many were repeated: a teacher's first at a state counts."""
        n_repeated = 0
        for row in rows:
            by_teacher = self._answers.setdefault(row.state_id, {})
            n_repeated += row.teacher in by_teacher
            by_teacher.setdefault(row.teacher, row)
        return n_repeated

    def families(self) -> list[str]:
        """Return the families that answered at any state."""
        rows = (row for by_teacher in self._answers.values() for row in by_teacher.values())
        return sorted({family_of_answer(row) for row in rows})

    def n_elsewhere(self, state_ids: Collection[str]) -> int:
        """Count the answers at other states than these."""
        return sum(
            len(rows) for state_id, rows in self._answers.items() if state_id not in state_ids
        )

    def open(self, state: TraceState) -> Case:
        """Read the answers at a state."""
        state_id, cwd, tools = state["state_id"], state.get("cwd"), self._toolbox(state)
        sample = self._samples.get(state_id)
        rows = self._answers.get(state_id, {}).values()
        recorded = state["student_action"]
        case = Case(
            state=state,
            agent=canonical_action(recorded if sample is None else sample, cwd=cwd, tools=tools),
            family=family_of_model(state.get("student_model")),
            source="recorded" if sample is None else "sampled",
            asked=rows,
            trials=self._trials.get(state_id, {}),
            became=self._became.get(state_id),
        )
        for row in rows:
            action = read_answer(row, cwd=cwd, tools=tools)
            if action is None:
                case.failed.append(row)
            elif not action.is_valid:
                case.invalid.append(row)
            else:
                vote = Vote(family_of_answer(row), row, action)
                case.valid.append(vote)
                if vote.family != case.family or self._count_own_family:
                    case.voting.append(vote)
        own = [v for v in case.valid if _is_model(v.row.model, state.get("student_model"))]
        if not own:
            return case
        again = min(own, key=lambda vote: vote.row.teacher).action
        told = case.agent if sample is None else canonical_action(recorded, cwd=cwd, tools=tools)
        found = agreement_level(told, again, same_text=self._same_text)
        return replace(case, has_control_left=not agrees_at(self._level, found))

    def _toolbox(self, state: TraceState) -> ToolList | None:
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


def _is_model(answered: str | None, recorded: str | None) -> bool:
    """Return whether both names mean the same model, a vendor prefix, punctuation and date apart."""
    if not answered or not recorded:
        return False
    return _bare(answered) == _bare(recorded)


def _bare(model: str) -> str:
    name = model.lower().rpartition("/")[2].replace(".", "-").replace("_", "-")
    return "-".join(part for part in name.split("-") if not (part.isdigit() and len(part) >= 6))
