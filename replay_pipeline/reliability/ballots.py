"""What was seen at a state, as far as it tells who is right: who did the same as whom."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replay_pipeline.actions import Action, agreement_level, agrees_at, canonical_action
from replay_pipeline.actions.validity import ToolList
from replay_pipeline.actions.votes import family_of_answer, read_answer
from replay_pipeline.types import FAILURES, AgreementLevel, Message, TeacherAction, TraceState

AGENT = "agent"
"""The rater that acted in the session; the others are teachers, by family."""

Pattern = tuple[int, ...]
"""Who did the same: for each rater the number of its group in order of appearance, the agent first;
-1 for a rater that was not asked or gave no action that could run."""

_OTHER_KIND = "other"
_FEWEST_STATES = 20
"""A kind with fewer states is counted with the others that are as rare."""
_ERROR = re.compile(
    r"\s*(?:<tool_use_error>|error\b|exit code [1-9]|traceback \(most recent|fatal:)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Ballot:
    """The raters' actions at one state, as groups of equal ones."""

    state_id: str
    kind: str
    pattern: Pattern
    has_failed: bool | None = None
    """Whether the recorded action failed, was refused or taken back; `None` if that is not known."""
    known: tuple[tuple[int, bool], ...] = ()
    """Groups of which it is known, by execution or by a person, whether they are right."""


def kind_of_state(state: TraceState) -> str:
    """Return the kind of decision: the tool that the agent used, and whether after an error.

    It is known before any teacher is asked. An agent that ends with a text is of kind `text`.
    """
    action = state["student_action"]
    calls = (action.get("tool_calls") or ()) if isinstance(action, Mapping) else ()
    tool = str((calls[0].get("function") or {}).get("name")) if calls else "text"
    last = state["messages"][-1] if state["messages"] else {}
    return f"{tool} after an error" if _shows_error(last) else tool


def _shows_error(message: Message) -> bool:
    content = message.get("content")
    return (
        message.get("role") == "tool"
        and isinstance(content, str)
        and _ERROR.match(content) is not None
    )


def merged_kinds(kinds: Iterable[str]) -> dict[str, str]:
    """Map each kind to itself, or to one that holds all that are too rare to be estimated alone."""
    counts = Counter(kinds)
    return {
        kind: kind if n >= _FEWEST_STATES else _OTHER_KIND for kind, n in sorted(counts.items())
    }


def groups_of(actions: Sequence[Action], level: AgreementLevel) -> list[int]:
    """Number actions by the group of equal ones that each belongs to, the first being group 0.

    Agreement need not be transitive: an action joins the first group all of whose members it
    agrees with.
    """
    members: list[list[Action]] = []
    found: list[int] = []
    for action in actions:
        for number, group in enumerate(members):
            if all(agrees_at(level, agreement_level(action, other)) for other in group):
                group.append(action)
                found.append(number)
                break
        else:
            found.append(len(members))
            members.append([action])
    return found


class Reader:
    """Reads states and answers into ballots of one list of raters."""

    def __init__(self, families: Sequence[str], *, level: AgreementLevel = "effect") -> None:
        self.raters = (AGENT, *families)
        self.level: AgreementLevel = level
        self._places = {family: place for place, family in enumerate(self.raters)}

    def student(self, state: TraceState) -> Action:
        """Read the recorded action, which may be none that could run."""
        return canonical_action(
            state["student_action"], cwd=state.get("cwd"), tools=_toolbox(state)
        )

    def ballot(
        self,
        state: TraceState,
        answers: Iterable[TeacherAction],
        *,
        verdicts: Mapping[str, bool] | None = None,
        student: Action | None = None,
    ) -> Ballot | None:
        """Return the ballot of a state; `None` where the agent's action could not run.

        Of a family the first answer counts, in the order given: models of one family err alike.

        Args:
            state: the decision point.
            answers: those of teachers at it.
            verdicts: by teacher, or `agent`, whether what it did is known to be right.
            student: another action in the agent's place, such as a sample of the trainee.
        """
        toolbox = _toolbox(state)
        own = student or self.student(state)
        if not own.is_valid:
            return None
        seen: dict[int, tuple[Action, str]] = {0: (own, AGENT)}
        for answer in answers:
            place = self._places.get(family_of_answer(answer))
            if place is None or place in seen:
                continue
            action = read_answer(answer, cwd=state.get("cwd"), tools=toolbox)
            if action is not None and action.is_valid:
                seen[place] = action, answer.teacher
        places = sorted(seen)
        numbers = groups_of([seen[place][0] for place in places], self.level)
        pattern = [-1] * len(self.raters)
        known: dict[int, bool] = {}
        for place, number in zip(places, numbers, strict=True):
            pattern[place] = number
            is_right = (verdicts or {}).get(seen[place][1])
            if is_right is not None:
                known[number] = known.get(number, True) and is_right
        outcome = state.get("outcome") if student is None else None
        return Ballot(
            state["state_id"],
            kind_of_state(state),
            tuple(pattern),
            None if outcome is None else outcome in FAILURES,
            tuple(sorted(known.items())),
        )


def _toolbox(state: TraceState) -> ToolList | None:
    tools = state.get("tools")
    return ToolList(tools) if tools else None
