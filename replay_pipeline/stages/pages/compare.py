"""Compare models: how often each teacher took the agent's action, and what that cost.

An answer is the *same* if it is exactly the agent's action, *equal* if it has the same effect, and
*another* action otherwise. The matcher that makes pairs decides. The same action doesn't mean a
good action: both may have been wrong.

Where a gate would have stopped and asked on at a random share of the decisions, an answer stands for
as many decisions as the inverse of its propensity (Horvitz and Thompson 1952).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import msgspec

from replay_pipeline.actions import agreement_level, canonical_action
from replay_pipeline.judge.precision import wilson_interval
from replay_pipeline.redaction.printable import printable
from replay_pipeline.stages.pages.costs import Row, turn_usd
from replay_pipeline.stages.pages.overview import Facts, tools_of
from replay_pipeline.stages.pages.tree import call_shown, cut
from replay_pipeline.types import ONLY_LOOKED, TeacherAction, family_of_model

CAVEAT = (
    "The same action is not the same outcome of a session: where a model differs, it may be right or "
    "wrong, and after a different action the session would have gone on differently."
)
AGENT = "the agent itself"
_VERDICTS = ("same", "equal", "other", "invalid", "failed", "looked")


@dataclass(slots=True)
class _Tally:
    """The answers of a teacher: how many by verdict, and for how many decisions they stand."""

    n: Counter[str] = field(default_factory=Counter)
    weight: float = 0.0
    squares: float = 0.0
    nano_usd: float = 0.0
    alike: float = 0.0
    valid: float = 0.0
    valid_squares: float = 0.0
    agent_usd: float = 0.0
    n_agent_priced: int = 0

    def add(self, verdict: str, weight: float, usd: float, agent_usd: float | None) -> None:
        """Count an answer that stands for `weight` decisions."""
        self.n[verdict] += 1
        self.weight += weight
        self.squares += weight**2
        self.nano_usd += weight * round(usd * 1e9)
        if verdict in ("same", "equal", "other"):
            self.valid += weight
            self.valid_squares += weight**2
            self.alike += weight * (verdict != "other")
        if agent_usd is not None:
            self.n_agent_priced += 1
            self.agent_usd += agent_usd

    @property
    def share(self) -> float:
        """Return the share of the valid answers that are like the agent's action."""
        return self.alike / self.valid if self.valid else 0.0

    @property
    def n_effective(self) -> float:
        """Return the number of unweighted answers that would tell as much (Kish 1965)."""
        return self.valid**2 / self.valid_squares if self.valid else 0.0

    def stands_for(self, n: int) -> bool:
        """Return whether the answers may stand for `n` decisions, within two standard errors."""
        return self.weight + 2 * math.sqrt(max(self.squares - self.weight, 0)) >= n


