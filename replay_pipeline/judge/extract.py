"""Make preference pairs from states and teacher answers.

A state is opened (`answers.py`), judged (`judgment.py`), and counted (`report.py`). Then the rest of its
session is heard: what the agent did next, and what the record itself prefers. Last, every pair gets
its probability (`claims.py`).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from replay_pipeline.actions import LEVELS, Action, differ_in_calls_alone
from replay_pipeline.actions.difference import difference
from replay_pipeline.errors import ConfigError
from replay_pipeline.judge.answers import AnswerBook, Case, ExtractOptions, level_of
from replay_pipeline.judge.belief import LEAST_LESSON, belief, features
from replay_pipeline.judge.claims import Claims
from replay_pipeline.judge.judgment import LESSONS_ALONE, Arbiter, Judgment
from replay_pipeline.judge.natural import natural_pairs
from replay_pipeline.judge.records import consensus_pair, natural_pair
from replay_pipeline.judge.report import PairReport
from replay_pipeline.judge.strengths import Scores
from replay_pipeline.storage.garbage_collection import without_collector
from replay_pipeline.types import (
    FAILURES,
    DPOPair,
    TeacherAction,
    TraceState,
)

_LOOK_AHEAD = 3
"""A pair is `deferred` if the agent takes the consensus action within so many steps."""


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
        ...     "student_action": bash("rm -rf tests"),
        ...     "outcome": "user_rejected",
        ... }
        >>> answers = [
        ...     TeacherAction(state_id="s1", teacher=name, action=bash(command))
        ...     for name, command in {
        ...         "qwen": "pytest",
        ...         "glm": "pytest",
        ...         "kimi": "pytest  # all",
        ...     }.items()
        ... ]
        >>> [pair] = extract_dpo_pairs([state], answers)
        >>> pair["chosen"], pair["rejected"]
        ('Bash {"command":"pytest"}', 'Bash {"command":"rm -rf tests"}')
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
    level = level_of(options)
    if level not in LEVELS:
        raise ConfigError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    minimum = options.get("min_p_better")
    if minimum is not None and not 0 <= minimum <= 1:
        raise ConfigError(f"min_p_better={minimum} is not a probability")
    with without_collector():
        extraction = _Extraction(teacher_actions, agreement_threshold, options)
        judged = extraction.judge_all(states)
        extraction.defer()
        if options.get("include_natural", True):
            extraction.add_natural(judged)
        return extraction.finished()


@dataclass(frozen=True, slots=True)
class _AgentStep:
    """The agent's action at one turn of a session."""

    turn_idx: int
    n_user_messages: int
    action: Action


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pair of the teachers, which may turn out to be deferred."""

    judgment: Judgment
    pair: DPOPair
    held: Callable[..., dict[str, float]]
    """What holds of the pair; takes how often the agent does what teachers agree on."""
    row: dict[str, Any]
    """The state's row in `outcomes`."""
    chosen: Action
    rejected: Action
    place: tuple[str, int]
    """Session, and length of the prefix."""
    step: _AgentStep | None
    """Step of the session. `None` if it is unknown, or if the side was sampled."""


