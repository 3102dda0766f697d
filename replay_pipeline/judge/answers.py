"""What is known of one state before it is judged: the agent's action, the answers, and what was tried."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

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
    TeacherAction,
    Tool,
    TraceState,
    Trial,
    family_of_model,
)

AGENT = "agent"
"""The name of what acted in the session, beside those of teachers."""

Verdicts = Mapping[tuple[str, str], bool]
"""Whether an action is known to be right, by state and candidate (a teacher's name, or `agent`).
Unknown actions aren't included."""


class ExtractOptions(TypedDict, total=False):
    """Options for judging states. All have defaults."""

    level: AgreementLevel
    """How similar two actions must be. Default: `effect`."""
    include_natural: bool
    """Whether to add pairs from rewinds and rejections, which need no teacher. Default: yes."""
    count_own_family: bool
    """Whether teachers of the student's own family vote. Default: no."""
    trials: Mapping[str, Mapping[str, Trial]]
    """Results of tried actions, by state and rendered action. Actions with the same effect share
    one vote, and an action that would fail can't be the better side."""
    same_text: TextComparator | None
    """Judges final texts that differ."""
    min_p_better: float | None
    """The least probability of being right with which what teachers agree on makes a pair, and no
    mere lesson. Default: `types.MIN_P_BETTER`."""
    verdicts: Verdicts
    """Whether an action is known to be right, by state and candidate (a teacher, or `agent`)."""
    checked: Mapping[str, bool]
    """Whether a person found a pair right, by pair."""
    chances: Mapping[str, float]
    """Probability with which a pair was drawn to be checked, by pair. Equal by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A state with the agent's action and everything that others said and tried there."""

    state: TraceState
    agent: Action
    """The recorded action."""
    family: str | None
    """The family of the agent's model."""
    asked: Collection[TeacherAction]
    failed: list[TeacherAction] = field(default_factory=list)
    invalid: list[TeacherAction] = field(default_factory=list)
    valid: list[Vote] = field(default_factory=list)
    voting: list[Vote] = field(default_factory=list)
    """Valid answers with a vote. By default, the agent's own family has none."""
    trials: Mapping[str, Trial] = field(default_factory=dict)
    """Results of tried actions, by rendered action."""
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


def level_of(options: ExtractOptions) -> AgreementLevel:
    """Return how similar two actions must be."""
    return options.get("level", "effect")


class AnswerBook:
    """The answers by state, read only when their state is judged."""

    def __init__(self, options: ExtractOptions) -> None:
        self._options = options
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
        options = self._options
        rows = self._answers.get(state_id, {}).values()
        case = Case(
            state=state,
            agent=canonical_action(state["student_action"], cwd=cwd, tools=tools),
            family=family_of_model(state.get("student_model")),
            asked=rows,
            trials=options.get("trials", {}).get(state_id, {}),
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
                if vote.family != case.family or options.get("count_own_family"):
                    case.voting.append(vote)
        own = [v for v in case.valid if _is_model(v.row.model, state.get("student_model"))]
        if not own:
            return case
        again = min(own, key=lambda vote: vote.row.teacher).action
        found = agreement_level(case.agent, again, same_text=options.get("same_text"))
        return replace(case, has_control_left=not agrees_at(level_of(options), found))

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