class Comparison:
    """Adds up answers, one session at a time."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        self._latency_s: dict[str, list[float]] = {}
        self._models: dict[str, Counter[str]] = {}
        self._played: set[str] = set()
        self._n_states = 0

    def add(
        self,
        facts: Facts,
        turns: Sequence[Row],
        states: Sequence[Row],
        answers: Mapping[str, Sequence[TeacherAction]],
    ) -> dict[str, list[dict[str, Any]]]:
        """Add a session. Returns by state what the page shows about each answer."""
        by_turn = {turn["turn_idx"]: turn for turn in turns}
        shown: dict[str, list[dict[str, Any]]] = {}
        for state in states:
            given = answers.get(state["state_id"], ())
            if not given:
                continue
            self._n_states += 1
            calls = msgspec.json.decode(state["action_tool_calls_json"] or "[]")
            action = {"content": state["action_text"] or "", "tool_calls": calls}
            own = canonical_action(action, cwd=state["cwd"])
            kind = next(iter(tools_of(state)), "text")
            turn = by_turn.get(state["turn_idx"])
            usd = turn_usd(turn) if turn else None
            for answer in given:
                verdict = _verdict(own, answer, state["cwd"])
                self._count(answer, verdict, usd, kind, facts)
                shown.setdefault(state["state_id"], []).append(_answer_shown(answer, verdict))
        return shown

    def _count(
        self, answer: TeacherAction, verdict: str, agent_usd: float | None, kind: str, facts: Facts
    ) -> None:
        name = printable(answer.teacher)
        if answer.is_rehearsal:
            self._played.add(name)
        self._models.setdefault(name, Counter())[printable(answer.model or "")] += 1
        if answer.error_code is None:
            self._latency_s.setdefault(name, []).append(answer.latency_s)
        for by, value in (
            ("all", ""), ("tool", printable(kind)), ("project", facts["project"]),
            ("result", facts["result"]),
        ):  # fmt: skip
            if value is None:
                continue
            tally = self._tallies.setdefault((name, by, value), _Tally())
            tally.add(verdict, 1 / answer.propensity, answer.cost_usd, agent_usd)

    def figures(self, accuracy: Mapping[str, float] | None = None) -> dict[str, Any] | None:
        """Return the comparison, with the most similar model first; `None` without answers.

        `accuracy` is how often each family of models is right, estimated from the votes.
        """
        names = sorted({name for name, _, _ in self._tallies})
        if not names:
            return None
        teachers = [self._teacher(name, accuracy or {}) for name in names]
        teachers.sort(key=lambda each: (-each["share_alike"], each["teacher"]))
        most = self._row(max(
            ((name, "all", "") for name in names), key=lambda key: self._tallies[key].n_agent_priced
        ))  # fmt: skip
        return {
            "teachers": teachers,
            "by_tool": self._table("tool"),
            "by_project": self._table("project"),
            "by_result": self._table("result"),
            "agent_usd_per_decision": most["agent_usd_per_decision"],
            "played": sorted(self._played),
            "caveat": CAVEAT + self._said_of_fewer(teachers),
        }

    def _said_of_fewer(self, teachers: Sequence[Mapping[str, Any]]) -> str:
        """Return a sentence about teachers that were not asked everywhere, with the space before it."""
        tallies = {each["teacher"]: self._tallies[each["teacher"], "all", ""] for each in teachers}
        fewer = [name for name, tally in tallies.items() if not tally.stands_for(self._n_states)]
        if not fewer:
            if all(tally.squares == tally.weight for tally in tallies.values()):
                return ""
            return (
                " A gate left out some teachers where a cheaper one took the agent's action. At a random share "
                "of these decisions all were asked, and these answers stand for the others."
            )
        told = ", ".join(f"{name} at {tallies[name].n.total():,}" for name in fewer)
        return (
            f" Of {self._n_states:,} decisions, not all were put to everybody: {told}. Where a gate chose, "
            "a cheaper teacher had not taken the agent's action, so the share of who was asked later is "
            "too low."
        )

    def _teacher(self, name: str, accuracy: Mapping[str, float]) -> dict[str, Any]:
        model = self._models[name].most_common(1)[0][0]
        latency = sorted(self._latency_s.get(name, []))
        cuts = quantiles(latency, n=20) if len(latency) > 1 else latency * 19
        right = next(
            (accuracy[key] for key in (name, family_of_model(model) or model) if key in accuracy),
            None,
        )
        return {
            "teacher": name,
            "model": model,
            "latency_s_median": round(cuts[9], 3) if cuts else None,
            "latency_s_p95": round(cuts[18], 3) if cuts else None,
            "accuracy": right,
            **self._row((name, "all", "")),
        }

    def _row(self, key: tuple[str, str, str]) -> dict[str, Any]:
        tally = self._tallies[key]
        share, n_priced = tally.share, tally.n_agent_priced
        return {
            **{f"n_{verdict}": tally.n[verdict] for verdict in _VERDICTS},
            "n": tally.n.total(),
            "share_alike": round(share, 4),
            "interval": [round(end, 4) for end in wilson_interval(share, tally.n_effective)],
            "usd_per_decision": tally.nano_usd / 1e9 / tally.weight,
            "agent_usd_per_decision": tally.agent_usd / n_priced if n_priced else None,
        }

    def _table(self, by: str) -> list[dict[str, Any]]:
        """Return a row by tool or project, the most decisions first, with every teacher's figures."""
        groups: dict[str, dict[str, Any]] = {}
        for key in self._tallies:
            if key[1] == by:
                groups.setdefault(key[2], {})[key[0]] = self._row(key)
        rows = [{"name": name, "teachers": row} for name, row in groups.items()]
        return sorted(
            rows, key=lambda row: (-max(t["n"] for t in row["teachers"].values()), row["name"])
        )


def _verdict(own: Any, answer: TeacherAction, cwd: str | None) -> str:
    if answer.error_code in ONLY_LOOKED:
        return "looked"
    if answer.action is None:
        return "failed"
    action = canonical_action(answer.action, cwd=cwd)
    if action.invalid_reason is not None:
        return "invalid"
    level = agreement_level(own, action)
    return {"exact": "same", "effect": "equal"}.get(level or "", "other")


def _answer_shown(answer: TeacherAction, verdict: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "teacher": printable(answer.teacher),
        "verdict": verdict,
        "usd": round(answer.cost_usd, 6),
        "latency_s": round(answer.latency_s, 2),
        "parts": [],
    }
    if answer.looks:
        shown["looks"] = [
            part
            for look in answer.looks
            for call, told in zip(look.action["tool_calls"], look.answers, strict=True)
            for part in (call_shown(call["function"]), ["tool", cut(told.text)])
        ]
    if answer.action is None or verdict == "looked":
        shown["why"] = cut(answer.error_message or answer.error_code or "no answer")
    if answer.action is None:
        return shown
    if text := answer.action.get("content"):
        shown["parts"].append(["assistant", cut(text)])
    calls = answer.action.get("tool_calls") or ()
    shown["parts"] += (call_shown(call["function"]) for call in calls)
    return shown


def pooled_accuracy(reports: Iterable[Mapping[str, Any] | None]) -> dict[str, float]:
    """Return the accuracy of each rater over all batches, weighted by the batches' states."""
    sums: dict[str, list[float]] = {}
    for report in reports:
        for rater, share in ((report or {}).get("accuracy") or {}).items():
            n = (report or {})["n_states"]
            total = sums.setdefault(rater, [0.0, 0.0])
            total[0] += share * n
            total[1] += n
    return {rater: round(total / n, 3) for rater, (total, n) in sums.items() if n}
