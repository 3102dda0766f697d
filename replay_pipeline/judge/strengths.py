"""How strong teachers and agent are, by kind of decision, from who agreed with whom.

At each state the largest group of equal actions is taken, the agent's among them. Its members are right as often as
groups of its size were among real models (`belief.py`), and whoever stands outside as often as actions that differ
from it in this way. Checked pairs correct both.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replay_pipeline.actions import Action, TextComparator, agreement_level, agrees_at
from replay_pipeline.actions.difference import difference
from replay_pipeline.judge.answers import AGENT, Case, ExtractOptions, level_of
from replay_pipeline.judge.belief import belief, features, learned, right_if_agreed
from replay_pipeline.judge.precision import Calibration
from replay_pipeline.types import AgreementLevel, Message, TraceState

FEWEST_SEEN = 30
"""Answers of a teacher at a kind of decision below which nothing is said of it."""
SAME = 0.03
"""Accuracies that differ by less count as equal."""
_PRIOR = 12.0
"""Answers by which the accuracy at a kind of decision is drawn towards the one at all kinds."""
_BEFORE = (0.8, 10.0)
"""Accuracy before anything was seen, and the answers it counts for."""
_OTHER_KIND = "other"
_FEWEST_STATES = 20
"""A kind with fewer states is counted with the others that are as rare."""
_ERROR = re.compile(
    r"\s*(?:<tool_use_error>|error\b|exit code [1-9]|traceback \(most recent|fatal:)", re.IGNORECASE
)


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


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often each rater is right, by kind of decision."""

    raters: tuple[str, ...]
    n_states: int
    right: Mapping[tuple[str, str], float]
    """Sum of the probabilities that an answer is right, by kind and rater."""
    seen: Mapping[tuple[str, str], int]
    """Number of answers behind it."""

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of decision."""
        return sorted({kind for kind, _ in self.seen})

    def accuracy(self, rater: str, kind: str | None = None) -> float:
        """Return how often a rater is right at a kind of decision, or overall."""
        own = [key for key in self.seen if key[1] == rater]
        mean, strength = _BEFORE
        overall = (math.fsum(self.right[key] for key in own) + mean * strength) / (
            sum(self.seen[key] for key in own) + strength
        )
        if kind is None:
            return overall
        n = self.seen.get((kind, rater), 0)
        return (self.right.get((kind, rater), 0.0) + _PRIOR * overall) / (n + _PRIOR)

    def to_json(self) -> dict[str, Any]:
        """Return the estimates as plain numbers and names."""
        return {
            "n_states": self.n_states,
            "accuracy": {rater: round(self.accuracy(rater), 3) for rater in self.raters},
            "accuracy_by_kind": {
                kind: {rater: round(self.accuracy(rater, kind), 3) for rater in self.raters}
                for kind in self.kinds
            },
            "n_by_kind": {
                kind: {rater: self.seen.get((kind, rater), 0) for rater in self.raters}
                for kind in self.kinds
            },
            "words": self.words(),
        }

    def words(self) -> list[str]:
        """Describe at which decisions the teachers are better than the agent, and vice versa."""
        places: dict[str, list[str]] = {"stronger": [], "weaker": []}
        is_known = False
        for kind in self.kinds:
            if max((self.seen.get((kind, r), 0) for r in self.raters[1:]), default=0) < FEWEST_SEEN:
                continue
            is_known = True
            best = max(self.accuracy(rater, kind) for rater in self.raters[1:])
            agent = self.accuracy(self.raters[0], kind)
            if abs(best - agent) > SAME:
                places["stronger" if best > agent else "weaker"].append(kind_in_words(kind))
        if not is_known:
            return []
        stronger, weaker = (", ".join(places[each]) for each in ("stronger", "weaker"))
        if not stronger and not weaker:
            return ["your teachers are about as strong as the model that wrote these sessions"]
        return [
            "your teachers are "
            + (f"weaker than the model that wrote these sessions at {weaker}, " if weaker else "")
            + (f"stronger at {stronger}" if stronger else "stronger at nothing")
        ]


class Scores:
    """The collector of who stood where.

    Args:
        families: the families of teachers.
        options: how actions are compared.
    """

    def __init__(self, families: Iterable[str], options: ExtractOptions) -> None:
        self.raters = (AGENT, *dict.fromkeys(families))
        self._level, self._same_text = level_of(options), options.get("same_text")
        self._told: list[tuple[str, dict[str, float], set[str], float | None]] = []
        """By state its kind, who is right how likely, who leads, and how likely a pair is right."""

    def add(self, case: Case, evidence: float = 1.0) -> tuple[float, float | None]:
        """Score everybody at a state.

        Returns how likely the largest group is right, and, if the agent stands outside of it, how
        likely it makes a right pair with the agent's action.

        Args:
            case: the state with its answers.
            evidence: what the session tells of the agent's action, as for `belief`.
        """
        if not case.voting or not case.agent.is_valid:
            return 0.0, None
        actions = {AGENT: case.agent}
        for vote in sorted(case.voting, key=lambda vote: vote.row.teacher):
            actions.setdefault(vote.family, vote.action)
        groups = action_groups(list(actions.values()), self._level, self._same_text)
        numbers = dict(zip(actions, groups, strict=True))
        sizes = Counter(groups).most_common(2)
        group, n = sizes[0]
        kind = kind_of_state(case.state)
        if n < 2 or (len(sizes) > 1 and sizes[1][1] == n):
            alone = learned().alone_right
            self._told.append((kind, dict.fromkeys(actions, alone), set(), None))
            return 0.0, None
        lead = next(action for rater, action in actions.items() if numbers[rater] == group)
        found: dict[str, float] = {}
        right, better = right_if_agreed(len(actions) - n), None
        for rater, action in actions.items():
            if numbers[rater] == group:
                continue
            differs = difference(lead, action, case.state.get("tools") or ())
            held = features(differs, n_for=n, n_voting=len(actions) - 1)
            said = belief(held, evidence if rater == AGENT else 1.0)
            wrong = (1 - said.chosen_right) * learned().beside_wrong
            found[rater] = said.chosen_right - said.better + wrong
            if rater == AGENT:
                right, better = said.chosen_right, said.better
        members = {rater for rater in actions if numbers[rater] == group}
        self._told.append((kind, found | dict.fromkeys(members, right), members, better))
        return right, better

    def reliability(self, calibration: Calibration) -> Reliability:
        """Return the estimates, those at pairs as checked pairs have it."""
        merged = merged_kinds(told[0] for told in self._told)
        right: dict[tuple[str, str], float] = defaultdict(float)
        seen: Counter[tuple[str, str]] = Counter()
        for kind, found, members, better in self._told:
            for rater, p in found.items():
                if better is not None and calibration.n_checked:
                    checked = calibration.of(better)
                    rest = (1 - checked) / max(1 - better, 1e-9)
                    p = checked + (p - better) * rest if rater in members else p * rest
                right[merged[kind], rater] += min(1.0, p)
                seen[merged[kind], rater] += 1
        return Reliability(
            raters=self.raters, n_states=len(self._told), right=dict(right), seen=dict(seen)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Strength:
    """The estimated accuracy of one teacher over all batches."""

    teacher: str
    n_asked: int
    n_valid: int
    n_with_agent: int
    """Valid answers that agree with the agent's action."""
    right: float
    """Share of its valid answers that are right."""
    agent_right: float
    """Share of the agent's actions that are right, in the same batches."""
    usd_per_right: float | None
    """Cost of a right answer. None if nothing was paid."""
    stronger_at: tuple[str, ...]
    weaker_at: tuple[str, ...]
    """Kinds of decision at which it is right less often than the agent."""
    right_at: Mapping[str, tuple[float, float]]
    """Shares of its answers and of the agent's that are right, by each kind with enough answers."""

    def row(self) -> dict[str, str]:
        """Return it as the cells of a table for people."""
        usd = self.usd_per_right
        return {
            "teacher": self.teacher,
            "answers": f"{self.n_valid:,} of {self.n_asked:,}",
            "as the agent there": f"{self.n_with_agent / max(1, self.n_valid):.0%}",
            "right": f"{self.right:.0%}",
            "agent right": f"{self.agent_right:.0%}",
            "$ a right answer": "" if usd is None else f"{usd:.4f}",
            "stronger at": self._at(self.stronger_at),
            "weaker at": self._at(self.weaker_at),
        }

    def _at(self, kinds: Sequence[str]) -> str:
        shares = ((kind_in_words(kind), *self.right_at[kind]) for kind in kinds)
        return (
            ", ".join(
                f"{kind} ({own:.0%} right, the agent {agent:.0%})" for kind, own, agent in shares
            )
            or "nothing"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain numbers and names."""
        return asdict(self)


def strengths(reports: Iterable[Mapping[str, Any]]) -> list[Strength]:
    """Return the strength of each teacher, from the reports of the pairs stage.

    The estimates of batches are weighted by their numbers of answers. A teacher without an estimate
    is left out.

    Args:
        reports: results of `PairReport.to_json`.
    """
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0] * 3))
    for report in reports:
        model = report.get("reliability") or {}
        for name, tally in (report.get("teachers") or {}).items():
            family = tally.get("family")
            if family not in model.get("accuracy", {}) or not tally["n_valid"]:
                continue
            found, n = sums[name], tally["n_valid"]
            for key in ("n_asked", "n_valid", "n_with_student", "cost_usd"):
                found[key] += tally[key]
            found["right"] += n * model["accuracy"][family]
            found["agent"] += n * model["accuracy"][AGENT]
            for kind, accuracy in model["accuracy_by_kind"].items():
                n_seen = (model.get("n_by_kind") or {}).get(kind, {}).get(family, 0)
                of_kind = kinds[name][kind]
                of_kind[0] += n_seen
                of_kind[1] += n_seen * accuracy[family]
                of_kind[2] += n_seen * accuracy[AGENT]
    return [_strength(name, sums[name], kinds[name]) for name in sorted(sums)]


def _strength(name: str, sums: Mapping[str, float], kinds: Mapping[str, list[float]]) -> Strength:
    shares = {
        kind: (round(right / n, 4), round(agent / n, 4))
        for kind, (n, right, agent) in sorted(kinds.items())
        if n >= FEWEST_SEEN
    }
    leads = {kind: right - agent for kind, (right, agent) in shares.items()}
    return Strength(
        teacher=name,
        n_asked=int(sums["n_asked"]),
        n_valid=int(sums["n_valid"]),
        n_with_agent=int(sums["n_with_student"]),
        right=round(sums["right"] / sums["n_valid"], 4),
        agent_right=round(sums["agent"] / sums["n_valid"], 4),
        usd_per_right=round(sums["cost_usd"] / max(sums["right"], 1e-9), 6)
        if sums["cost_usd"]
        else None,
        stronger_at=tuple(kind for kind, lead in leads.items() if lead > SAME),
        weaker_at=tuple(kind for kind, lead in leads.items() if lead < -SAME),
        right_at=shares,
    )
