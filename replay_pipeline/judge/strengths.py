"""Compare the strength of each teacher with the agent's, from the reports of one or more batches."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replay_pipeline.judge.ballots import AGENT, kind_in_words

_FEWEST_ANSWERS = 30
"""Valid answers at a kind of decision below which nothing is said of it."""
_SAME = 0.03
"""Shares that differ by less are taken for the same."""


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
            ", ".join(f"{kind} ({own:.0%} to {agent:.0%})" for kind, own, agent in shares)
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


def shared_errors(reports: Iterable[Mapping[str, Any]]) -> float | None:
    """Return how often raters that err take the same wrong action; None if unknown."""
    known = [each["reliability"] for each in reports if each.get("reliability")]
    n_states = sum(each["n_states"] for each in known)
    if not n_states:
        return None
    return math.fsum(each["shared_errors"] * each["n_states"] for each in known) / n_states


def _strength(name: str, sums: Mapping[str, float], kinds: Mapping[str, list[float]]) -> Strength:
    shares = {
        kind: (round(right / n, 4), round(agent / n, 4))
        for kind, (n, right, agent) in sorted(kinds.items())
        if n >= _FEWEST_ANSWERS
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
        stronger_at=tuple(kind for kind, lead in leads.items() if lead > _SAME),
        weaker_at=tuple(kind for kind, lead in leads.items() if lead < -_SAME),
        right_at=shares,
    )
