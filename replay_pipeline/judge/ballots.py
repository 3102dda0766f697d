"""The observations at a state: which raters took the same action, and how these can be right or wrong."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from replay_pipeline.actions import Action, TextComparator, agreement_level, agrees_at
from replay_pipeline.actions.votes import Vote
from replay_pipeline.judge.rule import Pattern
from replay_pipeline.types import FAILURES, AgreementLevel, Message, TraceState

AGENT = "agent"
"""The rater that acted in the session. The other raters are families of teachers."""

Known = tuple[tuple[int, bool], ...]
"""Known facts about a ballot: groups, and whether each is right. `(-1 - n, x)` says whether group n
is right and the agent's action is wrong."""

Verdicts = Mapping[tuple[str, str], bool]
"""Whether an action is known to be right, by state and candidate (a teacher's name, or `agent`).
Unknown actions aren't included."""

_MOST_TEACHERS = 8
_OTHER_KIND = "other"
_FEWEST_STATES = 20
"""A kind with fewer states is counted with the others that are as rare."""
_ERROR = re.compile(
    r"\s*(?:<tool_use_error>|error\b|exit code [1-9]|traceback \(most recent|fatal:)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Ballot:
    """The raters' actions at one state, as groups of equal actions."""

    state_id: str
    kind: str
    pattern: Pattern
    has_failed: bool | None = None
    """Whether the recorded action failed, was refused, or was undone. `None` if unknown."""
    known: Known = ()
    """Facts that are known from execution or from a person."""


def kind_of_state(state: TraceState) -> str:
    """Return the kind of decision: the tool that the agent used, and whether it came after an error.

    The kind is known before any teacher is asked. If the agent ended with a text, the kind is
    `text`.
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
    """Map each kind to itself, or to a common kind if it is too rare for its own estimate."""
    counts = Counter(kinds)
    return {
        kind: kind if n >= _FEWEST_STATES else _OTHER_KIND for kind, n in sorted(counts.items())
    }


def kind_in_words(kind: str) -> str:
    """Return a readable name for a kind of decision."""
    return "rarer kinds of decision" if kind == _OTHER_KIND else kind


def action_groups(
    actions: Sequence[Action], level: AgreementLevel, same_text: TextComparator | None = None
) -> list[int]:
    """Return the group number of each action. The first action is in group 0.

    Agreement may not be transitive, so an action joins the first group in which it agrees with all
    members.
    """
    members: list[list[Action]] = []
    found: list[int] = []
    for action in actions:
        for number, group in enumerate(members):
            levels = (agreement_level(action, other, same_text=same_text) for other in group)
            if all(agrees_at(level, each) for each in levels):
                group.append(action)
                found.append(number)
                break
        else:
            found.append(len(members))
            members.append([action])
    return found


class BallotBox:
    """The maker of ballots, which all have the same list of raters.

    Args:
        families: the families of teachers. If there are too many, the first ones count.
        level: how similar two actions must be.
        same_text: judges final texts that differ.
        verdicts: whether an action is known to be right, by state and candidate (a teacher, or
            `agent`).
    """

    def __init__(
        self,
        families: Iterable[str],
        *,
        level: AgreementLevel = "effect",
        same_text: TextComparator | None = None,
        verdicts: Verdicts | None = None,
    ) -> None:
        self.raters = (AGENT, *dict.fromkeys(families))[: _MOST_TEACHERS + 1]
        self._level: AgreementLevel = level
        self._same_text = same_text
        self._verdicts = verdicts or {}
        self._places = {family: place for place, family in enumerate(self.raters)}

    def ballot(
        self,
        state: TraceState,
        agent: Action,
        votes: Iterable[Vote],
        *,
        is_recorded: bool = True,
        known: Known = (),
    ) -> Ballot | None:
        """Return the ballot of a state, or None if the agent's action is invalid.

        Only one answer of a family counts, from the teacher whose name comes first, because models
        of a family make the same errors.

        Args:
            state: the decision point.
            agent: the agent's action, or a sample of the trainee instead.
            votes: valid answers.
            is_recorded: whether `agent` is the recorded action, so that the recorded outcome
                applies.
            known: further known facts about the groups.
        """
        if not agent.is_valid:
            return None
        seen: dict[int, tuple[Action, str]] = {0: (agent, AGENT)}
        for vote in sorted(votes, key=lambda vote: vote.row.teacher):
            place = self._places.get(vote.family)
            if place is not None and place not in seen:
                seen[place] = vote.action, vote.row.teacher
        places = sorted(seen)
        actions = [seen[place][0] for place in places]
        numbers = action_groups(actions, self._level, self._same_text)
        pattern = [-1] * len(self.raters)
        facts: dict[int, bool] = {}
        for place, number in zip(places, numbers, strict=True):
            pattern[place] = number
            is_right = self._verdicts.get((state["state_id"], seen[place][1]))
            if is_right is not None and (place or is_recorded):
                facts[number] = facts.get(number, True) and is_right
        outcome = state.get("outcome") if is_recorded else None
        return Ballot(
            state["state_id"],
            kind_of_state(state),
            tuple(pattern),
            True if outcome in FAILURES else False if outcome == "ok" else None,
            (*sorted(facts.items()), *known),
        )

    def group_of(self, ballot: Ballot, families: Iterable[str]) -> int | None:
        """Return the group that contains most of these families, or None if no group does."""
        places = (self._places.get(family) for family in families)
        numbers = Counter(ballot.pattern[place] for place in places if place is not None)
        del numbers[-1]
        return min(numbers, key=lambda number: (-numbers[number], number), default=None)


RIGHT, ALSO_RIGHT, TEMPTING, OWN = range(4)
"""The labels of a group: the most common right action, another right action, the wrong action that
tempts several raters, or a wrong action of only one rater."""
N_LABELS = 4


@cache
def labelings(pattern: Pattern) -> tuple[tuple[int, ...], ...]:
    """Return all ways to label the groups of a pattern.

    Each of the first three labels goes to at most one group. A group of several raters has one of
    these, since the last label is for a single rater.
    """
    sizes = [0] * (max(pattern) + 1)
    for number in pattern:
        if number >= 0:
            sizes[number] += 1
    found: list[tuple[int, ...]] = []

    def grow(labels: tuple[int, ...]) -> None:
        if len(labels) == len(sizes):
            found.append(labels)
            return
        for label in range(N_LABELS):
            is_free = sizes[len(labels)] == 1 if label == OWN else label not in labels
            if is_free:
                grow((*labels, label))

    grow(())
    return tuple(found)


class Rows:
    """The labelings of many patterns, stacked as arrays.

    `labels_N_R` has the label of each rater (or `N_LABELS` for none), `pattern_N` the index of the
    pattern, and `starts_P` the first row of each pattern.
    """

    def __init__(
        self,
        patterns: Sequence[Pattern],
        known: Sequence[Known] | None = None,
    ) -> None:
        labels: list[list[int]] = []
        owners: list[int] = []
        starts: list[int] = []
        self.by_group: list[tuple[tuple[int, ...], ...]] = []
        for place, pattern in enumerate(patterns):
            facts = known[place] if known else ()
            kept = [ways for ways in labelings(pattern) if _fits(ways, facts)]
            # What is known may contradict every labeling (two right groups of three): then the votes
            # alone are left.
            kept = kept or list(labelings(pattern))
            starts.append(len(labels))
            self.by_group.append(tuple(kept))
            for ways in kept:
                labels.append([ways[number] if number >= 0 else N_LABELS for number in pattern])
                owners.append(place)
        self.labels_N_R = np.array(labels, dtype=np.int64)
        self.pattern_N = np.array(owners, dtype=np.int64)
        self.starts_P = np.array(starts, dtype=np.int64)
        self.n_patterns = len(patterns)


def _fits(ways: tuple[int, ...], known: Known) -> bool:
    for number, is_so in known:
        if number >= 0:
            found = ways[number] <= ALSO_RIGHT
        else:
            found = ways[-1 - number] <= ALSO_RIGHT < ways[0]
        if found != is_so:
            return False
    return True