class _Extraction:
    def __init__(
        self,
        answers: Iterable[TeacherAction],
        threshold: int,
        options: ExtractOptions,
    ) -> None:
        self.options = options
        self.report = PairReport(level=level_of(options), agreement_threshold=threshold)
        self.answers = AnswerBook(options)
        self.report.n_duplicate_answers = self.answers.file(answers)
        self.claims = Claims(options)
        self.scores = Scores(self.answers.families(), options)
        self.arbiter = Arbiter(threshold, options)
        self._steps: dict[str, list[_AgentStep]] = {}
        """The recorded actions of each session."""
        self._found: list[_Candidate] = []
        self._alone: list[_Candidate] = []
        """What teachers agree on that makes lessons and no pairs."""

    def judge_all(self, states: Iterable[TraceState]) -> list[TraceState]:
        """Judge each state once; returns what natural pairs need of them."""
        seen: set[str] = set()
        kept: list[TraceState] = []
        for state in states:
            if state["state_id"] in seen:
                self.report.n_duplicate_states += 1
                continue
            seen.add(state["state_id"])
            self.judge_one(state)
            # Without its long prefix, unless a natural pair could start from it.
            is_start = state.get("alternatives") or state.get("outcome") == "user_rejected"
            kept.append(state if is_start else {**state, "messages": []})
        self.report.n_unmatched_answers = self.answers.n_elsewhere(seen)
        for steps in self._steps.values():
            steps.sort(key=lambda step: step.turn_idx)
        return kept

    def judge_one(self, state: TraceState) -> None:
        case = self.answers.open(state)
        judgment = self.arbiter.judge(case)
        row = self.report.add(judgment)
        step = self.note(case)
        self.scores.add(case, judgment.evidence)
        consensus = judgment.consensus
        if judgment.outcome not in ("pair", *LESSONS_ALONE) or consensus is None:
            return
        tools, messages = state.get("tools") or (), state["messages"]
        differs = difference(consensus.action, case.agent, tools, messages)
        at = judgment.standing
        found = self._found if judgment.outcome == "pair" else self._alone
        found.append(
            _Candidate(
                judgment=judgment,
                pair=consensus_pair(judgment, consensus, differs, self.arbiter.is_same),
                held=partial(
                    features,
                    differs,
                    n_for=at.n_leading,
                    n_voting=at.n_voting,
                    n_against=at.n_against,
                ),
                row=row,
                chosen=consensus.action,
                rejected=case.agent,
                place=(state.get("session_id") or "", len(messages)),
                step=step,
            )
        )

    def note(self, case: Case) -> _AgentStep | None:
        """Record the agent's action for the look-ahead of earlier states, and return it."""
        session_id, turn_idx = case.state.get("session_id"), case.state.get("turn_idx")
        if session_id is None or turn_idx is None:
            return None
        n_user_messages = sum(each.get("role") == "user" for each in case.state["messages"])
        step = _AgentStep(turn_idx, n_user_messages, case.agent)
        self._steps.setdefault(session_id, []).append(step)
        return step

    def defer(self) -> None:
        """Turn pairs into `deferred` whose consensus the agent does by itself a few steps later."""
        kept: list[_Candidate] = []
        for found in self._found:
            n_steps = self.n_steps_to(found)
            if n_steps is None:
                kept.append(found)
                self.report.pairs.append(found.pair)
            else:
                found.row["outcome"] = "deferred"
                found.row["why"] = f"the student does it {n_steps} steps later"
        self._found = kept

    def n_steps_to(self, found: _Candidate) -> int | None:
        """Return the number of steps until the agent takes the chosen action of a pair, or None if it doesn't soon.

        Also None if the recorded action failed or was refused. Taking the other action next is then
        the best evidence that it was better.
        """
        now = found.step
        if now is None or found.pair.get("outcome") in FAILURES:
            return None
        steps, done = self._steps[found.place[0]], list(now.action.calls)
        is_more = len(found.chosen.calls) > len(done)
        first = bisect_right(steps, now.turn_idx, key=lambda step: step.turn_idx)
        for n, step in enumerate(steps[first : first + _LOOK_AHEAD], start=1):
            if step.n_user_messages > now.n_user_messages:
                return None  # the user spoke in between: it may have been told to
            if self.arbiter.is_same(found.chosen, step.action):
                return n
            done += step.action.calls
            # One call after the other comes to the same.
            if (
                is_more
                and len(done) >= len(found.chosen.calls)
                and differ_in_calls_alone(
                    found.chosen,
                    replace(step.action, calls=tuple(done)),
                    level=self.report.level,
                )
            ):
                return n
        return None

    def add_natural(self, states: list[TraceState]) -> None:
        """Add what the record itself prefers; where the teachers say the same, it joins their row."""
        is_same = self.arbiter.is_same
        at_place: dict[tuple[str, int], list[_Candidate]] = {}
        for found in self._found:
            at_place.setdefault(found.place, []).append(found)
        for natural in natural_pairs(states):
            same = next(
                (
                    it
                    for it in at_place.get(natural.place, ())
                    if is_same(it.chosen, natural.chosen) and is_same(it.rejected, natural.rejected)
                ),
                None,
            )
            if same is not None:
                self.report.n_natural_joined += 1
                same.pair["evidence"] = sorted({*same.pair.get("evidence", ()), natural.source})
            elif (why := natural.objection(self.report.level)) is not None:
                self.report.natural_left_out[f"{natural.source}_{why}"] += 1
            else:
                self.report.pairs.append(natural_pair(natural))

    def finished(self) -> PairReport:
        """Set both numbers of every pair, make lessons of those that are not sure enough, and take out wrong ones."""
        report = self.report
        n_agreed = report.outcome_counts.get("agreement", 0)
        # As if there were ten more states, nine of them agreed on.
        agreement = (n_agreed + 9) / (n_agreed + len(self._found) + 10)
        beliefs = {
            found.pair["pair_id"]: belief(found.held(agreement=agreement), found.judgment.evidence)
            for found in self._found
        }
        calibration = self.claims.settle(report.pairs, beliefs)
        report.reliability = self.scores.reliability(calibration)
        report.weigh_confirmed()
        for found in self._found:
            pair = found.pair
            if pair.get("is_checked_right") is False:
                found.row["outcome"] = "refuted"
            elif (kind := self.claims.kind(pair)) != "pair":
                found.row["outcome"] = kind
                if pair.get("rejected_source") == "recorded":
                    report.add_lesson(found.judgment, pair["p_chosen_right"])
        for found in self._alone:
            right = belief(found.held(agreement=agreement), found.judgment.evidence).chosen_right
            found.row["why"] = found.judgment.outcome
            found.row["outcome"] = "lesson" if right >= LEAST_LESSON else "doubtful"
            report.add_lesson(found.judgment, round(right, 4))
        kept = [pair for pair in report.pairs if self.claims.kind(pair) == "pair"]
        report.poll = self.claims.poll(kept, beliefs, calibration)
        report.refuted = [pair for pair in kept if pair.get("is_checked_right") is False]
        report.pairs = [pair for pair in kept if pair.get("is_checked_right") is not False]
        return report
