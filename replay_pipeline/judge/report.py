"""The figures of an extraction, in which every input is counted."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from replay_pipeline.actions import Action
from replay_pipeline.actions.agreement import strictness
from replay_pipeline.actions.votes import Consensus
from replay_pipeline.judge.answers import Case
from replay_pipeline.judge.belief import LEAST_LESSON, right_if_agreed, right_if_confirmed
from replay_pipeline.judge.judgment import Judgment
from replay_pipeline.judge.precision import Precision, PrecisionEvidence
from replay_pipeline.judge.records import outcome_row, positive_row
from replay_pipeline.judge.strengths import Reliability
from replay_pipeline.types import AgreementLevel, DPOPair, Look


@dataclass(kw_only=True)
class TeacherTally:
    """The counts of one teacher's answers by outcome."""

    n_asked: int = 0
    n_failed: int = 0
    """Calls that ended with an error."""
    n_invalid: int = 0
    """Answers without a valid action."""
    n_valid: int = 0
    n_in_consensus: int = 0
    """Answers that belong to a winning group."""
    n_with_student: int = 0
    """Valid answers that agree with the student's action."""
    cost_usd: float = 0.0
    family: str | None = None
    """The family for which it votes."""


@dataclass(kw_only=True)
class PairReport:
    """Pairs, positives, one outcome per state, and statistics of the votes."""

    level: AgreementLevel
    agreement_threshold: int
    pairs: list[DPOPair] = field(default_factory=list)
    positives: list[dict[str, Any]] = field(default_factory=list)
    """Lessons: states with the action on which the teachers agree, as rows of the table `positives`. And answers
    that nobody has confirmed, of the kind `answer`."""
    n_lessons: int = 0
    """Lessons at which the agent did something else that may be right too."""
    n_answers: int = 0
    """Answers that nobody has confirmed, among `positives`."""
    answers_left_out: Counter[str] = field(default_factory=Counter)
    """Answers that nobody has confirmed and that something speaks against, by reason."""
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """One row per state, for the table `outcomes`."""
    teachers: dict[str, TeacherTally] = field(default_factory=dict)
    n_duplicate_states: int = 0
    n_duplicate_answers: int = 0
    """Repeated answers of a teacher at a state. Only the first counts."""
    n_unmatched_answers: int = 0
    """Answers to states that were not among `states`."""
    n_control: int = 0
    """States at which the student's own model was asked again."""
    n_control_mismatch: int = 0
    """States at which it then took another action."""
    natural_left_out: Counter[str] = field(default_factory=Counter)
    """Rewinds and rejections that make no pair, by reason."""
    n_natural_joined: int = 0
    """Rewinds and rejections that match the teachers' pair, and count as its `evidence`."""
    reliability: Reliability | None = None
    """Estimates of who is right how often, from the votes."""
    poll: PrecisionEvidence = field(default_factory=PrecisionEvidence)
    """The evidence for how many of `pairs` are right."""
    refuted: list[DPOPair] = field(default_factory=list)
    """Pairs that were checked and found wrong. They aren't in `pairs`."""
    _once: list[tuple[str, dict[str, Any]]] = field(default_factory=list, repr=False)
    """Positives that one family alone confirmed, each with its teacher."""
    _explored: defaultdict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter), repr=False
    )
    _pairs_of_teachers: dict[tuple[str, str], list[int]] = field(default_factory=dict, repr=False)
    """By two teachers: states with valid answers of both, states at which they agree."""

    def add(self, judgment: Judgment) -> dict[str, Any]:
        """Count a judged state and its answers, and return its row."""
        case, consensus = judgment.case, judgment.consensus
        for row in case.asked:
            tally = self.teachers.setdefault(row.teacher, TeacherTally())
            tally.n_asked += 1
            tally.cost_usd += row.cost_usd
        for row in case.failed:
            self.teachers[row.teacher].n_failed += 1
        for row in case.invalid:
            self.teachers[row.teacher].n_invalid += 1
        for vote in case.valid:
            tally = self.teachers[vote.row.teacher]
            tally.n_valid += 1
            tally.family = vote.family
        for vote in judgment.with_agent:
            self.teachers[vote.row.teacher].n_with_student += 1
        for vote in consensus.votes if consensus is not None else ():
            self.teachers[vote.row.teacher].n_in_consensus += 1
        if case.has_control_left is not None:
            self.n_control += 1
            self.n_control_mismatch += case.has_control_left
        if consensus is not None and judgment.outcome == "agreement":
            p = right_if_agreed(len(case.voting) - consensus.n_families)
            self._imitate(case, consensus, case.agent, "agreement", p)
            if len(case.voting) == 1:
                self._once.append((case.voting[0].row.teacher, self.positives[-1]))
        if isinstance(answer := judgment.unconfirmed, str):
            self.answers_left_out[answer] += 1
        elif answer is not None:
            told = answer.action, "answer", answer.p_right, answer.looks
            self._imitate(case, answer.by, *told)
        self._explore(judgment)
        for one, other, found in judgment.levels:
            a, b = sorted((one.row.teacher, other.row.teacher))
            counts = self._pairs_of_teachers.setdefault((a, b), [0, 0])
            counts[0] += 1
            counts[1] += found >= strictness(self.level)
        row = outcome_row(judgment)
        self.outcomes.append(row)
        return row

    def _explore(self, judgment: Judgment) -> None:
        """Count a state at which everybody was asked by chance after a first family took the agent's action."""
        case, standing = judgment.case, judgment.standing
        first = {vote.row.teacher for vote in case.valid if vote.row.propensity == 1}
        if len(first) == 1 and len(case.voting) > 1:
            [teacher] = first
            if teacher in {vote.row.teacher for vote in judgment.with_agent}:
                is_outvoted = standing.n_leading > 1 and not standing.is_agents
                self._explored[teacher].update(["all", *(["outvoted"] if is_outvoted else [])])

    def weigh_confirmed(self) -> None:
        """Set how likely the actions are right that one family alone confirmed, by what that is worth."""
        for teacher, row in self._once:
            seen = self._explored[teacher]
            row["p_chosen_right"] = round(right_if_confirmed(seen["all"], seen["outvoted"]), 4)
            if row["p_chosen_right"] < LEAST_LESSON:
                row["kind"] = "answer"
                self.n_answers += 1

    def add_lesson(self, judgment: Judgment, p_right: float) -> None:
        """Keep what teachers agree on where nobody knows that the agent was wrong.

        It is a lesson if it is surely enough right, and else an answer that weighs less.

        Where all end the turn, they agree on that alone: texts are the same only word for word, so
        what teachers wrote alike says little ("All done"), and the agent's text stands for it.
        """
        case, consensus = judgment.case, judgment.consensus
        assert consensus is not None, "what makes no consensus teaches nothing"
        action = consensus.action if consensus.action.calls or case.agent.calls else case.agent
        kind = "agreement" if action is case.agent else "lesson"
        self._imitate(case, consensus, action, kind, p_right, judgment.looks)
        self.n_lessons += p_right >= LEAST_LESSON

    def _imitate(
        self,
        case: Case,
        by: Consensus,
        action: Action,
        kind: str,
        p_right: float,
        looks: Sequence[Look] = (),
    ) -> None:
        """Keep an action; what is less sure than a lesson counts as an answer that nobody confirmed."""
        kind = kind if p_right >= LEAST_LESSON else "answer"
        self.positives.append(positive_row(case, by, action, kind, p_right, looks))
        self.n_answers += kind == "answer"

    @property
    def matrix(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return for each two teachers the states with valid answers of both, and those at which they agree."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for (one, other), (n, n_agreeing) in self._pairs_of_teachers.items():
            found.setdefault(one, {})[other] = n, n_agreeing
            found.setdefault(other, {})[one] = n, n_agreeing
        return found

    @property
    def n_states(self) -> int:
        """Return the number of judged states."""
        return len(self.outcomes)

    @property
    def outcome_counts(self) -> dict[str, int]:
        """Return the number of states by outcome."""
        return _counts(row["outcome"] for row in self.outcomes)

    @property
    def consensus_levels(self) -> dict[str, int]:
        """Return the number of states with a consensus, by the weakest agreement inside the group."""
        return _counts(row["level"] for row in self.outcomes if row["level"])

    @property
    def pairs_by_source(self) -> dict[str, int]:
        """Return the number of pairs by source."""
        return _counts(pair.get("source", "consensus") for pair in self.pairs)

    @property
    def precision(self) -> Precision:
        """Return the estimated share of `pairs` that are right."""
        return self.poll.precision()

    @property
    def n_ties(self) -> int:
        """Return the number of states at which two separate groups have the same size and enough families."""
        return sum(bool(row["is_tie"]) for row in self.outcomes)

    @property
    def near_misses(self) -> dict[str, int]:
        """Return the number of states without a consensus that have one at a looser level, by that level."""
        return _counts(row["near_level"] for row in self.outcomes if row["near_level"])

    @property
    def control_mismatch_rate(self) -> float | None:
        """Share of control answers that differ from the recorded action. `None` without a control.

        If it is high, a replayed state differs from what the student saw, so a disagreement of
        teachers tells less about the student.
        """
        return self.n_control_mismatch / self.n_control if self.n_control else None

    @property
    def n_circular_pairs(self) -> int:
        """Return the number of pairs in which an agreeing teacher is from the student's own vendor."""
        return sum(bool(pair.get("shares_vendor")) for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        """Return all statistics as plain numbers and names, without the pairs."""
        return {
            "level": self.level,
            "agreement_threshold": self.agreement_threshold,
            "n_states": self.n_states,
            "n_pairs": len(self.pairs),
            "n_positives": len(self.positives) - self.n_answers,
            "n_lessons": self.n_lessons,
            "n_answers": self.n_answers,
            "answers_left_out": dict(sorted(self.answers_left_out.items())),
            "n_refuted": len(self.refuted),
            "precision": asdict(self.precision) | {"words": self.precision.words()},
            "poll": self.poll.to_json(),
            "reliability": self.reliability.to_json() if self.reliability else None,
            "outcomes": self.outcome_counts,
            "pairs_by_source": self.pairs_by_source,
            "natural_left_out": dict(sorted(self.natural_left_out.items())),
            "n_natural_joined": self.n_natural_joined,
            "consensus_levels": self.consensus_levels,
            "n_ties": self.n_ties,
            "near_misses": self.near_misses,
            "n_circular_pairs": self.n_circular_pairs,
            "n_duplicate_states": self.n_duplicate_states,
            "n_duplicate_answers": self.n_duplicate_answers,
            "n_unmatched_answers": self.n_unmatched_answers,
            "control": {
                "n": self.n_control,
                "n_mismatch": self.n_control_mismatch,
                "mismatch_rate": self.control_mismatch_rate,
            },
            "teachers": {
                name: {**vars(tally), "cost_usd": round(tally.cost_usd, 9)}
                for name, tally in sorted(self.teachers.items())
            },
            "matrix": {
                name: {
                    other: {"n": n, "n_agree": agree, "rate": agree / n}
                    for other, (n, agree) in sorted(row.items())
                }
                for name, row in sorted(self.matrix.items())
            },
        }


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))
